"""InfoBatch leaves rows of low loss out, and the mean gradient as it is."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workbench.training.sampling.samplers import Two, followed, of, sampler
from workbench.data.batching import global_batch
from workbench.errors import ConfigError
from workbench.training.sampling.loss_based import InfoBatch, pruning_weights
from workbench.training.sampling.sampler import Draw

TOKENS = [5, 1, 9, 2, 7, 3, 4, 6]
LOSSES = [0.1, 3.0, 0.2, 0.3, 2.0, 0.4, 0.5, 0.6]
"""Mean 0.8875: rows 1 and 4 are above it."""


def mean_gradient(draws: list[Draw], gradient_N: Any) -> float:
    """Mean over the steps of a pass, each of which gives the mean over its tokens, weighted by these."""
    tokens_N = np.asarray(TOKENS)
    steps = [
        (each.weight_N[each.rows] * gradient_N[each.rows]).sum() / tokens_N[each.rows].sum()
        for each in draws
        if each.weight_N is not None
    ]
    return float(np.average(steps, weights=[tokens_N[each.rows].sum() for each in draws]))


def second_pass(seed: int) -> list[Draw]:
    found = sampler(TOKENS, 40, seed=seed, by="infobatch")
    followed(found, LOSSES, 0, 4)
    first = followed(found, LOSSES, 4, 5)
    return [*first, *followed(found, LOSSES, 5, 4 + -(-_rows(found) // 2))]


def _rows(value: Any) -> int:
    return round(value.metrics()["drawn_share"] * len(TOKENS))


def test_the_mean_gradient_of_a_pass_is_that_of_all_rows_over_all_that_it_can_draw() -> None:
    """Exact enumeration: of 6 rows of low loss 3 are kept, in 20 ways, all of which some seed draws."""
    gradient_N = np.random.default_rng(1).normal(size=len(TOKENS)) * TOKENS  # of all tokens of a row
    found: dict[frozenset[int], float] = {}
    seed = 0
    while len(found) < 20:
        draws = second_pass(seed)
        kept = frozenset(np.concatenate([each.rows for each in draws]).tolist())
        found[kept] = mean_gradient(draws, gradient_N)
        seed += 1
    assert set(found) == {frozenset({1, 4, *low}) for low in combinations([0, 2, 3, 5, 6, 7], 3)}
    assert np.mean(list(found.values())) == pytest.approx(gradient_N.sum() / np.sum(TOKENS), abs=1e-12)


def test_all_choices_are_as_likely() -> None:
    low = np.array([1, 2, 4, 5])
    kept = [tuple(np.flatnonzero(pruning_weights(6, low, 0.5, seed=[seed]) == 2)) for seed in range(6000)]
    counts = np.array([kept.count(pair) for pair in combinations(low, 2)])
    assert counts.sum() == 6000, "two of four, whose weight is 2"
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5, "chi-square, 5 degrees of freedom, p = 0.001"


@given(count=st.integers(1, 30), prune=st.floats(0.01, 0.99), seed=st.integers(0, 9), chosen=st.integers(0, 2**30 - 1))
def test_what_is_kept_stands_for_what_is_left_out(count: int, prune: float, seed: int, chosen: int) -> None:
    low = np.array([row for row in range(count) if chosen >> row & 1], dtype=np.int64)
    weight_N = pruning_weights(count, low, prune, seed=[seed])
    assert weight_N.sum() == pytest.approx(count)
    assert (np.delete(weight_N, low) == 1).all()


def test_one_row_more_of_low_loss_changes_little() -> None:
    low = np.arange(0, 200)
    before, after = (pruning_weights(400, rows, 0.5, seed=[3]) > 0 for rows in (low, np.append(low, 300)))
    assert (before != after).sum() <= 2


def test_the_first_pass_and_the_last_ones_are_those_without_a_sampler() -> None:
    found = sampler(TOKENS, 20, by="infobatch", until=0.5, seed=3)
    draws = followed(found, LOSSES, 0, 20)
    for step in range(4):
        assert draws[step].weight_N is None
        assert draws[step].rows.tolist() == global_batch(step, rows=8, size=2, seed=3).tolist()
    assert all(each.weight_N is not None for each in draws[4:10])
    assert all(each.weight_N is None for each in draws[10:]), "from half of the run on, wherever a pass stands there"
    for first in (10, 14):
        assert sorted(np.concatenate([each.rows for each in draws[first : first + 4]]).tolist()) == list(range(8))


@given(rows=st.integers(3, 7), steps=st.integers(16, 60), until=st.floats(0.5, 0.9), size=st.integers(1, 3))
def test_all_rows_are_drawn_evenly_from_until_on(rows: int, steps: int, until: float, size: int) -> None:
    found = sampler([1] * rows, steps, size=size, by="infobatch", until=until)
    late = [draw for step, draw in enumerate(followed(found, np.arange(rows) + 1.0, 0, steps)) if step / steps >= until]
    times = np.bincount(np.concatenate([each.rows for each in late]), minlength=rows)
    assert all(each.weight_N is None for each in late)
    assert times.max() - times.min() <= 2, "a pass that lacks no row goes on, and the last one is cut"


def test_rows_of_high_loss_are_in_every_pass_and_a_pass_is_shorter() -> None:
    found = sampler(TOKENS, 60, by="infobatch", prune=0.9)
    draws = followed(found, LOSSES, 0, 50)
    assert {1, 4} < set(draws[4].rows) | set(draws[5].rows), "1 of 6 is kept beside two, in steps of two"
    times = np.bincount(np.concatenate([each.rows for each in draws]), minlength=8)
    assert times[[1, 4]].min() > 2 * np.delete(times, [1, 4]).max()


def test_it_goes_on_from_its_state_in_the_middle_of_a_pass() -> None:
    whole = followed(sampler(TOKENS, 40, by="infobatch"), LOSSES, 0, 30)
    for at in (1, 4, 5, 13):
        before = sampler(TOKENS, 40, by="infobatch")
        followed(before, LOSSES, 0, at)
        again = sampler(TOKENS, 40, by="infobatch")
        again.load({name: each.clone() for name, each in before.state().items()})
        for mine, theirs in zip(followed(again, LOSSES, at, 30), whole[at:], strict=True):
            assert mine.rows.tolist() == theirs.rows.tolist()
            assert (mine.weight_N is None) == (theirs.weight_N is None)
            assert mine.weight_N is None or np.array_equal(mine.weight_N, theirs.weight_N)


def test_two_processes_draw_what_one_does() -> None:
    ranks = Two()
    both, alone = sampler(TOKENS, 40, by="infobatch", ranks=ranks), sampler(TOKENS, 40, by="infobatch")
    for step, draw in enumerate(followed(alone, LOSSES, 0, 30)):
        rows = both.rows(step)
        assert rows.tolist() == draw.rows.tolist()
        both.rows_done(step + 1, of(rows[:1], LOSSES))
        ranks.other.append(of(rows[1:], LOSSES))


def test_what_comes_next_is_told_ahead_within_a_pass_only() -> None:
    found = sampler(TOKENS, 40, by="infobatch")
    for step in range(30):
        followed(found, LOSSES, step, step + 1)
        ahead = found.ahead(step + 1)
        assert not len(ahead) or ahead.tolist() == found.rows(step + 1).tolist()
    assert isinstance(found, InfoBatch) and found.epoch(30) > found.evenly.epoch(30), "passes are shorter"


def test_a_run_of_one_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"so never\.\n  Write more train.epochs"):
        sampler(TOKENS, 4, by="infobatch")
