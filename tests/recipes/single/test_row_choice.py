"""Runs on the rows that the backbone chooses: the same after a restart, and those that its scores say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.conftest import trains, write_animals
from tests.stopping import stop_after
from workbench.cli.console import Terminal
from workbench.errors import Stopped
from workbench.evaluation import perplexity
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan
from workbench.training import influence

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1, limit: 80, select: {{by: perplexity, rows: 24}}}}
batch: {{size: 8}}
train: {{steps: 6}}
evaluate: {{every: null, answers: 0}}
save: {{every: 2}}
"""


LABELS = """
recipe: classify
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.2, select: {{by: gradient, rows: 20, warm_up: 0.2}}}}
batch: {{size: 8}}
train: {{steps: 6}}
evaluate: {{every: null, probe: 0}}
save: {{every: 2}}
"""


@pytest.fixture
def train(tmp_path: Path, stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=stories, train=questions)


def aimed(folder: Path, questions: Path) -> list[str]:
    """Words that choose by gradient, for some other rows."""
    rows = questions.read_text(encoding="utf-8").splitlines()[90:93]
    (folder / "target.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return ["data.select.by=gradient", f"data.select.target={folder}/target.jsonl", "data.select.warm_up=0.2"]


@pytest.mark.nightly(but=["sft"])
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "classify"])
def test_a_run_trains_on_the_rows_of_most_influence_and_goes_on_where_it_was_stopped(
    tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    if recipe == "sft":
        train = trains(tmp_path, RECIPE, model=short_stories, train=questions)
        words = [*aimed(tmp_path, questions), "data.limit=56"]
    else:
        train = trains(tmp_path, LABELS, model=short_stories, train=write_animals(tmp_path / "rows.jsonl", range(60)))
        write_animals(tmp_path / "target.jsonl", range(60, 65))
        words = [f"data.select.target={tmp_path}/target.jsonl"]
    table = pd.read_parquet(train(*words, name="whole") / "selection.parquet")
    assert table["score"].abs().max() < 1 and table["score"].nunique() > 0.85 * len(table) and len(table) > 40
    if recipe == "sft":
        assert table[table["kept"]]["score"].min() >= table[~table["kept"]]["score"].max()
    computed, real = list[int](), influence.at_checkpoint

    def stopping(*anything: Any, **rows: Any) -> Iterator[tuple[int, list[float]]]:
        for row, value in real(*anything, **rows):
            computed.append(row)
            yield row, value

    with monkeypatch.context() as patch:
        patch.setattr(influence, "at_checkpoint", stopping)
        patch.setattr(Terminal, "stop_requested", lambda _: len(computed) == 100)
        with pytest.raises(Stopped):
            train(*words, name="broken")
        again = train(*words, name="broken", resume=True)
    assert pd.read_parquet(again / "selection.parquet").equals(table) and len(computed) == 4 * len(table)


@pytest.mark.nightly(but=["ifd"])
@pytest.mark.parametrize("by", ["perplexity", "ifd"])
def test_a_run_trains_on_the_rows_with_the_wanted_scores(train: Callable[..., Path], by: str) -> None:
    run = train(f"data.select.by={by}")
    table = pd.read_parquet(run / "selection.parquet")
    visits = pd.read_parquet(run / "dynamics.parquet")
    assert set(visits["row"]) == set(table["place"][table["kept"]]) and table["kept"].sum() == 24
    kept, others = table[table["kept"]]["score"], table[~table["kept"]]["score"]
    if by == "ifd":
        assert kept.max() < 1 and others[others < 1].max() < kept.min()
    else:
        below, above = others[others <= kept.median()], others[others > kept.median()]
        assert below.max() <= kept.min() and above.min() >= kept.max()


def test_a_resumed_run_reads_its_choice_instead_of_making_it_again(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(name="whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train(name="broken")

    def again(*_: object, **__: object) -> Any:
        raise AssertionError("the rows were chosen already")

    monkeypatch.setattr(perplexity, "row_scores", again)
    broken = train(name="broken", resume=True)
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, broken)
    ]
    assert losses[0] == losses[1]


def test_a_plan_takes_as_many_rows_without_reading_any(train: Callable[..., Path], tmp_path: Path) -> None:
    planned = plan(load(str(tmp_path / "recipe.yaml"), ["train.steps=null", "train.epochs=1"]))
    assert planned.steps == np.ceil(24 / 8)
