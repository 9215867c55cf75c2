"""Losses of single rows are those that the step averages, change nothing, and survive restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import trains
from tests.run_files import read_losses, read_metrics
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.data.batching import Row, collate
from workbench.errors import Stopped
from workbench.losses.label_losses import LabelLosses, LabelTap
from workbench.runs.ranks import ALONE
from workbench.training.checkpoints import Checkpointed
from workbench.training.row_losses import RowLosses, RowLossWatch, VisitRecord, record

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.1, limit: 40}}
batch: {{size: 8}}
train: {{steps: 12, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 5}}
"""


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


@pytest.fixture
def plain(train: Callable[..., Path]) -> Path:
    return train(name="plain")


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def checkpoint(run: Path) -> dict[str, Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "dynamics.safetensors")


def test_recording_changes_no_bit_of_the_training(train: Callable[..., Path], plain: Path) -> None:
    silent = train("evaluate.dynamics=false", name="silent")
    assert not (silent / "dynamics.parquet").exists() and (plain / "dynamics.parquet").exists()
    assert all(torch.equal(tensor, adapter(plain)[name]) for name, tensor in adapter(silent).items())
    assert read_losses(silent) == read_losses(plain)


def test_the_losses_of_a_step_are_those_of_its_rows(train: Callable[..., Path]) -> None:
    """Without dropout and with a rate of next to nothing, a row's loss is the same at every visit."""
    still = train("adapter.dropout=0", "train.learning_rate=1e-12", "train.steps=10", "save.every=null")
    visits = checkpoint(still)
    found = pd.DataFrame({name: tensor.numpy() for name, tensor in visits.items()})
    spread = found.groupby("row")["loss"].agg(lambda losses: losses.max() - losses.min())
    assert spread.max() < 1e-4 and (found.groupby("row").size() == 2).sum() >= 30
    for line in read_metrics(still):
        rows = found[found["step"] == line["step"]]
        assert rows["loss"].min() <= line["loss"] <= rows["loss"].max(), "their mean, weighted by tokens"
    assert ((found["probability"] > 0) & (found["probability"] >= np.exp(-found["loss"]) - 1e-6)).all(), "Jensen"


def test_a_restart_and_micro_batches_leave_the_record_as_it_is(
    train: Callable[..., Path], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stopped):
            train(name="broken")
    broken = train(name="broken", resume=True)
    assert all(torch.equal(tensor, checkpoint(plain)[name]) for name, tensor in checkpoint(broken).items())
    pd.testing.assert_frame_equal(*(pd.read_parquet(run / "dynamics.parquet") for run in (plain, broken)))
    small = checkpoint(train("batch.tokens_per_device=256", name="small"))
    for name, tensor in checkpoint(plain).items():
        torch.testing.assert_close(small[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_second_pass_over_the_rows_is_not_recorded(train: Callable[..., Path]) -> None:
    visits = checkpoint(train("optimizer.sam=0.05", "train.steps=5", name="sam"))
    assert sorted(visits["row"].tolist()) == list(range(36)), "an epoch of five steps, each row once"


def test_labels_find_their_rows() -> None:
    rows = [Row(np.arange(2, 9), np.arange(7) > at) for at in (1, 4, 3)]
    batch = collate(rows)
    assert batch.row_of_label.bincount().tolist() == [each.supervised.sum() for each in rows]


class Seen(Checkpointed):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, RowLosses]] = []

    def rows_done(self, step: int, losses: RowLosses) -> None:
        self.told.append((step, losses))

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        pass


def test_an_observer_gets_the_mean_over_the_labels_of_a_row() -> None:
    tap = LabelTap(lambda outputs, labels: LabelLosses(outputs, labels))
    watch, seen = RowLossWatch(tap), Seen()
    watch.observers["seen"] = seen
    batch = collate([Row(np.arange(5), np.arange(5) > 2), Row(np.arange(5), np.arange(5) > 3)])
    for _ in range(2):  # begun again: the first try counts for nothing
        watch.begin()
        with watch.of(np.array([7, 3]), batch):
            tap.see(torch.tensor([1.0, 3.0]), torch.tensor([True, False]))
            tap.see(torch.tensor([0.5]), torch.tensor([True]))
    with watch.paused(), watch.of(np.array([7, 3]), batch):
        tap.see(torch.tensor([9.0, 9.0, 9.0]), torch.tensor([True, False, True]))
    tap.see(torch.tensor([9.0]), torch.tensor([True]))
    watch.done(4)
    watch.done(5)
    ((step, losses),) = seen.told
    assert step == 4 and losses.rows.tolist() == [7, 3]
    np.testing.assert_allclose(losses.loss_B, [2.0, 0.5])
    np.testing.assert_allclose(losses.probability_B, [(np.exp(-1) + np.exp(-3)) / 2, np.exp(-0.5)], rtol=1e-6)
    np.testing.assert_allclose(losses.right_B, [0.5, 1])


class Two:
    """Two processes of which the other has seen `other`."""

    def __init__(self, other: list[Any]) -> None:
        self.other = other

    def gathered(self, value: list[Any]) -> list[list[Any]]:
        return [value, self.other]


def _losses(*rows: int) -> RowLosses:
    values = np.asarray(rows, dtype=np.float32)
    return RowLosses(np.asarray(rows), values, values / 10, values % 2)


def test_two_processes_record_what_one_does() -> None:
    alone, other = VisitRecord(ALONE), VisitRecord(ALONE)
    ranks: Any = Two(other._new)
    both = VisitRecord(ranks)
    for step in (1, 2):
        alone.rows_done(step, _losses(4, 1, 3, 2))
        both.rows_done(step, _losses(1, 4))
        other.rows_done(step, _losses(3, 2))
    for mine, theirs in zip(alone.visits(), both.visits(), strict=True):
        assert np.array_equal(mine, theirs)
    again = VisitRecord(ALONE)
    again.load(alone.state())
    assert all(np.array_equal(*each) for each in zip(alone.visits(), again.visits(), strict=True))


@pytest.mark.parametrize(("wanted", "rows", "on"), [("auto", 10, True), ("auto", 10**7, False), ("true", 10**7, True)])
def test_long_runs_record_only_where_asked(wanted: Any, rows: int, on: bool) -> None:
    config = RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "x"}, "evaluate": {"dynamics": True if wanted == "true" else wanted}}
    )
    assert (record(config, rows, ALONE) is not None) == on
