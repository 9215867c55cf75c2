"""Learned mixtures: the paper's update, whole counts, passes kept, the same rows after a restart and in processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workbench.training.sampling.samplers import Tokens, followed, of
from workbench.config import RunConfig
from workbench.data.batching import Indices
from workbench.data.mixture import Floats, MixedRows
from workbench.runs.ranks import ALONE
from workbench.training.sampling.row_orders import LearnedMix, reweighted, row_order, within
from workbench.training.sampling.sampler import Draw, Sampler

SIZES = [12, 30, 8]
SOURCE_N = np.repeat([0, 1, 2], SIZES)
START_S = np.asarray(SIZES) / 50
TOKENS = np.random.default_rng(0).integers(2, 9, size=50)
APART = np.asarray([0.5, 2.0, 3.5])[SOURCE_N] + np.random.default_rng(1).uniform(0, 0.3, size=50)
"""Losses of rows that differ from source to source."""
REFERENCE = {"a": 1.0, "b": 2.0, "c": 2.5}


@dataclass(frozen=True)
class Sourced(Tokens):
    """Rows of several sources."""

    source_N: Indices = field(kw_only=True)


def mix(
    *, steps: int | None = 60, ranks: Any = ALONE, passes: dict[str, float] | None = None, rows: int = 50, **words: Any
) -> LearnedMix:
    sources = {name: {"path": f"{name}.jsonl", "passes": (passes or {}).get(name)} for name in "abc"}
    data = {"sources": sources, "mix": {"by": "learned", "every": 4, **words}}
    config = RunConfig.model_validate({"recipe": "sft", "data": data, "batch": {"size": 7}})
    train: Any = Sourced(TOKENS, source_N=SOURCE_N)
    found = row_order(MixedRows(train, START_S, rows, 0), config, steps, ranks)
    assert isinstance(found, LearnedMix)
    return found


def counted(draws: list[Draw]) -> Indices:
    return np.asarray([np.bincount(SOURCE_N[each.rows], minlength=3) for each in draws])


def mean_losses(rows: Indices) -> list[float]:
    """Loss of each source over rows, by tokens."""
    return [
        float(np.average(APART[own], weights=TOKENS[own])) if len(own := rows[SOURCE_N[rows] == source]) else math.nan
        for source in range(3)
    ]


def test_shares_are_the_papers_exponentiated_gradient() -> None:
    """Algorithm 1 of arXiv:2305.10429 a second time: alpha' = alpha exp(eta lambda), then a little of the first one."""
    found = mix(reference=REFERENCE, step_size=0.7, smoothing=0.2)
    draws = followed(found, APART, 0, 12)
    alpha = START_S.tolist()
    for first in (0, 4):
        losses = mean_losses(np.concatenate([each.rows for each in draws[first : first + 4]]))
        raised = [
            share * math.exp(0.7 * (loss - reference))
            for share, loss, reference in zip(alpha, losses, REFERENCE.values(), strict=True)
        ]
        alpha = [0.8 * each / sum(raised) + 0.2 * start for each, start in zip(raised, START_S, strict=True)]
    shares = [found.metrics()[f"mix_share[{name}]"] for name in "abc"]
    assert shares == pytest.approx(alpha, rel=1e-6), "losses of rows are float32"
    excess = [found.metrics()[f"excess_loss[{name}]"] for name in "abc"]
    assert excess == pytest.approx([loss - own for loss, own in zip(losses, REFERENCE.values(), strict=True)], rel=1e-6)
    assert alpha[2] > START_S[2] and alpha[0] < START_S[0]


@given(excess=st.floats(-5, 5), step_size=st.floats(0.01, 9), smoothing=st.floats(0.001, 0.9), seed=st.integers(0, 99))
def test_equal_excesses_leave_the_first_shares_and_draw_others_to_them(
    excess: float, step_size: float, smoothing: float, seed: int
) -> None:
    settings = {"step_size": step_size, "smoothing": smoothing}
    start_S, other_S = np.random.default_rng(seed).dirichlet(np.ones(4), size=2)
    equal_S = np.full(4, excess)
    np.testing.assert_allclose(reweighted(start_S, equal_S, start_S, **settings), start_S, rtol=1e-12)
    nearer_S = reweighted(other_S, equal_S, start_S, **settings)
    np.testing.assert_allclose(nearer_S - start_S, (1 - smoothing) * (other_S - start_S), atol=1e-12)
    shifted_S = reweighted(other_S, np.arange(4.0), start_S, **settings)
    np.testing.assert_allclose(reweighted(other_S, np.arange(4) + excess, start_S, **settings), shifted_S, atol=1e-12)


def test_the_references_are_measured_before_the_first_step_and_then_no_more() -> None:
    found = mix()
    looked = found.rows(0)
    assert found.looks and sorted(looked.tolist()) == list(range(50)), "all rows of small sources"
    followed(found, APART, 0, 1)
    assert not found.looks
    excess = [found.metrics()[f"excess_loss[{name}]"] for name in "abc"]
    assert excess == [0, 0, 0]
    followed(found, APART - 1, 1, 9)
    assert [found.metrics()[f"excess_loss[{name}]"] for name in "abc"] == pytest.approx([-1, -1, -1], abs=0.2)


@given(
    quota=st.lists(st.floats(0, 50), min_size=2, max_size=6),
    left=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_nothing_goes_beyond_a_limit_and_nothing_is_lost(quota: list[float], left: list[int], seed: int) -> None:
    quota_S, left_S = np.asarray(quota), np.asarray(left[: len(quota)], dtype=np.float64)
    share_S: Floats = np.random.default_rng(seed).dirichlet(np.ones(len(quota))) + 1e-6
    found_S = within(quota_S, left_S, share_S)
    assert (found_S <= left_S).all()
    if quota_S.sum() <= left_S.sum():
        assert found_S.sum() == pytest.approx(quota_S.sum())
        free = found_S < left_S - 1e-9
        assert (found_S[free] >= quota_S[free] - 1e-9).all(), "only what is above its limit gives"
    if (quota_S <= left_S).all():
        assert np.array_equal(found_S, quota_S)


def test_each_window_has_whole_counts_that_owe_a_source_less_than_a_row() -> None:
    found, wanted_S = mix(reference=REFERENCE), np.zeros(3)
    seen = np.zeros(50, dtype=np.int64)
    for first in range(0, 60, 4):
        draws = followed(found, APART, first, first + 4)
        drawn = counted(draws).sum()
        assert [len(each.rows) for each in draws] == [
            len(found.evenly.rows(step)) for step in range(first, first + 4)
        ], "an epoch has as many rows as without"
        wanted_S += drawn * np.asarray([found.metrics()[f"mix_share[{name}]"] for name in "abc"])
        seen += np.bincount(np.concatenate([each.rows for each in draws]), minlength=50)
        for source in range(3):
            own = seen[source == SOURCE_N]
            assert np.ptp(own) <= 1, "a row comes again when all others of its source have"
            assert abs(own.sum() - wanted_S[source]) <= 1


def test_passes_are_kept_and_what_they_forbid_goes_to_the_others() -> None:
    steps = 20
    open_ended = counted(followed(mix(steps=steps, reference=REFERENCE), APART, 0, steps)).sum(0)
    found = mix(steps=steps, reference=REFERENCE, passes={"c": 2.2})
    counts = counted(followed(found, APART, 0, steps)).sum(0)
    assert open_ended[2] > 30 and counts[2] == 17, "2.2 passes over 8 rows, whole rows"
    assert counts.sum() == open_ended.sum()
    exact = mix(steps=7, passes={"a": 1, "b": 1, "c": 1}, rows=49)
    assert counted(followed(exact, APART, 0, 7)).sum(0).tolist() == pytest.approx(SIZES, abs=1), "49 of 50 rows"


@pytest.mark.parametrize("at", [1, 3, 4, 6, 17])
def test_it_goes_on_from_its_state(at: int) -> None:
    found = mix()
    assert not len(found.ahead(0))
    whole = followed(found, APART, 0, 1) + followed(found, APART * SOURCE_N, 1, 30)
    before, again = mix(), mix()
    followed(before, APART, 0, 1)
    followed(before, APART * SOURCE_N, 1, at)
    again.load({name: each.clone() for name, each in before.state().items()})
    rest = followed(again, APART * SOURCE_N, at, 30)
    assert [each.rows.tolist() for each in rest] == [each.rows.tolist() for each in whole[at:]]
    assert again.metrics() == found.metrics()
    followed(before, APART * SOURCE_N, at, 30)
    assert before.metrics() == found.metrics(), "a checkpoint changes nothing"


class Two:
    """Two processes: the other one hears of the rows that this one does not compute."""

    def __init__(self) -> None:
        self.other: list[Any] = []

    def gathered(self, value: list[Any]) -> list[list[Any]]:
        found = [self.other, value]
        self.other = []
        return found


def test_two_processes_draw_what_one_does() -> None:
    ranks = Two()
    both, alone = mix(ranks=ranks), mix()
    for step, draw in enumerate(followed(alone, APART, 0, 30)):
        rows = both.rows(step)
        rows = both.drawn(rows, of(rows, APART) if both.looks else None).rows
        assert rows.tolist() == draw.rows.tolist()
        both.rows_done(step + 1, of(rows[1::2], APART))
        ranks.other.append(of(rows[::2], APART))
    assert both.metrics() == alone.metrics()


def test_what_comes_next_is_told_ahead_within_a_window_only() -> None:
    found: Sampler = mix()
    for step in range(30):
        followed(found, APART, step, step + 1)
        ahead = found.ahead(step + 1)
        assert bool(len(ahead)) == ((step + 1) % 4 > 0)
        assert not len(ahead) or ahead.tolist() == found.rows(step + 1).tolist()
