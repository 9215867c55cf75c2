"""Two runs of one task are compared on the same rows, whatever tokens and backbones they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import workbench
from tests.conftest import MINILM, write_questions
from tests.recipes.over.test_distill import LORA, _config
from tests.recipes.tasks.tag.tagged_sentences import make_home, sections
from tests.run_files import read_scores, write_lines
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.evaluation import comparison, held_out_losses
from workbench.recipes.verbs.paired_evaluation import paired
from workbench.report import run_record


def _texts(home: Path, stories: str) -> list[dict[str, Any]]:
    rows = write_questions(home / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(60)])
    both = [
        _config(model, rows, recipe="sft", model={"id": model, "weights": "float32"}) for model in (stories, "starter")
    ]
    return [each.model_dump(mode="json") for each in both]


def _classes(home: Path, stories: str) -> list[dict[str, Any]]:
    lines = [
        {"text": f"{n} {word} things", "label": kind} for n in range(40) for word, kind in (("red", "a"), ("blue", "b"))
    ]
    rows = write_lines(home / "rows.jsonl", lines)
    own = {"data": {"train": str(rows), "held_out": 0.3}, "adapter": LORA, "train": {"steps": 6, "learning_rate": 1e-2}}
    return [{"recipe": "classify", "model": {"id": model, "weights": "float32"}, **own} for model in (MINILM, stories)]


def _tags(home: Path, stories: str) -> list[dict[str, Any]]:
    make_home(home)
    other = {"model": {"id": MINILM, "weights": "float32"}, "train": {"epochs": 2, "learning_rate": 1e-3}}
    return [sections(home), sections(home, **other)]


@pytest.mark.slow
@pytest.mark.nightly(but=["_tags"])
@pytest.mark.parametrize("task", [_texts, _classes, _tags])
def test_both_are_scored_on_the_rows_of_the_first(task: Any, short_stories: str, tmp_path: Path) -> None:
    values = [
        {**each, "evaluate": {"every": None, "answers": 8, "max_new_tokens": 4}}
        for each in task(tmp_path, short_stories)
    ]
    runs = [
        workbench.run(RunConfig.model_validate(each), out=tmp_path / str(n), quiet=True)
        for n, each in enumerate(values)
    ]
    before = {path: path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file()}
    found, notes = paired(runs[0], runs[1])
    kept = [run_record.read(run) for run in reversed(runs)]  # what the runs themselves said of the same rows
    wanted = comparison.compare(*(each.predictions for each in kept))
    losses = [held_out_losses.read(each.folder) for each in kept]
    if losses[0] is not None and losses[1] is not None:
        loss = held_out_losses.compare(losses[0], losses[1])
        assert isinstance(loss, str) and notes == [f"No paired difference of the loss, for {loss}."]
    assert [each.name for each in found] == [each.name for each in wanted] and found
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.first, mine.second) == pytest.approx((theirs.first, theirs.second), abs=1e-3)
        assert mine.rows == theirs.rows
    said = CliRunner().invoke(app, ["evaluate", str(runs[0]), "--against", str(runs[1])], env={"COLUMNS": "200"})
    assert said.exit_code == 0 and "On the same rows" in said.output and f"{found[0].difference:+.4f}" in said.output
    assert {path: path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file()} == before
    assert found[-1].second == pytest.approx(
        read_scores(runs[0])["after"].get(found[-1].name, found[-1].second), abs=1e-3
    )


def test_runs_of_other_tasks_are_refused(tmp_path: Path) -> None:
    for name, recipe, rows in (("a", "sft", "rows.jsonl"), ("b", "classify", "rows.csv")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"recipe: {recipe}\ndata: {{train: {rows}}}\n")
    with pytest.raises(ConfigError, match=r"b is of recipe classify, and two runs of one task .* `workbench compare`"):
        paired(tmp_path / "a", tmp_path / "b")
