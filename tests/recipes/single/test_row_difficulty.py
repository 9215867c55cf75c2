"""Runs that order their rows by a column, a function, the backbone or their own losses: resumed, and as they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, trains
from tests.run_files import read_losses, read_metrics, write_lines
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.data.row_order import RowOrder
from workbench.data.text import tokenized
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import Stopped
from workbench.evaluation import perplexity
from workbench.models import backbones
from workbench.recipes.load import load
from workbench.recipes.single import row_difficulty
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.plans.plan import plan

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1, limit: 28, curriculum: {{by: perplexity}}}}
batch: {{size: 5}}
train: {{steps: 10}}
evaluate: {{every: null, answers: 0, dynamics: true}}
save: {{every: 1}}
"""


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


@pytest.fixture
def recipe(train: Callable[..., Path], tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def visits(run: Path) -> dict[str, int]:
    table = pd.read_parquet(run / "dynamics.parquet")
    return dict(zip(table["row"], table["visits"], strict=True))


@pytest.mark.nightly(but=["self_paced"])
@pytest.mark.parametrize("by", ["perplexity", "self_paced"])
def test_a_stopped_run_goes_on_to_the_same_bits(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    words = [f"data.curriculum.by={by}"]
    whole = train(*words, name="whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Stopped):
            train(*words, name="broken")

    def again(*_: object, **__: object) -> Any:
        raise AssertionError("the rows were read already")

    monkeypatch.setattr(perplexity, "row_scores", again)
    broken = train(*words, name="broken", resume=True)
    assert read_losses(whole) == read_losses(broken)
    assert sum(visits(whole).values()) == 10 * 5 and set(visits(whole).values()) == {2}
    if by == "perplexity":
        table = pd.read_parquet(whole / "difficulty.parquet")
        rows = replace(read(load(str(whole / "config.yaml"))), difficulty=table["loss"].to_numpy())
        order = RowOrder(rows, load(str(whole / "config.yaml")), 10)
        trained = [each["tokens"] for each in read_metrics(whole)]
        assert trained == [int(rows.lengths[order.rows(step)].sum()) for step in range(10)]
        assert list(rows.places()) == table["place"].tolist()


@pytest.mark.slow
def test_labelled_rows_begin_with_those_that_a_probe_of_the_backbone_tells_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own line says how hard each row is; a resumed run asks nobody; off, no row has a difficulty."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    rows = [
        {"text": f"{word} number {number}", "label": word} for number in range(20) for word in ("dog", "cat", "fox")
    ]
    for row in rows[:6]:
        row["label"] = "cat"
    write_lines(tmp_path / "rows.jsonl", rows)
    words = [f"data.train={tmp_path}/rows.jsonl", "data.held_out=0.1", "model.weights=float32", "train.steps=8"]
    words += ["batch.size=6", "evaluate={every: null, probe: 0, dynamics: true}", "save.every=1"]
    words += ["data.curriculum={by: loss, start: 0.5, until: 1, pace: linear}", f"model.id={MINILM}"]

    def train(name: str, *, resume: bool = False) -> Path:
        return workbench.run("classify/quickstart", words, out=tmp_path / name, resume=resume, quiet=True)

    whole = train("whole")
    table = pd.read_parquet(whole / "difficulty.parquet")
    wrong_N = table["place"].str.extract(r"row (\d+)$")[0].astype(int).isin([1, 3, 4, 6])
    assert wrong_N.any() and table["loss"][wrong_N].mean() > 2 * table["loss"][~wrong_N].mean()
    lines = read_metrics(whole)
    assert [line["open_share"] for line in lines] == sorted(line["open_share"] for line in lines)
    assert lines[0]["open_share"] == pytest.approx(0.5, abs=0.02)
    assert "Rows open by data.curriculum" in (whole / "report.html").read_text()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train("broken")
    monkeypatch.setattr("workbench.evaluation.frozen_features.cached_features", None)  # asks nobody
    assert read_losses(train("broken", resume=True)) == read_losses(whole)


def read(config: RunConfig) -> TokenizedSet:
    """The training rows of a run."""
    tokenizer = backbones.tokenizer(config.model)
    encoder = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=None)
    return tokenized.load(config.data, tokenizer, encoder, seed=config.seed).train


def test_each_row_has_the_number_of_its_own_line(recipe: Path, tmp_path: Path) -> None:
    """Rows that are held out, skipped or cut into several leave those of the others where they are."""
    lines = []
    for number in range(30):
        turns = [{"role": role, "content": f"{role} {number}"} for role in ("user", "assistant") * (1 + number % 2)]
        lines.append({"messages": turns if number % 7 else [], "number": number})
    write_lines(tmp_path / "chats.jsonl", lines)
    words = [f"data.train={tmp_path}/chats.jsonl", "data.on_bad_row=skip", "data.limit=28"]
    words += ["data.curriculum.by=column", "data.curriculum.column=number"]
    config = load(str(recipe), words)
    rows = read(config)
    found = row_difficulty.graded(rows, config).difficulty
    assert found is not None
    numbers = [int(place.split("row ")[1].split(",")[0]) - 1 for place in rows.places()]
    assert found.tolist() == numbers and len(numbers) < 28


@pytest.mark.parametrize("by", ["perplexity", "loss"])
def test_check_tells_no_difficulty_that_a_run_is_still_to_measure(recipe: Path, by: str) -> None:
    """Chance stands in for it until then, and its numbers are nobody's."""
    own = ["classify/quickstart", "data.limit=300", "evaluate.probe=0"] if by == "loss" else [str(recipe)]
    notes = check(load(own[0], [*own[1:], f"data.curriculum.by={by}"])).notes
    after = notes[1 + next(at for at, note in enumerate(notes) if note.startswith("Curriculum: ")) :]
    assert "A run begins with reading all rows to find it" in after[0]
    assert not any("owest" in note for note in after)


def test_a_plan_reads_no_row(recipe: Path) -> None:
    assert plan(load(str(recipe), ["train.steps=null", "train.epochs=1"])).steps == np.ceil(25 / 5)
