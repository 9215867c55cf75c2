"""Mistakes with `sample` and its teachers end in status 2 and a message with place and cure, and leave no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_teacher import FakeServer, server
from tests.mistakes.cases import assert_refused_with
from tests.run_files import write_lines
from workbench.runs import openai_client

__all__ = ["server"]
HERE, NOBODY = "URL rows.jsonl --model teacher", "http://127.0.0.1:9/v1 rows.jsonl --model teacher"
CASES = {
    "nobody there": (NOBODY, "TEACHER=http://127.0.0.1:9/v1 does not answer", "Start the server, or correct the"),
    "no model": ("URL rows.jsonl", "which model there?", "Write --model NAME"),
    "unknown model": ("URL rows.jsonl --model nobody", "--model=nobody is no model of", "It has: teacher."),
    "no key": ("URL/locked rows.jsonl --model teacher", "the key is missing", "Set OPENAI_API_KEY to its key"),
    "another path": ("URL/other rows.jsonl --model teacher", "was answered with status 418", "up to /v1"),
    "no address": ("http:// rows.jsonl --model teacher", "TEACHER: 'http://'", "such as http://localhost:8000/v1"),
    "no address either": ("http://[ rows.jsonl --model teacher", "TEACHER", "such as http://localhost:8000/v1"),
    "a key in the address": (
        "http://me:sesame@127.0.0.1/v1 rows.jsonl --model teacher",
        "TEACHER: an address holds no key",
        "set OPENAI_API_KEY to it",
    ),
    "a key in the query": ("URL?key=sesame rows.jsonl --model teacher", "an address holds no key", "OPENAI_API_KEY"),
    "a model of a folder": ("starter rows.jsonl --model teacher", "is for an address", "Leave it out"),
    "requests to a folder": ("starter rows.jsonl --at-once 8", "starter: answers here", "--at-once"),
    "too many at once": (f"{HERE} --at-once 1000", "--at-once", "less than or equal to 100"),
    "one price": (f"{HERE} --price 1", "price", "write two prices"),
    "a price in words": (f"{HERE} --price cheap,dear", "price", "number"),
    "no rows": ("URL row.jsonl --model teacher", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "no prompts in them": ("URL other.jsonl --model teacher", "other.jsonl", "prompt"),
    "a column that is not there": (f"{HERE} 'data.columns={{question: q}}'", "`q`", "data.columns"),
    "pairs of equals": (f"{HERE} --to pairs", "--to pairs compares rewards", "Write --score number"),
    "least of nothing": (f"{HERE} --least 1", "--least 1 compares rewards", "Write --score number"),
    "a training": (f"{HERE} train.epochs=2", "train.epochs=2: sample reads", "data."),
    "a column to score": (f"{HERE} --score number", "no column `answer`", "Name another one"),
    "no prompt in it": (
        f"{HERE} --wording 'Think: {{}}'",
        "{prompt} does not stand in it",
        "--wording '{prompt} Think",
    ),
    "another case": (f"{HERE} --wording '{{Prompt}}?'", "{prompt} does not stand in it", "--wording '{prompt} Think"),
    "a column in it": (f"{HERE} --wording '{{prompt}} {{context}}'", "{context} names nothing", "Leave the braces out"),
    "empty braces": (f"{HERE} --wording '{{prompt}} {{}}'", "{} names nothing", "Leave the braces out"),
    "one wording twice": (f"{HERE} --wording '{{prompt}}' --wording '{{prompt}}'", "given twice", "a higher --n"),
    "no wording": (f"{HERE} --wording ''", "{prompt} does not stand in it", "Write it where the prompt belongs"),
    "no answers": (f"{HERE} --n 0", "--n", "1"),
    "no run": ("runs/none rows.jsonl", "runs/none: not a run directory", "workbench ls runs"),
    "no such model": ("./none rows.jsonl", "not a run directory", "workbench ls runs"),
    "a file": ("rows.jsonl rows.jsonl", "rows.jsonl: not a run directory", "workbench ls runs"),
}


@pytest.mark.parametrize(("words", "place", "cure"), CASES.values(), ids=CASES)
def test_a_mistake_is_told(
    server: FakeServer,
    words: str,
    place: str,
    cure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 7)
    write_lines("rows.jsonl", [{"question": f"What comes after {n}?"} for n in range(3)])
    write_lines("other.jsonl", [{"foo": "bar"}])
    (tmp_path / "runs").mkdir()
    before = sorted(tmp_path.iterdir())
    told = assert_refused_with(
        (place, cure), f"sample {words.replace('URL', server.url)} --out out.jsonl", monkeypatch, capsys
    )
    assert sorted(tmp_path.iterdir()) == before and "sesame" not in told
    assert not server.asked
