"""Proposals are new, inside the space, and a function of seed and history alone; importance finds what matters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from workbench.config.sections.search_config import SearchConfig
from workbench.training.search import optuna_proposals
from workbench.training.search.optuna_proposals import Settings, importances, propose

SPACE = {
    "train.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "adapter.rank": {"low": 1, "high": 64, "log": True, "integer": True},
    "adapter.targets": ["all-linear", ["q_proj"], ["q_proj", "v_proj"]],
    "adapter.dropout": {"low": 0.0, "high": 0.3},
}


def search(sampler: str = "random", **other: object) -> SearchConfig:
    return SearchConfig.model_validate({"space": SPACE, "sampler": sampler, **other})


def rates(proposals: Sequence[Settings]) -> list[float]:
    return [math.log10(each["train.learning_rate"]) for each in proposals]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_proposals_are_inside_the_space_new_and_always_the_same(sampler: str) -> None:
    first = propose(search(sampler), [], [], count=12, seed=3)
    gave = [{0: float(number)} for number in range(12)]
    then = propose(search(sampler), first, gave, count=8, seed=3)
    assert then == propose(search(sampler), first, gave, count=8, seed=3)
    assert then != propose(search(sampler), first, gave, count=8, seed=4)
    assert len({str(each) for each in [*first, *then]}) == 20
    for each in [*first, *then]:
        assert 1e-4 <= each["train.learning_rate"] <= 1e-1 and len(f"{each['adapter.dropout']:g}") <= 9
        assert isinstance(each["adapter.rank"], int) and 1 <= each["adapter.rank"] <= 64
        assert each["adapter.targets"] in SPACE["adapter.targets"] and 0 <= each["adapter.dropout"] <= 0.3


def test_chance_draws_logarithms_evenly() -> None:
    found = np.array(rates(propose(search(), [], [], count=200, seed=0)))
    counts, _ = np.histogram(found, bins=3, range=(-4, -1))
    assert counts.min() > 40


def test_tpe_looks_where_losses_were_low_and_a_trial_that_came_farther_counts_more() -> None:
    tried = propose(search(), [], [], count=24, seed=0)
    gave: list[dict[int, float]] = [{0: abs(rate + 2)} for rate in rates(tried)]  # best at a rate of 0.01
    near = [abs(rate + 2) for rate in rates(propose(search("tpe"), tried, gave, count=12, seed=0))]
    chance = [abs(rate + 2) for rate in rates(propose(search(), tried, gave, count=12, seed=0))]
    assert np.mean(near) < 0.6 * np.mean(chance)
    for one, rate in zip(gave, rates(tried), strict=True):  # those below 0.001 came on, whatever they lost before
        one |= {1: 0.5} if rate < -3 else {}
    moved = rates(propose(search("tpe"), tried, gave, count=12, seed=0))
    assert np.mean(moved) < -2.5


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_space_of_as_many_settings_as_trials_is_tried_whole(sampler: str) -> None:
    space = {"adapter.rank": {"low": 1, "high": 4, "integer": True}, "schedule.warmup": [0.0, 0.1, 0.2]}
    config = search(sampler, space=space, trials=12)
    first = propose(config, [], [], count=7, seed=0)
    rest = propose(config, first, [{0: 1.0}] * 7, count=5, seed=0)
    assert len({str(each) for each in [*first, *rest]}) == 12 == config.settings


def test_a_range_too_narrow_for_four_digits_is_tried_as_often_as_asked() -> None:
    config = search(space={"train.learning_rate": {"low": 1e-3, "high": 1.002e-3}}, trials=8)
    found = [each["train.learning_rate"] for each in propose(config, [], [], count=8, seed=0)]
    assert len(set(found)) == 8 and min(found) >= 1e-3 and max(found) <= 1.002e-3


def test_what_is_listed_of_a_range_follows_its_scale() -> None:
    """Listed where chance finds nothing new."""
    for log, wanted in ((True, [1e-4, 1e-3, 1e-2, 1e-1]), (False, [1e-4, 0.0334, 0.0667, 0.1])):
        space = {"train.learning_rate": {"low": 1e-4, "high": 1e-1, "log": log}}
        listed = optuna_proposals._enumerated(search(space=space, trials=4))
        assert [each["train.learning_rate"] for each in listed] == pytest.approx(wanted, rel=1e-12 if log else 1e-2)


def test_importance_is_that_of_the_setting_that_decides() -> None:
    tried = propose(search(), [], [], count=32, seed=0)
    gave = [{0: abs(rate + 2) if number else math.inf} for number, rate in enumerate(rates(tried))]
    found = importances(search(), tried, gave, seed=0)
    assert next(iter(found)) == "train.learning_rate" and found["train.learning_rate"] > 0.7
    assert sum(found.values()) == pytest.approx(1) and set(found) == set(SPACE)
    assert importances(search(), tried[:3], gave[:3], seed=0) == {}
