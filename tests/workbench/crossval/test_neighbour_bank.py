"""The rows that predictions are corrected by are read as they were written, and compared without what all share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from workbench.config.sections.correction_config import Ask
from workbench.crossval import neighbour_correction
from workbench.crossval.neighbour_correction import Correction, NeighbourBank

ASKS = pytest.mark.parametrize("ask", ["predictions", "labels"])


@pytest.fixture
def bank() -> NeighbourBank:
    chance = np.random.default_rng(0)
    features = chance.normal(size=(30, 6)).astype(np.float32)
    said: dict[Ask, np.ndarray] = {
        "predictions": chance.dirichlet([1.0] * 3, size=30),
        "labels": np.eye(3)[chance.integers(0, 3, 30)],
    }
    return NeighbourBank(features, np.arange(30) % 3, said)


@ASKS
def test_a_bank_says_the_same_after_it_was_read_again(bank: NeighbourBank, ask: Ask, tmp_path: Path) -> None:
    bank.save(tmp_path)
    correction, rows = Correction(ask, 4, 0.5, 0.1), np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32)
    values = np.full((7, 3), 1 / 3)
    wanted = bank.corrected(correction, values, rows)
    assert neighbour_correction.read_bank(tmp_path).corrected(correction, values, rows).tobytes() == wanted.tobytes()
    assert np.abs(wanted - values).max() > 0.01
    np.testing.assert_allclose(wanted.sum(1), 1)


@ASKS
def test_what_all_rows_share_makes_none_of_them_similar(bank: NeighbourBank, ask: Ask) -> None:
    moved = bank._replace(features_ND=bank.features_ND + 50)
    found, other = (each.neighbours([ask], np.arange(30), 5)[ask].nearest for each in (bank, moved))
    np.testing.assert_array_equal(found.row_NK, other.row_NK)
    np.testing.assert_allclose(found.similarity_NK, other.similarity_NK, atol=1e-4)


def test_a_copy_of_a_labelled_row_hears_that_row_first(bank: NeighbourBank) -> None:
    correction = Correction("predictions", 1, 1.0, 0.1)
    heard = bank.corrected(correction, np.zeros((1, 3)), bank.features_ND[4:5])
    own = bank.answers["predictions"]
    nearest = [own[4]]  # of its own fold; of the two others, the nearest one
    centred = bank.features_ND - bank.features_ND.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    for fold in (0, 2):
        rows = np.flatnonzero(bank.fold_N == fold)
        nearest.append(own[rows[(unit[rows] @ unit[4]).argmax()]])
    np.testing.assert_allclose(heard[0], np.mean(nearest, axis=0), rtol=1e-6)
