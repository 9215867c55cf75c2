"""Runs over rows that count unequally, by a column of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_scores, write_lines
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 2, alpha: 4}}
data: {{train: rows.jsonl, held_out: held_out.jsonl, columns: {{weight: w}}}}
batch: {{size: 6}}
train: {{steps: 3, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""
ROWS = [{"question": f"Tell of {n}.", "answer": "It was " + "big and " * n + "good."} for n in range(6)]
TIMES = [1, 3, 2, 1, 4, 1]

Train = Callable[..., Path]


def weighted(weights: list[Any]) -> list[dict[str, Any]]:
    return [{**row, "w": weight} for row, weight in zip(ROWS, weights, strict=True)]


@pytest.fixture
def train(tmp_path: Path, short_stories: str, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=short_stories))
    write_lines(tmp_path / "held_out.jsonl", [{"question": "And then?", "answer": "They went home."}])

    def run(name: str, rows: list[dict[str, Any]], *overrides: str) -> Path:
        write_lines(tmp_path / "rows.jsonl", rows)
        return workbench.run(tmp_path / "recipe.yaml", overrides, out=tmp_path / name, quiet=True)

    return run


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_a_row_of_weight_w_is_the_row_w_times_and_no_micro_batch_changes_that(train: Train) -> None:
    """The global batch is the whole file, in which rows are either weighed or repeated."""
    weighed = train("weighed", weighted(TIMES))
    repeated = [row for row, times in zip(ROWS, TIMES, strict=True) for _ in range(times)]
    often = train("often", repeated, "data.columns={}", f"batch.size={sum(TIMES)}")
    assert read_losses(weighed) == pytest.approx(read_losses(often), rel=1e-5)
    small = train("small", weighted(TIMES), "batch.tokens_per_device=64", "batch.packing=false")
    assert read_losses(small) == pytest.approx(read_losses(weighed), rel=1e-5)
    tenths = train("tenths", weighted([str(times / 10) for times in TIMES]))
    assert read_losses(tenths) == pytest.approx(read_losses(weighed), rel=1e-5), "only ratios count"
    plain = train("plain", ROWS, "data.columns={}")
    assert abs(read_losses(plain)[0] - read_losses(weighed)[0]) > 1e-3
    before = [read_scores(run)["before"] for run in (weighed, plain)]
    assert before[0] == before[1], "held-out rows count once each"


def test_equal_weights_change_no_bit_and_a_column_that_is_ignored_is_not_read(train: Train) -> None:
    unnamed = [{**row, "weight": weight} for row, weight in zip(ROWS, TIMES, strict=True)]
    plain, equal = (
        train("plain", unnamed, "data.columns={}", "data.ignore=[weight]"),
        train("equal", weighted([0.3] * 6)),
    )
    assert all(torch.equal(tensor, adapter(plain)[name]) for name, tensor in adapter(equal).items())
    assert read_losses(equal) == read_losses(plain)


@pytest.mark.slow
def test_hidden_tokens_are_weighed_by_their_row(train: Train, tmp_path: Path) -> None:
    """One row counts a million times more than the others: the loss is its own."""
    encoder = save_tiny(tmp_path / "encoder", "Bert", "MaskedLM", MINILM, max_position_embeddings=512)
    texts = [{"text": row["answer"] * 4, "w": 1e6 if n == 3 else 1.0} for n, row in enumerate(ROWS)]
    on = ["recipe=mlm", f"model.id={encoder}", "data.held_out=0.2", "train.learning_rate=1e-9", "train.steps=1"]
    heavy = read_losses(train("heavy", texts, *on, "data.columns={weight: w}"))
    assert heavy != read_losses(train("even", texts, *on, "data.columns={}"))
    assert heavy == pytest.approx(read_losses(train("cut", texts, *on, "batch.tokens_per_device=64")), rel=1e-5)


def test_check_says_what_weights_do(train: Train, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", weighted(TIMES))
    notes = check(load("recipe.yaml", ())).notes
    assert any(note.startswith("Weights: a training row counts 1 to 4 times (mean 2)") for note in notes)


@pytest.mark.slow
def test_members_of_a_sweep_of_text_train_one_after_another(train: Train) -> None:
    on = ["recipe=sweep", "sweep.over={train.learning_rate: [1.0e-4, 2.0e-3]}", "evaluate.every=0.5"]
    run = train("sweep", weighted(TIMES), *on)
    alone = train("alone", weighted(TIMES))
    assert read_losses(next((run / "members").glob("*0.002*"))) == pytest.approx(read_losses(alone), rel=1e-6)


def test_near_duplicates_that_weigh_less_do_so_beside_a_column(tmp_path: Path) -> None:
    """crossval: 1 / size of a cluster times the row's own weight."""
    from workbench.data.labelled import fold_data
    from workbench.models import classifier

    said = ["It rains on the hill.", "Snow lies in the town.", "A storm comes from the sea.", "The ice is thin today."]
    rows = [{"text": text, "label": "ab"[n % 2], "w": 1 + n} for n, text in enumerate(said)]
    rows.append({**rows[0], "w": 5})
    write_lines(tmp_path / "rows.jsonl", rows)
    overrides = [f"data.train={tmp_path}/rows.jsonl", "data.columns={weight: w}", "duplicates.on_duplicate=weight"]
    config = load("crossval/quickstart", [*overrides, "folds.k=2"])
    found = fold_data.load(config, classifier.reader_of_backbone(config)).rows
    np.testing.assert_allclose(found.supervised, [0.5, 2, 3, 4, 2.5])
