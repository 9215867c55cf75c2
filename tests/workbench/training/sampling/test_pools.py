"""Rows out of a pool: importance sampling is unbiased and begins where it pays; selection prefers high losses."""

from __future__ import annotations

from itertools import permutations, product
from math import factorial, prod

import numpy as np
import pytest

from tests.workbench.training.sampling.samplers import Two, followed, of, sampler
from workbench.training.sampling.loss_based import ImportanceSampling, gain, importance_weights

TOKENS = [5, 1, 9, 2, 7, 3, 4, 6, 8, 2, 1, 3]
EVEN = [1.0] * 12
HARD = [8.0, *[1e-4] * 11]
"""One row of twelve has a gradient to speak of."""


def test_the_mean_gradient_is_the_pools_over_all_that_can_be_drawn() -> None:
    """Exact enumeration of all ways to draw 3 times from 4 rows."""
    chance_M, tokens_M = np.array([0.1, 0.2, 0.3, 0.4]), np.array([3, 1, 5, 2])
    gradient_M = np.random.default_rng(0).normal(size=4) * tokens_M
    expected, total = 0.0, 0.0
    for times in product(range(4), repeat=4):
        if sum(times) == 3:
            times_M = np.asarray(times)
            chance = factorial(3) * prod(p**n / factorial(n) for p, n in zip(chance_M, times, strict=True))
            weight_M = importance_weights(times_M, chance_M, tokens_M)
            total += chance
            expected += chance * (weight_M * gradient_M).sum() / tokens_M[times_M > 0].sum()
    assert total == pytest.approx(1)
    assert expected == pytest.approx(gradient_M.sum() / tokens_M.sum(), abs=1e-12)


def test_rows_are_drawn_in_proportion_to_the_bound_of_their_gradient() -> None:
    """1 - p, times the tokens: the bound of Katharopoulos and Fleuret for a sum of cross-entropies."""
    losses = np.random.default_rng(0).uniform(0.05, 3, size=12)
    found = sampler(TOKENS, 9000, size=4, by="importance", pool=3)
    assert isinstance(found, ImportanceSampling)
    found._gain = 1e9
    counts, rows = np.zeros(12), np.arange(12)
    for step in range(3000):
        found._step, found._gain = step, 1e9
        draw = found.drawn(rows, of(rows, losses))
        assert draw.weight_N is not None
        norm_N = (1 - np.exp(-losses)) * TOKENS
        chance_N = norm_N / norm_N.sum()
        own = np.asarray(TOKENS)[draw.rows].sum() / sum(TOKENS)
        counts[draw.rows] += np.round(draw.weight_N[draw.rows] / own * 4 * chance_N[draw.rows])
    np.testing.assert_allclose(counts / counts.sum(), chance_N, atol=4 * np.sqrt(0.2 / 12000))


def test_the_gain_is_the_square_of_the_papers() -> None:
    norm_M = np.random.default_rng(0).gamma(0.4, size=30)
    share_M, even = norm_M / norm_M.sum(), 1 / 30
    papers = 1 / np.sqrt(1 - ((share_M - even) ** 2).sum() / (share_M**2).sum())
    assert gain(norm_M) == pytest.approx(papers**2)
    assert gain(np.ones(5)) == pytest.approx(1), "equal rows: nothing to gain"
    assert gain(np.array([1.0, 0, 0, 0])) == pytest.approx(4), "their number, where one row is all"


def test_an_even_batch_that_is_larger_by_the_gain_has_the_same_variance() -> None:
    """Exact enumeration of all that can be drawn, for gradients whose mean is 0."""
    gradient_M = np.array([-1.0, -1, 4, -1, -1, 0])
    chance_M = np.abs(gradient_M) / np.abs(gradient_M).sum()
    assert gain(np.abs(gradient_M)) == pytest.approx(6 * 20 / 64)
    drawn = {}
    for draws in (1, 2):
        ways = product(range(6), repeat=draws)
        drawn[draws] = sum(
            np.prod(chance_M[list(way)]) * np.mean([gradient_M[row] / (6 * chance_M[row]) for row in way]) ** 2
            for way in ways
            if chance_M[list(way)].all()
        )
    even = {
        draws: np.mean([gradient_M[list(way)].mean() ** 2 for way in product(range(6), repeat=draws)])
        for draws in (1, 2, 5)
    }
    for draws, variance in drawn.items():
        assert even[1] / variance == pytest.approx(draws * gain(np.abs(gradient_M)))
    assert even[1] / even[5] == pytest.approx(5), "the variance of a mean falls with the batch, not with its square"


def test_it_begins_where_it_pays_and_ends_where_it_does_no_longer() -> None:
    found = sampler([4] * 12, 400, size=12, by="importance", pool=2)
    assert isinstance(found, ImportanceSampling) and found.pays == 2, "a backward pass over frozen weights is one more"
    assert all(draw.weight_N is None for draw in followed(found, EVEN, 0, 40)), "equal rows never pay"
    draws = followed(found, [8.0] * 4 + [1e-4] * 8, 40, 80)  # a gain of 3
    begun = next(number for number, draw in enumerate(draws) if draw.weight_N is not None)
    assert 5 < begun < 20, "the running mean of the gain has to come over the threshold"
    assert all(draw.weight_N is not None and set(draw.rows) <= {0, 1, 2, 3} for draw in draws[begun:])
    assert followed(found, EVEN, 80, 120)[-1].weight_N is None


def test_a_step_looks_at_the_rows_of_the_next_steps_too() -> None:
    found = sampler(TOKENS, 400, size=3, by="selective", pool=2)
    pool = found.rows(1)
    assert sorted(pool) == sorted({*found.evenly.rows(1), *found.evenly.rows(2)})
    assert not len(found.ahead(2)), "its rows depend on losses"


def test_selection_is_sampling_without_replacement_by_rank() -> None:
    """Exact law: the chance of a set is the sum over its orders of drawing one after another."""
    losses, power = [0.3, 2.0, 1.0, 0.1], 2.0
    share = (np.array([2, 4, 3, 1]) / 4) ** power
    wanted = {
        frozenset(pair): sum(
            share[a] / share.sum() * share[b] / (share.sum() - share[a]) for a, b in permutations(pair)
        )
        for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    }
    found = sampler([3] * 4, 20000, size=2, by="selective", pool=2, power=power)
    rows, counts = np.arange(4), dict.fromkeys(wanted, 0)
    for step in range(4000):
        found._step = step  # type: ignore[attr-defined]
        draw = found.drawn(rows, of(rows, losses))
        assert draw.weight_N is None and len(draw.rows) == 2
        counts[frozenset(draw.rows.tolist())] += 1
    square = sum((counts[pair] - 4000 * chance) ** 2 / (4000 * chance) for pair, chance in wanted.items())
    assert square < 20.5, "chi-square, 5 degrees of freedom, p = 0.001"


def test_selection_ends_after_its_share_of_the_run() -> None:
    found = sampler(TOKENS, 100, size=3, by="selective", until=0.5)
    for step in range(100):
        rows = found.rows(step)
        assert found.looks == (step < 50)
        assert step < 50 or rows.tolist() == found.evenly.rows(step).tolist()


@pytest.mark.parametrize("losses", [EVEN, HARD])
@pytest.mark.parametrize("by", ["importance", "selective"])
def test_it_goes_on_from_its_state(by: str, losses: list[float]) -> None:
    whole = followed(sampler(TOKENS, 60, size=6, by=by, pool=2), losses, 0, 40)
    for at in (1, 7, 25):
        before, again = (sampler(TOKENS, 60, size=6, by=by, pool=2) for _ in range(2))
        followed(before, losses, 0, at)
        again.load(before.state())
        for mine, theirs in zip(followed(again, losses, at, 40), whole[at:], strict=True):
            assert mine.rows.tolist() == theirs.rows.tolist()
            assert mine.weight_N is None or np.array_equal(mine.weight_N, theirs.weight_N)


@pytest.mark.parametrize("losses", [EVEN, HARD])
@pytest.mark.parametrize("by", ["importance", "selective"])
def test_two_processes_draw_what_one_does(by: str, losses: list[float]) -> None:
    """Each computes other rows of a step, and hears of the pool's in another order."""
    ranks = Two()
    both, alone = (sampler(TOKENS, 60, size=6, by=by, pool=2, **more) for more in ({"ranks": ranks}, {}))
    for step, draw in enumerate(followed(alone, losses, 0, 40)):
        rows = both.rows(step)
        mine = both.drawn(rows, of(rows[::-1], losses) if both.looks else None)
        assert mine.rows.tolist() == draw.rows.tolist()
        assert mine.weight_N is None or np.array_equal(mine.weight_N, draw.weight_N)
        assert (mine.weight_N is None) == (draw.weight_N is None)
        both.rows_done(step + 1, of(mine.rows[1:], losses))
        ranks.other.append(of(mine.rows[:1], losses))
