"""Numbers depend on purpose, seed, epoch and row, and are those of a good generator across rows."""

from __future__ import annotations

import numpy as np
from scipy import stats

from workbench.data.images.draws import generator


def test_other_places_and_purposes_have_other_numbers() -> None:
    places = [(seed, epoch, row) for seed in (0, 1) for epoch in (0, 1) for row in (0, 1)]
    drawn = [
        generator(purpose, seed=seed, epoch=epoch, row=row, repeat=repeat).random()
        for seed, epoch, row in places
        for repeat in (0, 1)
        for purpose in ("augment", "mix", "partners")
    ]
    assert len(set(drawn)) == len(drawn)


def test_the_same_place_has_the_same_numbers() -> None:
    first, second = (generator("augment", seed=2**70 + 1, epoch=3, row=4).random(5) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_first_numbers_of_consecutive_rows_and_epochs_are_even_and_uncorrelated() -> None:
    drawn = np.array(
        [[generator("mix", seed=0, epoch=epoch, row=row).random() for row in range(300)] for epoch in (0, 1)]
    )
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.2 and abs(np.corrcoef(drawn[0, 1:], drawn[0, :-1])[0, 1]) < 0.2
