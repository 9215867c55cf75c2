"""Orders of rows that the training decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from tests.workbench.training.sampling.samplers import Tokens, followed, of
from tests.workbench.training.sampling.test_loss_based import Two
from workbench.config import RunConfig
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data.batching import Indices, global_batch
from workbench.data.mixture import Floats, MixedRows
from workbench.data.row_order import RowOrder
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE
from workbench.training.optim.noise_scale import NoiseEstimate, NoiseScale
from workbench.training.sampling.row_orders import GrowingBatch, LearnedMix, SelfPaced, reweighted, row_order, within
from workbench.training.sampling.sampler import Draw, Sampler

TOKENS = [5, 1, 9, 2, 7, 3, 4, 6]


def paced(tokens: Any, steps: int, *, size: int = 2, seed: int = 0, ranks: Any = ALONE, **curriculum: Any) -> SelfPaced:
    data = {"train": "rows.jsonl", "curriculum": {"by": "self_paced", **curriculum}}
    train = {"steps": steps}
    config = RunConfig.model_validate(
        {"recipe": "sft", "seed": seed, "data": data, "batch": {"size": size}, "train": train}
    )
    found = row_order(Tokens(np.asarray(tokens)), config, steps, ranks)
    assert isinstance(found, SelfPaced)
    return found


@settings(max_examples=60)
@given(
    count=st.integers(2, 40),
    size=st.integers(1, 9),
    passes=st.floats(1.3, 5),
    start=st.floats(0.01, 0.99),
    until=st.floats(0.01, 1),
    pace=st.sampled_from(["linear", "root", "step"]),
    seed=st.integers(0, 5),
)
def test_every_row_comes_as_often_as_without_it(
    count: int, size: int, passes: float, start: float, until: float, pace: Any, seed: int
) -> None:
    steps = max(-(-count // size) + 1, round(passes * -(-count // size)))
    found = paced([1] * count, steps, size=size, seed=seed, start=start, until=until, pace=pace)
    loss_N = np.random.default_rng(seed).random(count)
    draws = [draw.rows for draw in followed(found, loss_N, 0, steps)]
    plain = [len(global_batch(step, rows=count, size=size, seed=seed)) for step in range(steps)]
    assert [len(rows) for rows in draws] == plain, "steps are as large as without it"
    times = np.bincount(np.concatenate(draws), minlength=count)
    whole, rest = divmod(sum(plain), count)
    assert sorted(times) == [whole] * (count - rest) + [whole + 1] * rest


def test_the_first_pass_is_that_without_a_curriculum() -> None:
    draws = followed(paced(TOKENS, 20, seed=3), [1.0] * 8, 0, 4)
    for step, draw in enumerate(draws):
        assert np.array_equal(draw.rows, global_batch(step, rows=8, size=2, seed=3))


@pytest.mark.parametrize("first", ["easy", "hard"])
def test_rows_open_in_the_order_of_their_loss_at_the_pace_of_the_rest(first: Any) -> None:
    """Without draws to spare no row comes before the share is as large: 10 passes, of which each row has 9 draws."""
    count, steps = 40, 200
    words = {"first": first, "start": 0.2, "until": 0.9, "pace": "linear"}
    found, share = paced([1] * count, steps, **words), CurriculumConfig(by="self_paced", **words).open_share
    loss_N = np.random.default_rng(1).permutation(count).astype(float)
    place_N = loss_N if first == "easy" else count - 1 - loss_N
    followed(found, loss_N, 0, 20)
    spent = np.zeros(count)
    for step in range(20, steps):
        (draw,) = followed(found, loss_N, step, step + 1)
        asked = round(share((step - 20) / (steps - 20)) * count)
        left = 9 - spent
        enough = 1 + np.searchsorted(np.cumsum(left[np.argsort(place_N)]), len(draw.rows))
        assert place_N[draw.rows].max() < max(asked, enough)
        spent += np.bincount(draw.rows, minlength=count)
    assert (spent == 9).all()


def test_open_rows_change_with_what_is_measured() -> None:
    """Rows that become hard while they are open make room for those that seemed hard."""
    found = paced([1] * 40, 80, start=0.25, until=1.0, pace="linear")
    before = np.arange(40.0)
    followed(found, before, 0, 20)
    first = followed(found, before, 20, 21)[0].rows
    assert first.max() < 10
    late = before.copy()
    late[first] = 100.0
    found.rows_done(21, of(first, late))
    assert not set(first) & set(found.rows(21).tolist())


def test_it_goes_on_from_its_state_anywhere() -> None:
    losses = np.random.default_rng(0).random(70)
    whole = followed(paced([1] * 70, 100), losses, 0, 100)
    for at in (1, 35, 36, 38, 61):
        before = paced([1] * 70, 100)
        followed(before, losses, 0, at)
        again = paced([1] * 70, 100)
        again.load({name: each.clone() for name, each in before.state().items()})
        for mine, theirs in zip(followed(again, losses, at, 100), whole[at:], strict=True):
            assert mine.rows.tolist() == theirs.rows.tolist()


def test_two_processes_draw_what_one_does() -> None:
    ranks, losses = Two(), [0.1, 3.0, 0.2, 0.3, 2.0, 0.4, 0.5, 0.6]
    both, alone = paced(TOKENS, 20, ranks=ranks), paced(TOKENS, 20)
    for step, draw in enumerate(followed(alone, losses, 0, 20)):
        rows = both.rows(step)
        assert rows.tolist() == draw.rows.tolist()
        both.rows_done(step + 1, of(rows[:1], losses))
        ranks.other.append(of(rows[1:], losses))


def test_what_comes_next_is_told_ahead_as_far_as_it_is_known() -> None:
    found, known = paced([1] * 96, 150), 0
    for step in range(149):
        followed(found, np.arange(96), step, step + 1)
        ahead = found.ahead(step + 1)
        known += bool(len(ahead))
        assert not len(ahead) or ahead.tolist() == found.rows(step + 1).tolist()
    assert known > 100, "stretches of three steps"
    assert not len(found.ahead(150)), "the run has ended"


def test_a_run_of_one_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the run ends with it .*\n  Write more train.epochs"):
        paced(TOKENS, 4)


ROWS = Tokens(np.full(23, 5))


def made(*, every: int = 1, most: int = 16) -> tuple[GrowingBatch, NoiseScale]:
    values: dict[str, Any] = {
        "recipe": "sft",
        "data": {"train": "rows.jsonl"},
        "batch": {"size": 3, "growth": most},
        "train": {"steps": 40},
        "optimizer": {"noise_scale": every},
    }
    order, noise = GrowingBatch(ROWS, RunConfig.model_validate(values), 40, ALONE), NoiseScale()
    order.hear(noise)
    return order, noise


def walked(order: GrowingBatch, noise: NoiseScale, scales: list[float], *, first: int = 0) -> list[Indices]:
    """Rows of each step, where the noise scale is each of these when it has been measured."""
    found = []
    for step, scale in enumerate(scales, start=first):
        noise.load(NoiseScale().state())
        noise.add(NoiseEstimate(1.0, scale))
        rows = order.rows(step)
        assert order.epoch(step) == sum(map(len, found)) // len(ROWS) or first
        assert rows.tolist()[: len(order.rows(step))] == order.rows(step).tolist(), "asked twice it is the same"
        ahead = order.ahead(step + 1)
        found.append(order.drawn(rows, None).rows)
        order.after_step(step + 1)
        assert ahead.tolist() == order.rows(step + 1)[: len(ahead)].tolist(), "what was known of the next step holds"
    return found


def test_a_step_doubles_where_the_noise_is_twice_the_batch_and_never_beyond_the_most() -> None:
    scales = [1, 5.9, 6, 6, 13, 40, 100, 1, 1]
    size, wanted = 3, []
    for scale in scales:
        wanted.append(size)
        size = min(2 * size, 16) if scale >= 2 * size else size
    order, noise = made()
    found = walked(order, noise, scales)
    left, expected = 23, []
    for each in wanted:  # the last step of a pass takes what is left of it
        expected.append(min(each, left))
        left = left - expected[-1] or 23
    assert [len(each) for each in found] == expected and order.metrics() == {"next_batch": 16}


def test_every_row_comes_once_in_a_pass() -> None:
    order, noise = made()
    drawn = np.concatenate(walked(order, noise, [1, 1, 20, 20, 20, 20, 20, 20]))
    for start in range(0, len(drawn) - 22, 23):
        assert sorted(drawn[start : start + 23]) == list(range(23))


def test_where_the_noise_is_small_rows_are_those_of_a_run_without_it() -> None:
    order, noise = made()
    plain = RowOrder(ROWS, order.config, 40)
    for step, rows in enumerate(walked(order, noise, [5.0] * 30)):
        assert rows.tolist() == plain.rows(step).tolist() and plain.epoch(step) == step // 8


def test_it_looks_only_where_noise_was_measured_and_goes_on_from_a_state() -> None:
    order, noise = made(every=3)
    found = walked(order, noise, [50.0] * 5)
    assert [len(each) for each in found] == [3, 6, 6, 6, 2], "steps 1 and 4 measure it, and a pass has 23 rows"
    other, heard = made(every=3)
    other.load({name: each.clone() for name, each in order.state().items()})
    assert [each.tolist() for each in walked(other, heard, [50.0] * 4, first=5)] == [
        each.tolist() for each in walked(order, noise, [50.0] * 4, first=5)
    ]


GROWING: dict[str, Any] = {
    "batch": {"size": 2, "growth": 8},
    "optimizer": {"noise_scale": 2},
    "train": {"steps": 10, "epochs": None},
}


def test_a_training_grows_resumes_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    model = build("Llama", blocks=2)
    whole = train(model, configured(**GROWING), tmp_path / "whole")
    assert whole.records[-1]["next_batch"] > 2, "it grows"
    assert_same_bits(interrupted(model, configured(**GROWING), tmp_path / "parts", after=5), whole)
    batch = {**GROWING["batch"], "tokens_per_device": 20}
    small = train(model, configured(**{**GROWING, "batch": batch}), tmp_path / "small")
    assert small.losses == pytest.approx(whole.losses, rel=1e-4)
    assert [each["tokens"] for each in small.records] == [each["tokens"] for each in whole.records]


SIZES = [12, 30, 8]
SOURCE_N = np.repeat([0, 1, 2], SIZES)
START_S = np.asarray(SIZES) / 50
MIX_TOKENS = np.random.default_rng(0).integers(2, 9, size=50)
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
    train: Any = Sourced(MIX_TOKENS, source_N=SOURCE_N)
    found = row_order(MixedRows(train, START_S, rows, 0), config, steps, ranks)
    assert isinstance(found, LearnedMix)
    return found


def counted(draws: list[Draw]) -> Indices:
    return np.asarray([np.bincount(SOURCE_N[each.rows], minlength=3) for each in draws])


def mean_losses(rows: Indices) -> list[float]:
    """Loss of each source over rows, by tokens."""
    return [
        float(np.average(APART[own], weights=MIX_TOKENS[own]))
        if len(own := rows[SOURCE_N[rows] == source])
        else math.nan
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


class TwoProcesses:
    """Two processes: the other one hears of the rows that this one does not compute."""

    def __init__(self) -> None:
        self.other: list[Any] = []

    def gathered(self, value: list[Any]) -> list[list[Any]]:
        found = [self.other, value]
        self.other = []
        return found


def test_two_processes_mix_what_one_does() -> None:
    ranks = TwoProcesses()
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
