"""How far a judge agrees with people, from the command's side."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.run_files import read_lines, write_lines
from workbench.cli.verbs import app
from workbench.errors import WorkbenchError
from workbench.recipes.verbs.judge import judge

LONGER = """awk -F'"first": "|", "second": "|"}' '{n = length($2) - length($3); print (n > 0 ? 1 : n ? 2 : 0)}'"""


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """People prefer the longer answer in 12 of 16 pairs, and call two ties."""
    rows = [
        {
            "prompt": f"Why {n}?",
            "chosen": "x" * (9 if n < 12 else 2) + str(n),
            "rejected": "y" * 4 + str(n),
            "tie": n > 13,
        }
        for n in range(16)
    ]
    return str(write_lines(tmp_path / "pairs.jsonl", rows))


def test_it_is_compared_with_what_people_chose(pairs: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    found = judge(LONGER, pairs, out=out)
    assert (found["pairs"], found["order_agreement"], found["first_chosen"]) == (16, 1, 0.5)
    assert (
        found["agreement"] == 12 / 16
        and found["decided"] == 1
        and found["agreement_decided"] == pytest.approx(12 / 14, abs=1e-6)
    )
    assert 0 < found["kappa_low"] < found["kappa"] < found["kappa_high"]
    rows = read_lines(out)
    assert {row["people"] for row in rows} == {0, 1, 2}, "people's choice stands in front or behind"
    assert sum(row["people"] == row["judge"] for row in rows) == 12


def test_a_judge_that_decides_by_position_decides_nothing(pairs: str) -> None:
    found = judge("sed s/.*/2/", pairs)
    assert (found["decided"], found["order_agreement"], found["first_chosen"]) == (0, 0, 0)
    assert found["agreement"] == 2 / 16 and "agreement_decided" not in found, "the ties alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://localhost:1/v1"], "which model there? Write --model NAME"),
        (["sed s/.*/1/", "--out", "x.csv"], "written as .jsonl"),
        (["sed s/.*/1/", "train.steps=3"], "reads data.* of a configuration alone"),
        (["sed s/.*/7/"], "wrote '7' in line 1"),
    ],
)
def test_mistakes(words: list[str], message: str, pairs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["judge", words[0], pairs, *words[1:]])
    assert isinstance(ended.exception, WorkbenchError) and message in str(ended.exception)


def test_rows_of_one_answer_are_refused(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "Why?", "completion": "So.", "label": True}])
    with pytest.raises(WorkbenchError, match="no row has two answers"):
        judge("sed s/.*/1/", str(rows))
