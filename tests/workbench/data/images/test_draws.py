"""Numbers depend on purpose, seed, epoch and row, and are those of a good generator across rows."""

from __future__ import annotations

import numpy as np
from scipy import stats

from workbench.data.images.augmentation import row_generator


def test_other_places_and_purposes_have_other_numbers() -> None:
    places = [(seed, epoch, row) for seed in (0, 1) for epoch in (0, 1) for row in (0, 1)]
    drawn = [
        row_generator(purpose, seed=seed, epoch=epoch, row=row, repeat=repeat).random()
        for seed, epoch, row in places
        for repeat in (0, 1)
        for purpose in ("augment", "mix", "partners")
    ]
    assert len(set(drawn)) == len(drawn)


def test_the_same_place_has_the_same_numbers() -> None:
    first, second = (row_generator("augment", seed=2**70 + 1, epoch=3, row=4).random(5) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_numbers_of_numpy_are_those_of_python() -> None:
    for row in (5, 2**55 + 7):
        plain = row_generator("augment", seed=1, epoch=2, row=row, repeat=3).random(5)
        numpys = row_generator("augment", seed=1, epoch=np.int64(2), row=np.int64(row), repeat=np.int64(3)).random(5)
        np.testing.assert_array_equal(plain, numpys)


def test_words_of_the_counter_are_epoch_row_and_repeat() -> None:
    words = np.array([0, 3, 2**55 + 7, 2], dtype=np.uint64)
    written = np.random.Generator(np.random.Philox(key=[1, 0x61756E], counter=words)).random(5)
    np.testing.assert_array_equal(row_generator("augment", seed=1, epoch=2, row=2**55 + 7, repeat=3).random(5), written)


def test_first_numbers_of_consecutive_rows_and_epochs_are_even_and_uncorrelated() -> None:
    drawn = np.array(
        [[row_generator("mix", seed=0, epoch=epoch, row=row).random() for row in range(300)] for epoch in (0, 1)]
    )
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.2 and abs(np.corrcoef(drawn[0, 1:], drawn[0, :-1])[0, 1]) < 0.2


def test_numbers_that_were_drawn_before_change_nothing() -> None:
    plain = row_generator("mix", seed=0, epoch=1, row=2).random(9)
    for drawn in range(6):
        before = row_generator("mix", seed=0, epoch=5, row=6)
        before.random(drawn)
        before.integers(7, dtype=np.uint32)  # half a word, of which the other half is kept
        np.testing.assert_array_equal(row_generator("mix", seed=0, epoch=1, row=2).random(9), plain)
