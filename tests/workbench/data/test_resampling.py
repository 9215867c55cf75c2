"""Weights of rows: what a cell may hold, and which labels of a micro-batch they reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.workbench.training.sampling.samplers import Tokens
from workbench.data import resampling
from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.data.packing import PACKED
from workbench.errors import DataError

LENGTHS = np.array([5, 3, 6, 4])
WEIGHTS = np.array([2.0, 0.5, 1.0, 3.0])


@dataclasses.dataclass(frozen=True)
class Written(Tokens):
    """Rows of which each token but the first is predicted."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return collate([Row(np.full(n, n), np.ones(n, dtype=bool)) for n in self.lengths[indices]])


@pytest.mark.parametrize("cell", [1, 0.5, "2.5", " 3 ", 1e-6, 1e6, np.float32(0.25)])
def test_numbers_are_weights(cell: Any) -> None:
    assert resampling.read_weight(cell, "w") == pytest.approx(float(cell))


@pytest.mark.parametrize("cell", [0, -1, -0.5, float("nan"), float("inf"), "", "many", None, True, [1], 1e7, 1e-9])
def test_other_cells_are_refused(cell: Any) -> None:
    with pytest.raises(DataError, match=r"`w` must be a number from 1e-06 to 1e\+06, found .*Leave out rows"):
        resampling.read_weight(cell, "w")


def test_each_label_has_the_weight_of_its_row_padded_or_packed() -> None:
    rows = resampling.weighted(Written(LENGTHS), WEIGHTS)
    batch = rows.batch(np.array([2, 0, 3]))
    wanted = [1.0] * 5 + [2.0] * 4 + [3.0] * 3
    assert batch.weights_N is not None and batch.weights_N.tolist() == wanted
    packed = PACKED.lay(batch)
    assert packed.weights_N is not None and packed.weights_N.tolist() == wanted
    assert packed.weighted(np.array([1.0, 1.0, 2.0])).weights_N.tolist() == wanted[:9] + [6.0] * 3  # type: ignore[union-attr]


def test_a_rows_share_of_the_loss_is_its_tokens_times_its_weight() -> None:
    rows = resampling.weighted(Written(LENGTHS), WEIGHTS)
    np.testing.assert_allclose(rows.supervised, LENGTHS * WEIGHTS)
    assert len(rows) == 4 and rows.sample(np.array([1, 1]), epoch=3).tolist() == [1, 1]


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_weights_that_are_all_alike_leave_the_rows_as_they_are(weight: float) -> None:
    rows = Written(LENGTHS)
    assert resampling.weighted(rows, np.full(4, weight)) is rows
    assert resampling.weights_in_words(np.full(4, weight)) == []


def test_the_effective_number_of_rows_is_kishs() -> None:
    """Rows of variance 1: the variance of the weighted mean is one through that number."""
    values = np.random.default_rng(0).normal(size=(200_000, 4))
    found = 1 / np.average(values, axis=1, weights=WEIGHTS).var()
    assert resampling.effective_rows(WEIGHTS) == pytest.approx(found, rel=0.02)
    (said,) = resampling.weights_in_words(WEIGHTS)
    assert "0.5 to 3 times (mean 1.62)" in said and "4 rows vary as 3 equal ones" in said


def test_labels_of_classes_carry_their_weight_themselves() -> None:
    batch = MicroBatch({}, torch.arange(2), torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]]), 2)
    assert batch.weighted(np.array([3.0, 0.5])).labels_N[:, 0].tolist() == [6.0, 0.5]
