"""A run against another one, from the command's side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.errors import DataError
from workbench.models import exported
from workbench.recipes.win_rate import Contest, win_rate


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"What comes after {n}?", "answer": str(n + 1)}) + "\n" for n in range(4))
    )
    return path


def test_a_run_and_itself_are_even(trained: Path, asked: Path, tmp_path: Path) -> None:
    word = "{kind: regex, pattern: 'It is'}"
    contest = Contest((word,), max_new_tokens=12, out=tmp_path / "answers.jsonl")
    found = win_rate(trained, trained, [f"data.test={asked}"], contest)
    assert (found["win_rate"], found["ties"], found["reward"]) == (0.5, 1, found["reward_other"])
    assert found["win_rate_low"] < 0.5 < found["win_rate_high"]
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["answer"] == row["other"] and row["win"] == 0.5 for row in rows)
    judged = win_rate(trained, trained, [f"data.test={asked}"], Contest(judge="sed s/.*/1/", max_new_tokens=2))
    assert judged["win_rate"] == 0.5 and judged["order_agreement"] == 0


def test_prompts_of_all_files_are_answered(trained: Path, asked: Path) -> None:
    second = asked.with_name("second.jsonl")
    second.write_text(json.dumps({"question": "And then?", "answer": "Nothing."}) + "\n")
    contest = Contest(("number",), max_new_tokens=1)
    with pytest.raises(DataError, match=r"second.jsonl, row 1: .* holds no number"):
        win_rate(trained, trained, [f"data.test={{one: {asked}, two: {second}}}"], contest)


def test_rows_that_are_left_out_are_counted(trained: Path, asked: Path) -> None:
    rows = asked.read_text()
    asked.with_name("some.jsonl").write_text(rows + json.dumps({"question": "", "answer": "Nothing."}) + "\n")
    words = [f"data.test={asked.with_name('some.jsonl')}", "data.on_bad_row=skip"]
    contest = Contest(("{kind: regex, pattern: It}",), max_new_tokens=1)
    assert win_rate(trained, trained, words, contest)["rows_skipped"] == 1
    assert "rows_skipped" not in win_rate(trained, trained, [f"data.test={asked}"], contest)


def test_a_missing_column_is_told_before_anything_is_answered(
    trained: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match=r"asked.jsonl, row 1: no column `right`"):
        win_rate(trained, trained, [f"data.test={asked}"], Contest(("{kind: number, answer: right}",)))
