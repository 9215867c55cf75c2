"""From the command line: `check` lists contaminated rows, `run` drops them and says so wherever it reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.run_files import write_lines
from workbench.cli.verbs import main
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check

QUESTION = "What do you call a young cat that lives in the old barn by the river?"
EVALUATION = [{"question": QUESTION, "answer": "A barn kitten."}, {"question": "Why is it so?", "answer": "Nobody."}]
PLANTED = [
    {"question": f"Tell me, please: {QUESTION.upper().replace(' ', '  ')} I wonder.", "answer": "No idea."},
    {"question": "why is it so", "answer": "nobody!"},
]
CLEAN = [{"question": f"How many are {n} and {n}?", "answer": f"They are {2 * n}."} for n in range(12)]
ANIMALS = ("cat", "dog")
RECIPE = """
recipe: sft
model: {id: STORIES, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: other.jsonl, decontaminate: {action: drop}}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null, answers: 0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe, rows of which two are contaminated, and evaluation rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE.replace("STORIES", stories))
    write_lines("rows.jsonl", [CLEAN[0], PLANTED[0], *CLEAN[1:], PLANTED[1]])
    write_lines("other.jsonl", EVALUATION)
    return tmp_path


def _finish() -> None:
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def test_run_drops_what_it_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", "run", "my.yaml", "--out", "one"])
    _finish()
    listed = json.loads((folder / "one/contamination.json").read_text())
    assert [match["train"] for match in listed["matches"]] == ["rows.jsonl, row 2", "rows.jsonl, row 14"]
    assert [match["evaluation"] for match in listed["matches"]] == ["other.jsonl, row 1", "other.jsonl, row 2"]
    facts = json.loads((folder / "one/manifest.json").read_text())["data"]["train"]
    assert facts["rows"] == 12 and facts["contamination"]["contaminated"] == 2
    page = (folder / "one/report.html").read_text()
    assert "Contamination: 2 of 14 training rows" in page and "young cat that lives" in page


def test_check_lists_rows_that_are_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", "check", "my.yaml", "data.decontaminate.action=keep"])
    _finish()
    said = " ".join(capsys.readouterr().out.split())
    assert "Contamination: 2 of 14 training rows hold text of data.held_out; kept." in said
    assert "rows.jsonl, row 2 holds 100% of other.jsonl, row 1" in said


def test_files_to_compare_with_need_not_be_scored() -> None:
    words = ["data.held_out=0.2", "data.decontaminate.against=[other.jsonl]"]
    found = check(load("my.yaml", words)).data.train
    assert found.contamination is not None and found.contamination.sets == {"data.held_out": 3, "other.jsonl": 2}
    assert {match.source for match in found.contamination.matches} <= {"data.held_out", "other.jsonl"}


@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_labelled_rows_are_compared_with_test_rows(recipe: str) -> None:
    texts = [f"The {name} " + " ".join(f"w{n}{letter}" for letter in name * 3) for n in range(8) for name in ANIMALS]
    rows = [{"text": text, "label": text.split()[1]} for text in texts]
    leak = "A fox jumps over one lazy brown hound at noon every single day"
    planted = {"text": f"They say: {leak.upper()}! And then again it does not.", "label": "dog"}
    write_lines("rows.jsonl", [*rows, planted])
    write_lines("test.jsonl", [{"text": leak, "label": "dog"}])
    words = [f"recipe={recipe}", "data.test=test.jsonl", "data.held_out=0.25", "data.max_tokens=128"]
    words += ["of=classify", "duplicates.on_duplicate=ignore", "folds.k=2"] if recipe == "crossval" else []
    words = [word for word in words if not (recipe == "crossval" and "held_out" in word)]
    text = Path("my.yaml").read_text().replace("held_out: other.jsonl, ", "").replace(", answers: 0", "")
    Path("my.yaml").write_text(text)
    data = check(load("my.yaml", words)).data
    train = data.rows if recipe == "crossval" else data.train
    assert [match.train for match in train.contamination.matches] == ["rows.jsonl, row 17"]
    assert "rows.jsonl, row 17" not in [record.place for record in train.records]


@pytest.mark.parametrize("recipe", ["reinforce", "rounds", "prefer"])
def test_prompts_are_compared_with_test_sets(recipe: str) -> None:
    """Of rows that a model answers, whose own answers are not read, and of pairs, either answer."""
    judged = {"chosen": "Yes, it is so.", "rejected": "No, it is not."}
    rows = [CLEAN[0], PLANTED[0], *CLEAN[1:]] if recipe != "prefer" else [
        {"prompt": each["question"], "chosen": f"{each['answer']} Yes.", "rejected": f"{each['answer']} No."}
        for each in (CLEAN[0], PLANTED[0], *CLEAN[1:])
    ]  # fmt: skip
    tests = [{"prompt": QUESTION, **judged}] if recipe == "prefer" else [{"question": QUESTION, "answer": "Another."}]
    write_lines("rows.jsonl", rows[:-3])
    write_lines("held_out.jsonl", rows[-3:])
    write_lines("test.jsonl", tests)
    words = [
        f"recipe={recipe}",
        "data.held_out=held_out.jsonl",
        "data.decontaminate.against=[test.jsonl]",
        "batch.size=2",
    ]
    words += ["batch.size=2"]
    words += {
        "reinforce": ["rewards=[{kind: regex, pattern: y}]", "reinforce.answers=2", "reinforce.max_new_tokens=2"],
        "rounds": ["of=sft", "rounds.score=[{kind: regex, pattern: y}]"],
        "prefer": ["prefer.beta=0.1"],
    }[recipe]
    found = check(load("my.yaml", words))
    assert "row 2" not in {place.split(", ")[1] for place in found.data.train.places()}
    assert any("Contamination: 1 of" in note for note in found.notes)
