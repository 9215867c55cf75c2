"""Rows and tokens by their losses."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import factorial, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workbench.training.sampling.samplers import Tokens, Two, config, followed, of, sampler
from workbench.data.batching import Row, collate, global_batch
from workbench.data.packing import PACKED
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE
from workbench.training import row_losses
from workbench.training.row_losses import RowLosses
from workbench.training.sampling import loss_based
from workbench.training.sampling.loss_based import (
    STEP,
    ImportanceSampling,
    InfoBatch,
    ReferenceLosses,
    Tilted,
    TokenSelection,
    gain,
    highest,
    importance_weights,
    normalised,
    pruning_weights,
    tilted_weights,
)
from workbench.training.sampling.row_orders import row_order
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


POOL_TOKENS = [5, 1, 9, 2, 7, 3, 4, 6, 8, 2, 1, 3]
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
    found = sampler(POOL_TOKENS, 9000, size=4, by="importance", pool=3)
    assert isinstance(found, ImportanceSampling)
    found._gain = 1e9
    counts, rows = np.zeros(12), np.arange(12)
    for step in range(3000):
        found._step, found._gain = step, 1e9
        draw = found.drawn(rows, of(rows, losses))
        assert draw.weight_N is not None
        norm_N = (1 - np.exp(-losses)) * POOL_TOKENS
        chance_N = norm_N / norm_N.sum()
        own = np.asarray(POOL_TOKENS)[draw.rows].sum() / sum(POOL_TOKENS)
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
    found = sampler(POOL_TOKENS, 400, size=3, by="selective", pool=2)
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
    found = sampler(POOL_TOKENS, 100, size=3, by="selective", until=0.5)
    for step in range(100):
        rows = found.rows(step)
        assert found.looks == (step < 50)
        assert step < 50 or rows.tolist() == found.evenly.rows(step).tolist()


@pytest.mark.parametrize("losses", [EVEN, HARD])
@pytest.mark.parametrize("by", ["importance", "selective"])
def test_it_goes_on_from_its_state(by: str, losses: list[float]) -> None:
    whole = followed(sampler(POOL_TOKENS, 60, size=6, by=by, pool=2), losses, 0, 40)
    for at in (1, 7, 25):
        before, again = (sampler(POOL_TOKENS, 60, size=6, by=by, pool=2) for _ in range(2))
        followed(before, losses, 0, at)
        again.load(before.state())
        for mine, theirs in zip(followed(again, losses, at, 40), whole[at:], strict=True):
            assert mine.rows.tolist() == theirs.rows.tolist()
            assert mine.weight_N is None or np.array_equal(mine.weight_N, theirs.weight_N)


@pytest.mark.parametrize("losses", [EVEN, HARD])
@pytest.mark.parametrize("by", ["importance", "selective"])
def test_two_processes_draw_from_a_pool_what_one_does(by: str, losses: list[float]) -> None:
    """Each computes other rows of a step, and hears of the pool's in another order."""
    ranks = Two()
    both, alone = (sampler(POOL_TOKENS, 60, size=6, by=by, pool=2, **more) for more in ({"ranks": ranks}, {}))
    for step, draw in enumerate(followed(alone, losses, 0, 40)):
        rows = both.rows(step)
        mine = both.drawn(rows, of(rows[::-1], losses) if both.looks else None)
        assert mine.rows.tolist() == draw.rows.tolist()
        assert mine.weight_N is None or np.array_equal(mine.weight_N, draw.weight_N)
        assert (mine.weight_N is None) == (draw.weight_N is None)
        both.rows_done(step + 1, of(mine.rows[1:], losses))
        ranks.other.append(of(mine.rows[:1], losses))


WEIGHED_TOKENS = [3, 1, 4, 2, 5, 2]
WEIGHED_LOSSES = [0.3, 2.0, 1.0, 0.1, 3.5, 1.0]


@pytest.mark.parametrize("tilt", [-2.0, 0.5, 1.0, 7.0])
def test_weights_are_the_gradient_of_the_tilted_loss(tilt: float) -> None:
    """log(mean of exp(tilt loss)) / tilt, differentiated in float64."""
    loss_B = torch.tensor(np.float32(WEIGHED_LOSSES), dtype=torch.float64, requires_grad=True)
    share_B = torch.tensor(WEIGHED_TOKENS, dtype=torch.float64) / sum(WEIGHED_TOKENS)
    (torch.log(share_B @ torch.exp(tilt * loss_B)) / tilt).backward()  # type: ignore[no-untyped-call]
    found = tilted_weights(np.float32(WEIGHED_LOSSES), np.asarray(WEIGHED_TOKENS), tilt)
    assert loss_B.grad is not None
    np.testing.assert_allclose(found * share_B.numpy(), loss_B.grad.numpy(), rtol=1e-12)


@given(
    rows=st.lists(st.tuples(st.floats(0, 1000, width=32), st.integers(1, 500)), min_size=1, max_size=8),
    tilt=st.floats(-100, 100),
)
def test_their_mean_over_the_tokens_is_1_whatever_the_losses(rows: list[tuple[float, int]], tilt: float) -> None:
    loss_B, token_B = np.float32([loss for loss, _ in rows]), np.asarray([count for _, count in rows])
    weight_B = tilted_weights(loss_B, token_B, tilt)
    assert np.average(weight_B, weights=token_B) == pytest.approx(1)
    order = np.argsort(loss_B)
    assert (np.diff((weight_B if tilt >= 0 else -weight_B)[order]) >= 0).all()


def test_the_limits_of_the_tilt() -> None:
    loss_B, token_B = np.float32(WEIGHED_LOSSES), np.asarray(WEIGHED_TOKENS)
    np.testing.assert_allclose(tilted_weights(loss_B, token_B, 1e-9), 1)
    hardest, easiest = (tilted_weights(loss_B, token_B, tilt) for tilt in (100, -100))
    np.testing.assert_allclose(hardest, [0, 0, 0, 0, sum(WEIGHED_TOKENS) / 5, 0], atol=1e-12)
    np.testing.assert_allclose(easiest, [0, 0, 0, sum(WEIGHED_TOKENS) / 2, 0, 0], atol=1e-7)


def test_a_step_weighs_its_own_rows_and_no_others() -> None:
    found = sampler(WEIGHED_TOKENS, 12, size=3, by="tilted", tilt=2)
    assert isinstance(found, Tilted)
    for step, draw in enumerate(followed(found, WEIGHED_LOSSES, 0, 8)):
        assert draw.rows.tolist() == found.evenly.rows(step).tolist() and draw.weight_N is not None
        wanted = tilted_weights(np.float32(WEIGHED_LOSSES)[draw.rows], np.asarray(WEIGHED_TOKENS)[draw.rows], 2)
        np.testing.assert_allclose(draw.weight_N[draw.rows], wanted)
        assert np.delete(draw.weight_N, draw.rows).sum() == 0
    assert found.state() == {} and found.ahead(9).tolist() == found.evenly.rows(9).tolist()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6, 0.99])
def test_those_that_are_kept_have_the_highest_sum_of_all_that_could_be(share: float) -> None:
    """Exact enumeration of all ways to keep so many of 7 tokens."""
    excess_N = np.random.default_rng(0).normal(size=7)
    kept_N = highest(excess_N, share, seed=[0])
    count = max(1, round(share * 7))
    best = max(combinations(range(7), count), key=lambda chosen: excess_N[list(chosen)].sum())
    assert tuple(np.flatnonzero(kept_N)) == best


def test_equals_are_kept_by_chance() -> None:
    """Two of four places are left for equals: each pair of these is as likely."""
    excess_N = np.array([1.0, 5.0, 1.0 + STEP / 8, 1.0, 0.0, 1.0])
    kept = [tuple(np.flatnonzero(highest(excess_N, 0.5, seed=[seed]))) for seed in range(6000)]
    counts = np.array([kept.count(tuple(sorted((1, *pair)))) for pair in combinations((0, 2, 3, 5), 2)])
    assert counts.sum() == 6000, "the highest always, the lowest never"
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5, "chi-square, 5 degrees of freedom, p = 0.001"


def test_a_mean_with_the_factors_is_the_mean_over_what_is_kept() -> None:
    generator = np.random.default_rng(1)
    losses = {row: generator.random(count) for row, count in enumerate(WEIGHED_TOKENS)}
    kept = {row: generator.random(count) < 0.5 for row, count in enumerate(WEIGHED_TOKENS)}
    weight = generator.random(len(WEIGHED_TOKENS)) + 0.5
    supervised = weight * WEIGHED_TOKENS
    factors = normalised(kept, supervised)
    found = sum(weight[row] * factors[row] @ losses[row] for row in losses) / supervised.sum()
    over = sum(weight[row] * losses[row][kept[row]].sum() for row in losses)
    assert found == pytest.approx(over / sum(weight[row] * kept[row].sum() for row in losses))


class Stored(dict[int, Any]):
    """Losses of a reference by row."""


def selection(reference: Any, keep: float = 0.5) -> TokenSelection:
    own = config(3, by="tokens", reference="backbone", keep=keep)
    found = row_order(Tokens(np.asarray(WEIGHED_TOKENS)), own, 12, ALONE, reference)
    assert isinstance(found, TokenSelection)
    return found


def looked(rows: list[int], losses: dict[int, Any]) -> RowLosses:
    zero_B = np.zeros(len(rows), dtype=np.float32)
    return RowLosses(np.asarray(rows), zero_B, zero_B, zero_B, tuple(np.float32(losses[row]) for row in rows))


def test_a_step_keeps_its_share_of_the_tokens_of_all_its_rows_in_whatever_order_they_come() -> None:
    generator = np.random.default_rng(2)
    losses, reference = ({row: generator.random(n) for row, n in enumerate(WEIGHED_TOKENS)} for _ in range(2))
    found = selection(Stored(reference))
    rows = found.rows(0)
    one, other = (
        found.drawn(rows, looked(each, losses)).token_weights for each in (rows.tolist(), rows[::-1].tolist())
    )
    assert one is not None and other is not None
    excess = {int(row): np.float32(losses[int(row)]) - reference[int(row)] for row in rows}
    bar = np.sort(np.concatenate(list(excess.values())))[::-1][round(0.5 * sum(map(len, excess.values()))) - 1]
    for row, own in excess.items():
        assert (one[row] > 0).tolist() == (own >= bar).tolist() and np.array_equal(one[row], other[row])
    metrics = found.metrics()
    assert metrics["excess_loss"] == pytest.approx(np.concatenate(list(excess.values())).mean())
    assert metrics["kept_excess_loss"] > metrics["excess_loss"]


def test_a_row_that_comes_twice_in_a_step_counts_twice() -> None:
    losses = {0: [3.0, 0, 0], 1: [0.0], 2: [1.0, 0, 0, 0]}
    found = selection(Stored({row: np.zeros(len(own)) for row, own in losses.items()}), keep=0.25)
    found.rows(0)
    weights = found.drawn(np.array([0, 2, 0]), looked([0, 2, 0], losses)).token_weights
    assert weights is not None
    total, kept = 3 + 3 + 4, 1 + 1 + 1
    np.testing.assert_allclose(np.concatenate([weights[0], weights[2]]), np.array([1, 0, 0, 1, 0, 0, 0]) * total / kept)


def test_factors_reach_the_tokens_of_their_rows_padded_or_packed() -> None:
    batch = collate([Row(np.arange(n + 1), np.arange(n + 1) > 0) for n in (4, 2, 3)])
    weights = {7: np.array([0.0, 2, 0, 2]), 1: np.array([2.0, 0]), 5: np.array([0.0, 0, 2])}
    draw = Draw(np.array([1, 5, 7]), token_weights=weights)
    for each in (batch, PACKED.lay(batch)):
        found = draw.weighed(each, np.array([7, 1, 5])).weights_N
        assert found is not None and found.tolist() == [0, 2, 0, 2, 2, 0, 0, 0, 2]
    assert Draw(np.array([1])).weighed(batch, np.array([7, 1, 5])) is batch


def test_losses_of_labels_are_told_by_row() -> None:
    from workbench.losses.label_losses import LabelLosses

    watch = row_losses.RowLossWatch()
    rows, row_N = np.array([4, 9, 2]), torch.tensor([0, 0, 2])
    watch.add(rows, row_N, LabelLosses(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])))
    found = watch.collected(labels=True)
    assert [each.tolist() for each in found.label_losses] == [[1, 2], [], [3]]
    assert found.loss_B.tolist() == [1.5, 0, 3]


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_what_is_written_in_parts_is_read_by_row(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_based, "PART", size)
    count_N = np.array([3, 1, 4, 2, 5, 2, 6])
    losses = [np.random.default_rng(row).random(count).astype(np.float32) for row, count in enumerate(count_N)]
    bounds = loss_based.reference_parts(count_N)
    assert [row for first, last in bounds for row in range(first, last)] == list(range(7))
    for part, (first, last) in enumerate(bounds):
        np.save(loss_based.reference_path(tmp_path, part), np.concatenate(losses[first:last]))
    found = ReferenceLosses(tmp_path, count_N)
    for row in (6, 0, 3, 5, 1, 2, 4):
        assert np.array_equal(found[row], losses[row])


def test_nothing_is_remembered_of_rows_that_are_done() -> None:
    found = sampler(WEIGHED_TOKENS, 12, size=3, by="tilted")
    for step in range(4):
        found.rows_done(step, of(np.arange(3), WEIGHED_LOSSES))
    assert found.new_losses() is None
