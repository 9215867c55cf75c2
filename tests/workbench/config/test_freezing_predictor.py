"""The predictor by its equations written a second time, and what the policy makes of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from workbench.config.freeze_config import Moment, Observation
from workbench.config.freeze_policies import SmartFrz
from workbench.config.freezing_predictor import FEATURES, WIDTH, WINDOW, Floats, features, histories, settled, shipped

BLOCKS = 4


def walk(*, settles: bool, intervals: int = 12, layers: int = BLOCKS + 2, scale: float = 1.0) -> Floats:
    """Ways and distances of layers that go straight on, or step back and forth ever less; the first has no values."""
    times = np.arange(intervals)
    step_T = 0.3**times * (-1.0) ** times if settles else np.ones(intervals)
    place_T = np.cumsum(step_T)
    moved_TL, away_TL = (np.repeat(abs(each)[:, None], layers, axis=1) * scale for each in (step_T, place_T))
    moved_TL[:, 0] = away_TL[:, 0] = math.nan
    return np.concatenate([moved_TL, away_TL], axis=1)


def seen(values: Floats) -> tuple[Observation, ...]:
    return tuple(Observation(10 * (number + 1), tuple(row)) for number, row in enumerate(values.tolist()))


def depths(policy: SmartFrz, values: Floats, blocks: int = BLOCKS) -> list[int]:
    """Frozen blocks after each interval."""
    plans = [
        policy.plan(Moment(10 * count, 0.5, 0, seen(values[:count])), blocks=blocks) for count in range(len(values) + 1)
    ]
    assert all(plan.depth != 1 and plan.trains[-1] for plan in plans), "the embeddings freeze with the first block"
    return [max(0, plan.depth - 1) for plan in plans]


def test_the_predictor_is_attention_and_a_layer() -> None:
    """Number by number: softmax of products with the latest interval's query, a sum of values, two layers."""
    chance = np.random.default_rng(0)
    w: dict[str, Any] = {name: np.asarray(each) for name, each in shipped().items()}
    for count in (1, 3, WINDOW, WINDOW + 5):
        x = chance.normal(size=(count, FEATURES))
        z = [
            [sum(row[f] * w["E"][f][d] for f in range(FEATURES)) + w["e"][d] + w["p"][place][d] for d in range(WIDTH)]
            for row, place in zip(x[-WINDOW:], range(max(0, WINDOW - count), WINDOW), strict=True)
        ]
        project = lambda v, m: [sum(v[i] * m[i][d] for i in range(WIDTH)) for d in range(WIDTH)]  # noqa: E731
        query, keys, values = project(z[-1], w["Q"]), [project(v, w["K"]) for v in z], [project(v, w["V"]) for v in z]
        weights = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(WIDTH)) for key in keys]
        mixed = [
            z[-1][d] + sum(weight * value[d] for weight, value in zip(weights, values, strict=True)) / sum(weights)
            for d in range(WIDTH)
        ]
        hidden = [max(0.0, value + w["b"][d]) for d, value in enumerate(project(mixed, w["A"]))]
        logit = sum(h * c for h, c in zip(hidden, w["c"], strict=True)) + w["d"][0]
        assert settled(x, w) == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)


def test_features_are_lengths_and_angles_of_the_way() -> None:
    places = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 6.0], [0.0, 6.0]])
    moved = np.linalg.norm(np.diff(places, axis=0), axis=1)
    away = np.linalg.norm(places[1:], axis=1)
    found = features(moved, away)
    cosines = [
        0.0,
        *(
            float((places[i] - places[0]) @ (places[i + 1] - places[i]) / away[i - 1] / moved[i])
            for i in range(1, len(moved))
        ),
    ]
    assert found[:, 2] == pytest.approx(cosines)
    assert found[:, 0] == pytest.approx(np.log(moved / 5))
    assert found[:, 1] == pytest.approx(moved / away)


def test_what_is_known_of_an_interval_does_not_change_later_and_ends_where_a_block_froze() -> None:
    """Of four blocks the first freezes, and the second never trains."""
    values = walk(settles=True)
    values[5:, [1, BLOCKS + 3]] = values[:, [2, BLOCKS + 4]] = math.nan
    whole = histories(values)
    assert {block: len(each) for block, each in whole.items()} == {0: 5, 2: 12, 3: 12}
    for count in range(1, len(values)):
        for block, each in histories(values[:count]).items():
            assert np.array_equal(each, whole[block][:count])


def test_blocks_freeze_that_have_settled_and_no_others() -> None:
    assert set(depths(SmartFrz(), walk(settles=False))) == {0}
    found = depths(SmartFrz(), walk(settles=True))
    assert found[-1] == 3 and found == sorted(found), "the first blocks freeze, three quarters of them at most"


def test_neither_the_unit_of_values_nor_the_share_of_the_run_matters() -> None:
    small, large = (depths(SmartFrz(), walk(settles=True, scale=scale)) for scale in (1e-4, 1e3))
    assert small == large
    plans = {SmartFrz().plan(Moment(90, share, 0, seen(walk(settles=True))), blocks=BLOCKS) for share in (0.1, 0.9)}
    assert len(plans) == 1


@pytest.mark.parametrize(("most", "limit"), [(0.1, 0), (0.5, 2), (1.0, 3)])
def test_it_freezes_no_more_than_it_may_and_never_the_last_block(most: float, limit: int) -> None:
    assert max(depths(SmartFrz(most=most), walk(settles=True))) == limit


def test_a_threshold_of_one_freezes_nothing() -> None:
    assert set(depths(SmartFrz(threshold=1), walk(settles=True))) == {0}


def test_blocks_without_values_stop_nothing() -> None:
    values = walk(settles=True)
    values[:, [2, 8]] = math.nan  # the second block
    assert max(depths(SmartFrz(), values)) == 3
