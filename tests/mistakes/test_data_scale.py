"""Mistakes where many rows are prepared by several processes end in status 2, with place and cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines
from workbench.data import ordered_processes
from workbench.data.text import tokenized

ROWS = [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(200)]
NO_ANSWER = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "loss": False}]}
CHATS = [{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"{n}"}]} for n in ROWS]


def processes(count: str) -> Case:
    return Case("check my.yaml", f"WORKBENCH_PROCESSES={count}", "Write WORKBENCH_PROCESSES=1 or more")


CASES = {
    "no process": ("0", processes("0")),
    "processes in words": ("two", processes("two")),
    "fewer than none": ("-1", processes("-1")),
    "a malformed row": (
        "3",
        Case(
            "check my.yaml data.train=bad.jsonl",
            "bad.jsonl, row 151: `answer` is missing or null",
            "data.on_bad_row=skip",
            lines([*ROWS[:150], {"question": "What?", "answer": None}, *ROWS[150:]]),
        ),
    ),
    "a row without loss": (
        "3",
        Case(
            "check my.yaml data.train=bad.jsonl",
            "bad.jsonl, row 151: no token carries loss",
            "Give it an answer",
            lines([*CHATS[:150], NO_ANSWER, *CHATS[150:]]),
        ),
    ),
    "rows that are cut to nothing": (
        "3",
        Case(
            "check my.yaml data.train=bad.jsonl data.max_tokens=9 data.truncate=right",
            "as in 200 of 200 examples (100%)",
            "data.truncate=left",
            lines(ROWS),
        ),
    ),
}


STARTS_PROCESSES = ("a malformed row", "a row without loss", "rows that are cut to nothing")
"""Told by processes that share the rows, as `test_tokenized.py` does in the slow suite."""


@pytest.mark.parametrize(
    ("count", "case"),
    [
        pytest.param(
            *case,
            id=name,
            marks=pytest.mark.nightly if name in STARTS_PROCESSES else (),
        )
        for name, case in CASES.items()
    ],
)
def test_the_message_says_where_and_what_to_write(
    count: str,
    case: Case,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))
    monkeypatch.setenv(ordered_processes.VARIABLE, count)
    monkeypatch.setattr(tokenized, "ROWS", 16)
    monkeypatch.setattr(ordered_processes, "OWN", 2)
    assert_refused(case, folder, monkeypatch, capsys)
    assert not list(cache.rglob("*.arrow"))
