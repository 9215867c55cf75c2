"""Rows and tokens that count by their losses: the equations a second time, and laws by enumeration.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workbench.training.sampling.samplers import Tokens, config, followed, of, sampler
from workbench.data.batching import Row, collate
from workbench.data.packing import PACKED
from workbench.runs.ranks import ALONE
from workbench.training import row_losses
from workbench.training.row_losses import RowLosses
from workbench.training.sampling import loss_based
from workbench.training.sampling.loss_based import (
    STEP,
    ReferenceLosses,
    Tilted,
    TokenSelection,
    highest,
    normalised,
    tilted_weights,
)
from workbench.training.sampling.row_orders import row_order
from workbench.training.sampling.sampler import Draw

TOKENS = [3, 1, 4, 2, 5, 2]
LOSSES = [0.3, 2.0, 1.0, 0.1, 3.5, 1.0]


@pytest.mark.parametrize("tilt", [-2.0, 0.5, 1.0, 7.0])
def test_weights_are_the_gradient_of_the_tilted_loss(tilt: float) -> None:
    """log(mean of exp(tilt loss)) / tilt, differentiated in float64."""
    loss_B = torch.tensor(np.float32(LOSSES), dtype=torch.float64, requires_grad=True)
    share_B = torch.tensor(TOKENS, dtype=torch.float64) / sum(TOKENS)
    (torch.log(share_B @ torch.exp(tilt * loss_B)) / tilt).backward()  # type: ignore[no-untyped-call]
    found = tilted_weights(np.float32(LOSSES), np.asarray(TOKENS), tilt)
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
    loss_B, token_B = np.float32(LOSSES), np.asarray(TOKENS)
    np.testing.assert_allclose(tilted_weights(loss_B, token_B, 1e-9), 1)
    hardest, easiest = (tilted_weights(loss_B, token_B, tilt) for tilt in (100, -100))
    np.testing.assert_allclose(hardest, [0, 0, 0, 0, sum(TOKENS) / 5, 0], atol=1e-12)
    np.testing.assert_allclose(easiest, [0, 0, 0, sum(TOKENS) / 2, 0, 0], atol=1e-7)


def test_a_step_weighs_its_own_rows_and_no_others() -> None:
    found = sampler(TOKENS, 12, size=3, by="tilted", tilt=2)
    assert isinstance(found, Tilted)
    for step, draw in enumerate(followed(found, LOSSES, 0, 8)):
        assert draw.rows.tolist() == found.evenly.rows(step).tolist() and draw.weight_N is not None
        wanted = tilted_weights(np.float32(LOSSES)[draw.rows], np.asarray(TOKENS)[draw.rows], 2)
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
    losses = {row: generator.random(count) for row, count in enumerate(TOKENS)}
    kept = {row: generator.random(count) < 0.5 for row, count in enumerate(TOKENS)}
    weight = generator.random(len(TOKENS)) + 0.5
    supervised = weight * TOKENS
    factors = normalised(kept, supervised)
    found = sum(weight[row] * factors[row] @ losses[row] for row in losses) / supervised.sum()
    over = sum(weight[row] * losses[row][kept[row]].sum() for row in losses)
    assert found == pytest.approx(over / sum(weight[row] * kept[row].sum() for row in losses))


class Stored(dict[int, Any]):
    """Losses of a reference by row."""


def selection(reference: Any, keep: float = 0.5) -> TokenSelection:
    own = config(3, by="tokens", reference="backbone", keep=keep)
    found = row_order(Tokens(np.asarray(TOKENS)), own, 12, ALONE, reference)
    assert isinstance(found, TokenSelection)
    return found


def looked(rows: list[int], losses: dict[int, Any]) -> RowLosses:
    zero_B = np.zeros(len(rows), dtype=np.float32)
    return RowLosses(np.asarray(rows), zero_B, zero_B, zero_B, tuple(np.float32(losses[row]) for row in rows))


def test_a_step_keeps_its_share_of_the_tokens_of_all_its_rows_in_whatever_order_they_come() -> None:
    generator = np.random.default_rng(2)
    losses, reference = ({row: generator.random(n) for row, n in enumerate(TOKENS)} for _ in range(2))
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
    found = sampler(TOKENS, 12, size=3, by="tilted")
    for step in range(4):
        found.rows_done(step, of(np.arange(3), LOSSES))
    assert found.new_losses() is None
