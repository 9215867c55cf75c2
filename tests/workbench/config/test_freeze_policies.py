"""Every policy against the rule of its paper, written a second time, and what all of them promise."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from workbench.config.freeze_config import POLICIES, FreezeConfig, LayerPlan, Moment, Observation
from workbench.config.freeze_policies import AutoFreeze, Badam, Egeria, FreezeOut, Gradual, Lisa, Static
from workbench.errors import ConfigError
from workbench.schema import parse

STEPS = 60
EVERY = [
    FreezeConfig(),
    Static(),
    Gradual(),
    FreezeOut(),
    AutoFreeze(),
    Badam(every=5),
    Lisa(every=5),
    Egeria(),
]


def at(policy: FreezeConfig, share: float, *, blocks: int = 4, seed: int = 0) -> LayerPlan:
    return policy.plan(Moment(round(share * STEPS), share, seed), blocks=blocks)


def frozen(plan: LayerPlan) -> list[int]:
    return [layer for layer, trains in enumerate(plan.trains) if not trains]


def seen(rows: np.ndarray[Any, Any]) -> tuple[Observation, ...]:
    """Observations of blocks alone, one in each row."""
    return tuple(Observation(10 * (number + 1), (math.nan, *row, math.nan)) for number, row in enumerate(rows.tolist()))


def replayed(policy: FreezeConfig, observations: tuple[Observation, ...], *, blocks: int) -> list[int]:
    """Blocks that are frozen after each of the observations; a plan is a prefix, and of full rates."""
    depths = []
    for count in range(len(observations) + 1):
        plan = policy.plan(Moment(10 * count, 0.5, 0, observations[:count]), blocks=blocks)
        assert frozen(plan) == list(range(plan.depth)) and set(plan.rates) == {1.0}
        assert plan.depth != 1, "the embeddings freeze with the first block"
        depths.append(max(0, plan.depth - 1))
    return depths


def test_each_is_known_by_its_name() -> None:
    assert {name: POLICIES[name] for name in sorted(POLICIES)} == {
        "autofreeze": AutoFreeze,
        "badam": Badam,
        "egeria": Egeria,
        "freezeout": FreezeOut,
        "gradual": Gradual,
        "lisa": Lisa,
        "static": Static,
    }
    for name, section in POLICIES.items():
        assert parse(FreezeConfig, {"policy": name}, source="my.yaml") == section()


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: policy.policy)
@pytest.mark.parametrize("blocks", [3, 5, 12])
def test_a_plan_has_every_layer_and_the_head_always_trains(policy: FreezeConfig, blocks: int) -> None:
    plans = [policy.plan(Moment(step, step / STEPS, 3), blocks=blocks) for step in range(STEPS)]
    assert {(len(plan.trains), len(plan.rates)) for plan in plans} == {(blocks + 2, blocks + 2)}
    assert all(plan.trains[-1] and plan.rates[-1] > 0 for plan in plans)
    measures = policy.observes is not None
    assert measures == (policy.interval > 0) == isinstance(policy, (AutoFreeze, Egeria))
    assert policy.fixed == (type(policy) in (FreezeConfig, Static))
    assert not policy.fixed or len(set(plans)) == 1
    assert policy.fixed or measures or len(set(plans)) > 1


@pytest.mark.parametrize(
    ("layers", "blocks", "depth"), [(1, 4, 2), (4, 4, 5), (0.5, 12, 7), (0.01, 12, 2), (0.3, 12, 5), (0.99, 2, 3)]
)
def test_static_freezes_a_number_or_a_share(layers: float, blocks: int, depth: int) -> None:
    policy = Static(layers=layers)
    assert at(policy, 0.0, blocks=blocks) == at(policy, 0.9, blocks=blocks)
    assert frozen(at(policy, 0.0, blocks=blocks)) == list(range(depth))


@pytest.mark.parametrize(
    ("policy", "cure"),
    # Under an adapter nothing would train above four frozen blocks.
    [(Static(layers=5), "Write a number below 4"), (Lisa(active=5), "Write freeze.active=4 or less")],
)
def test_more_blocks_than_there_are_is_refused_with_what_to_write(policy: Static | Lisa, cure: str) -> None:
    said = policy.refusal(4)
    assert said is not None and "5 is more than the 4 blocks" in said and cure in said
    assert policy.refusal(5) is None


@pytest.mark.parametrize("until", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_gradual_thaws_one_layer_at_a_time_from_the_top(until: float, blocks: int) -> None:
    policy, before = Gradual(until=until), blocks
    assert at(policy, 0.0, blocks=blocks).depth == blocks
    for share in np.linspace(0, 1, 1001)[:-1].tolist():
        plan = at(policy, share, blocks=blocks)
        # The last block is there from the beginning; each of the others, and then the embeddings, after as long again.
        expected = max(0, blocks - math.floor(share * blocks / until + 1e-9))
        assert plan.depth == len(frozen(plan)) == expected and before - expected in (0, 1)
        before = expected
    assert at(policy, until, blocks=blocks).depth == 0


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("spacing", "power"), [("linear", 1), ("cubic", 3)])
def test_freezeout_is_half_a_cosine_that_ends_at_each_layer_s_time(spacing: Any, power: int, scaled: bool) -> None:
    policy, blocks, first = FreezeOut(first=0.6, spacing=spacing, scaled=scaled), 4, 0.6
    times = [(first + (1 - first) * layer / blocks) ** power for layer in range(blocks + 1)]
    times.append(1.0)
    assert policy.times(blocks) == pytest.approx(times, abs=1e-15) and policy.times(blocks)[-2:] == [1, 1]
    for share in np.linspace(0, 1, 97)[:-1].tolist():
        plan = at(policy, share, blocks=blocks)
        for time, trains, rate in zip(times, *plan, strict=True):
            assert trains == (share < time)
            cosine = 0.5 * (1 + math.cos(math.pi * share / time)) if trains else 0.0
            assert rate == pytest.approx(cosine / time if scaled else cosine, abs=1e-12)
    for layer, time in enumerate(policy.times(blocks)):
        plan = at(policy, time, blocks=blocks)
        assert plan.rates[layer] == 0 and not plan.trains[layer]
        just_before = at(policy, np.nextafter(time, 0), blocks=blocks)
        assert just_before.trains[layer]


def test_freezeout_scaled_lets_all_layers_travel_equally_far() -> None:
    policy, shares = FreezeOut(first=0.5, scaled=True), (np.arange(4000) + 0.5) / 4000
    travelled = np.mean([at(policy, share).rates for share in shares.tolist()], axis=0)
    assert travelled == pytest.approx([0.5] * 6, abs=1e-4)


def test_lisa_draws_so_many_blocks_equally_often() -> None:
    policy, blocks, draws = Lisa(active=3, every=1), 8, 4000
    counts: Counter[int] = Counter()
    for step in range(draws):
        plan = policy.plan(Moment(step, 0.5, 7), blocks=blocks)
        assert plan.trains[0] and plan.trains[-1] and sum(plan.trains[1:-1]) == 3
        counts.update(np.flatnonzero(plan.trains[1:-1]).tolist())
    expected = draws * 3 / blocks
    statistic = sum((counts[block] - expected) ** 2 / expected for block in range(blocks))
    assert statistic < 24.3  # the 99.9th percentile of chi-square with 7 degrees of freedom


def test_lisa_is_a_function_of_seed_and_interval() -> None:
    policy = Lisa(active=2, every=20)
    runs = {
        seed: [policy.plan(Moment(step, step / 200, seed), blocks=12).trains for step in range(200)] for seed in (0, 1)
    }
    assert runs[0] != runs[1]
    for plans in runs.values():
        parts = [set(plans[start : start + 20]) for start in range(0, 200, 20)]
        assert {len(part) for part in parts} == {1} and len(set.union(*parts)) > 5
    again = [policy.plan(Moment(step, 0.0, 0), blocks=12).trains for step in range(200)]
    assert again == runs[0]


def test_lisa_of_all_blocks_trains_everything() -> None:
    assert at(Lisa(active=4), 0.3) == at(FreezeConfig(), 0.3)


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
def test_badam_trains_one_block_at_a_time_and_each_once_in_a_round(order: Any) -> None:
    policy, blocks = Badam(every=3, order=order), 5
    plans = [policy.plan(Moment(step, 0.5, 7), blocks=blocks).trains for step in range(3 * blocks * 2)]
    assert all(not plan[0] and plan[-1] and sum(plan[1:-1]) == 1 for plan in plans)
    turns = [plan.index(True) - 1 for plan in plans[::3]]
    assert plans == [plan for plan in plans[::3] for _ in range(3)]
    first, second = turns[:blocks], turns[blocks:]
    assert sorted(first) == sorted(second) == list(range(blocks))
    straight = {"ascending": list(range(blocks)), "descending": list(range(blocks))[::-1]}
    assert (first == second == straight[order]) if order in straight else first != second


def by_the_authors(norms: np.ndarray[Any, Any], percentile: float) -> list[int]:
    """Frozen blocks after each interval, as in the code that came with AutoFreeze."""
    start, starts = 0, [0, 0]
    for before, after in pairwise(norms):
        ratios = abs(before - after) / before
        bound = np.percentile(ratios[start:], percentile)
        start += int(np.argmax(ratios[start:] >= bound))
        starts.append(start)
    return starts


@pytest.mark.parametrize("percentile", [30, 50, 100])
def test_autofreeze_is_the_authors_rule(percentile: float) -> None:
    depths = set()
    for seed in range(30):
        norms = np.random.default_rng(seed).uniform(0.5, 2, (6, 8))
        # First blocks change least, as they do in training.
        norms = 1 + norms * np.linspace(0.1, 1, 8)
        found = replayed(AutoFreeze(percentile=percentile, most=1), seen(norms), blocks=8)
        assert found == by_the_authors(norms, percentile)
        depths.add(found[-1])
    assert len(depths) > 1 and max(depths) <= 7


@pytest.mark.parametrize(("most", "limit"), [(0.01, 0), (0.3, 2), (0.75, 6), (1.0, 7)])
def test_autofreeze_freezes_no_more_than_it_may(most: float, limit: int) -> None:
    norms = np.stack([np.ones(8), 1 + np.arange(8) / 10])
    assert replayed(AutoFreeze(percentile=100, most=most), seen(norms), blocks=8) == [0, 0, limit]


def test_autofreeze_is_not_stopped_by_blocks_without_anything_to_train() -> None:
    norms = np.array([[math.nan, 1, 1, math.nan, 1], [math.nan, 1.1, 1.2, math.nan, 1.3]])
    assert replayed(AutoFreeze(most=1), seen(norms), blocks=5) == [0, 0, 2]
    assert replayed(AutoFreeze(most=1, percentile=100), seen(norms), blocks=5) == [0, 0, 4]
    nothing = np.full((4, 5), math.nan)
    assert replayed(AutoFreeze(most=1), seen(nothing), blocks=5) == [0] * 5


def test_autofreeze_takes_gradients_that_begin_at_zero() -> None:
    norms = np.array([[0.0, 0.0, 1.0], [0.0, 3.0, 1.1]])
    assert replayed(AutoFreeze(most=1), seen(norms), blocks=3) == [0, 0, 1]


def by_line(values: np.ndarray[Any, Any], *, window: int, tolerance: float) -> list[int]:
    """Frozen blocks after each measurement: Egeria's rule with numpy's own least squares."""
    front, since, fronts = 0, 0, [0]
    for number in range(1, len(values) + 1):
        judged = values[max(since, number - window) : number, front]
        if front < values.shape[1] - 1 and len(judged) == window:
            slope = np.polynomial.Polynomial.fit(np.arange(window), judged, 1).convert().coef[1]
            if abs(slope) / judged.mean() <= tolerance:
                front, since = front + 1, number
        fronts.append(front)
    return fronts


@pytest.mark.parametrize("window", [2, 3, 5])
def test_egeria_freezes_the_frontmost_block_when_its_line_is_flat(window: int) -> None:
    depths = set()
    for seed in range(20):
        generator = np.random.default_rng(seed)
        falling = np.exp(-np.arange(30)[:, None] / np.linspace(2, 20, 4))
        values = (0.1 + falling) * generator.uniform(0.9, 1.1, (30, 4))
        found = replayed(Egeria(window=window, tolerance=0.05), seen(values), blocks=4)
        assert found == by_line(values, window=window, tolerance=0.05)
        depths.add(found[-1])
    assert max(depths) == 3


def test_egeria_waits_a_window_for_each_block_and_never_freezes_the_last() -> None:
    still = np.ones((20, 4))
    assert replayed(Egeria(window=3), seen(still), blocks=4) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 12
    unmoved = np.zeros((4, 2))
    assert replayed(Egeria(window=3), seen(unmoved), blocks=2) == [0, 0, 0, 1, 1]


def test_egeria_does_not_freeze_what_still_changes() -> None:
    steep = np.exp(-np.arange(20) / 5)[:, None] * np.ones(4)
    assert replayed(Egeria(window=4, tolerance=0.05), seen(steep), blocks=4)[-1] == 0
    assert replayed(Egeria(window=4, tolerance=0.3), seen(steep), blocks=4)[-1] == 3
    assert replayed(Egeria(window=4, tolerance=0.05), seen(1 / steep), blocks=4)[-1] == 0


def test_egeria_skips_blocks_without_anything_to_train() -> None:
    values = np.array([[math.nan, 1, math.nan, 1, math.nan]] * 9)
    found = replayed(Egeria(window=2), seen(values), blocks=5)
    assert found == [0, 0] + [3] * 8, "the fourth block is the last that trains"


@pytest.mark.parametrize("policy", [AutoFreeze(), Egeria(window=3, tolerance=0.2)], ids=lambda policy: policy.policy)
def test_what_is_frozen_stays_so_whatever_comes(policy: FreezeConfig) -> None:
    for seed in range(30):
        values = np.random.default_rng(seed).lognormal(size=(12, 6))
        found = replayed(policy, seen(values), blocks=6)
        assert found == sorted(found)
        # Once frozen, a block is not measured any more; nothing may depend on what would have been.
        for number, depth in enumerate(found[:-1]):
            values[number, :depth] = math.nan
        assert replayed(policy, seen(values), blocks=6) == found


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"policy": "lsa"}, "Did you mean `lisa`"),
        ({"policy": "static", "layers": 0}, "layers: expected greater than 0"),
        ({"policy": "static", "layers": 1.5}, "layers: expected .*found 1.5"),
        ({"policy": "gradual", "until": 0}, "until: expected greater than 0"),
        ({"policy": "freezeout", "first": 1}, "first: expected less than 1"),
        ({"policy": "freezeout", "spacing": "square"}, "spacing: expected 'linear' or 'cubic'"),
        ({"policy": "autofreeze", "percentile": 200}, "percentile: expected less than or equal to 100, found 200"),
        ({"policy": "autofreeze", "every": 0.1}, "every: expected a valid integer"),
        ({"policy": "lisa", "active": 0}, "active: expected greater than 0"),
        ({"policy": "lisa", "cache": "disk"}, "Leave freeze.cache out"),
        ({"policy": "badam", "every": 0}, "every: expected greater than 0"),
        ({"policy": "badam", "order": "upwards"}, "order: expected 'random', 'ascending' or 'descending'"),
        ({"policy": "badam", "cache": "memory"}, "Leave freeze.cache out"),
        ({"policy": "badam", "active": 2}, "freeze.active: is for freeze.policy=lisa, not for badam"),
        ({"policy": "egeria", "window": 1}, "window: expected greater than or equal to 2"),
        ({"policy": "egeria", "tolerance": 0}, "tolerance: expected greater than 0"),
        ({"layers": 3}, "freeze.layers: is for freeze.policy=static, not for none"),
        ({"policy": "static", "until": 0.5}, "freeze.until: is for freeze.policy=gradual, not for static"),
    ],
    ids=str,
)
def test_mistakes_name_their_cure(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        parse(FreezeConfig, values, source="my.yaml")
