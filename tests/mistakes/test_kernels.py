"""Mistakes with `train.kernels` end in status 2, with place and cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines

LIGER = "check my.yaml train.kernels=liger"
ROWS = lines([{"question": f"How much is {n} and {n}?", "answer": f"{2 * n}."} for n in range(40)], "rows.jsonl")
CASES = {
    "a peer's name": Case("check my.yaml train.use_liger_kernel=true", "unknown key", "train"),
    "no such kernels": Case("check my.yaml train.kernels=unsloth", "train.kernels", "liger"),
    "compiled": Case(f"{LIGER} train.compile=true", "train.compile writes its own", "train.compile=false"),
    "noted operations": Case(f"{LIGER} train.checkpointing=elementwise", "overwrites", "train.checkpointing=true"),
    "weights in shares": Case(f"{LIGER} distributed.zero=3", "weights that devices share", "distributed={zero: 2}"),
    "no accelerator": Case(LIGER, "computes on its CPU", "train.kernels=auto", ROWS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)
