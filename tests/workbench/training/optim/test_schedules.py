"""Learning rates over a run, and how much of it is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
)
from transformers import optimization

from workbench.config import RunConfig
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.config.yaml_text import override
from workbench.errors import ConfigError
from workbench.runs import deadline
from workbench.runs.deadline import Deadline
from workbench.schema import parse
from workbench.training.optim.schedules import Limits, drop_due, factor, falls_from, limits, moments, total_steps

FALLING: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear"},
    "cosine": {"name": "cosine"},
    "polynomial": {"name": "polynomial"},
    "rex": {"name": "rex"},
    "one_cycle": {"name": "one_cycle"},
    "wsd, linear": {"name": "wsd", "decay": 0.3},
    "wsd, cosine": {"name": "wsd", "decay": 0.3, "decay_shape": "cosine"},
    "wsd, sqrt": {"name": "wsd", "decay": 0.3, "decay_shape": "sqrt"},
}
"""Those that end at the floor."""
ALL = {**FALLING, "inverse_sqrt": {"name": "inverse_sqrt"}, "constant": {"name": "constant"}}

shares = st.floats(0, 1)
warmups = st.floats(1e-6, 0.7)


def _schedule(kind: str, **values: Any) -> ScheduleConfig:
    """A schedule with a floor where it can have one; one_cycle may not end above its start."""
    floor = 0.0 if kind == "constant" else values.pop("floor", 0.0)
    start = values.pop("start", floor if kind == "one_cycle" else 0.0)
    return ScheduleConfig(**ALL[kind], **{**values, "floor": floor, "start": start})


def _stretched(height: float, floor: float) -> float:
    return floor + (1 - floor) * height


# ---- formulas


@given(z=shares, warmup=warmups, floor=st.floats(0, 0.9))
@example(z=0.0, warmup=0.05, floor=0.0)
@example(z=1.0, warmup=0.05, floor=0.1)
def test_what_falls_from_the_warm_up_on(z: float, warmup: float, floor: float) -> None:
    """Loshchilov & Hutter 2017, equation 5; Chen et al. 2022, section 3; Smith & Topin 2018 with half cosines."""
    cosine = floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * z))
    expected = {
        "linear": _stretched(1 - z, floor),
        "polynomial": _stretched((1 - z) ** 2, floor),
        "cosine": cosine,
        "rex": _stretched((1 - z) / (1 / 2 + 1 / 2 * (1 - z)), floor),
        "one_cycle": cosine,
    }
    for kind, height in expected.items():
        found = factor(warmup + z * (1 - warmup), _schedule(kind, warmup=warmup, floor=floor))
        assert found == pytest.approx(height, abs=1e-9), kind


@given(z=shares, decay=st.floats(0.01, 0.9), floor=st.floats(0, 0.9))
def test_what_is_stable_and_cools_down(z: float, decay: float, floor: float) -> None:
    """Hu et al. 2024, equation 1, with the cooldowns of Haegele et al. 2024, equation 2."""
    # The root is so steep at its beginning that a rounded z shows.
    assume(z == 0 or z > 1e-6)
    shapes = {"linear": 1 - z, "cosine": 0.5 * (1 + math.cos(math.pi * z)), "sqrt": 1 - math.sqrt(z)}
    for shape, height in shapes.items():
        config = ScheduleConfig(name="wsd", warmup=0.1, decay=decay, decay_shape=shape, floor=floor)
        assert factor(1 - decay + z * decay, config) == pytest.approx(_stretched(height, floor), abs=1e-7), shape
        assert factor(0.1 + z * (1 - decay - 0.1), config) == pytest.approx(1.0, abs=1e-7), shape


@pytest.mark.parametrize("warm", [1, 40, 400])
def test_inverse_sqrt_is_that_of_the_transformer(warm: int) -> None:
    """Vaswani et al. 2017, equation 3, as a share of its largest value."""
    steps = 1000
    config = ScheduleConfig(name="inverse_sqrt", warmup=warm / steps)
    paper = np.array([min(step**-0.5, step * warm**-1.5) for step in range(1, steps + 1)])
    found = [factor(step / steps, config) for step in range(1, steps + 1)]
    np.testing.assert_allclose(found, paper / paper.max(), rtol=1e-12)


@given(progress=shares, warmup=warmups, start=st.floats(0, 0.9))
def test_warm_up(progress: float, warmup: float, start: float) -> None:
    assume(progress < warmup)
    for kind in ALL:
        risen = progress / warmup
        if kind == "one_cycle":
            risen = 0.5 - 0.5 * math.cos(math.pi * risen)
        found = factor(progress, _schedule(kind, warmup=warmup, start=start))
        assert found == pytest.approx(start + (1 - start) * risen, abs=1e-12), kind


@pytest.mark.parametrize(("cycles", "growth"), [(1, 1), (3, 1), (4, 2), (2, 3)])
def test_restarts_are_those_of_sgdr(cycles: int, growth: int) -> None:
    """torch's CosineAnnealingWarmRestarts, whose next cycle begins where the last of ours ends."""
    first = 10
    steps = first * sum(growth**number for number in range(cycles))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=first, T_mult=growth, eta_min=0.1)
    config = ScheduleConfig(name="cosine", warmup=0, floor=0.1, cycles=cycles, cycle_growth=growth if cycles > 1 else 1)
    for step in range(steps):
        assert factor(step / steps, config) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9), step
        optimizer.step()
        scheduler.step()
    assert factor(1.0, config) == pytest.approx(0.1)


@given(power=st.floats(0.2, 5), floor=st.floats(0, 0.9))
def test_polynomials_are_those_of_torch(power: float, floor: float) -> None:
    config = ScheduleConfig(name="polynomial", warmup=0, power=power, floor=floor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = PolynomialLR(optimizer, total_iters=20, power=power)
    for step in range(20):
        wanted = floor + (1 - floor) * optimizer.param_groups[0]["lr"]
        assert factor(step / 20, config) == pytest.approx(wanted, abs=1e-9)
        optimizer.step()
        scheduler.step()


# ---- what all of them promise


@given(st.sampled_from(list(ALL)), shares, warmups, st.floats(0, 0.9))
def test_never_above_the_peak_nor_below_the_floor(kind: str, progress: float, warmup: float, floor: float) -> None:
    config = _schedule(kind, warmup=warmup, floor=floor)
    value = factor(progress, config)
    assert 0 <= value <= 1
    assert value >= config.floor or (progress < warmup and kind != "one_cycle")


@given(st.sampled_from(list(ALL)), warmups, st.floats(0, 0.9))
def test_peak_and_end(kind: str, warmup: float, floor: float) -> None:
    config = _schedule(kind, warmup=warmup, floor=floor)
    assert factor(0.0, config) == config.start
    assert factor(warmup, config) == factor(falls_from(config), config) == 1
    ends = {"constant": 1.0, "inverse_sqrt": _stretched(math.sqrt(warmup), floor)}
    assert factor(1.0, config) == pytest.approx(ends.get(kind, floor), abs=1e-15)


@given(st.sampled_from(list(ALL)), warmups, shares, shares)
def test_rises_then_falls(kind: str, warmup: float, one: float, other: float) -> None:
    config, (early, late) = _schedule(kind, warmup=warmup), sorted((one, other))
    before, after = factor(early, config), factor(late, config)
    if late < warmup:
        assert before <= after
    elif early >= warmup:
        assert before >= after - 1e-15
    if warmup <= early <= late <= falls_from(config):
        assert before == after == 1


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("warmup", [0.05, 0.3])
def test_no_jump_where_one_phase_becomes_the_next(kind: str, warmup: float) -> None:
    config, tiny = _schedule(kind, warmup=warmup, floor=0.1), 1e-9
    for edge in {warmup, falls_from(config)}:
        values = [factor(edge + move, config) for move in (-tiny, 0, tiny) if edge + move <= 1]
        # 1 - sqrt(z) falls by sqrt(1e-9 / 0.3) here.
        assert max(values) - min(values) < 1e-4


def test_without_a_warm_up_the_peak_is_at_once() -> None:
    for kind in ALL.keys() - {"inverse_sqrt", "one_cycle"}:
        assert factor(0.0, _schedule(kind, warmup=0.0)) == 1


# ---- torch and transformers

STEPS, WARM, COOL = 200, 30, 50


def _rates(make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int) -> list[float]:
    """Learning rates of steps 0 to `steps` - 1 at a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda o: optimization.get_linear_schedule_with_warmup(o, WARM, STEPS), {"name": "linear"}),
        (lambda o: optimization.get_cosine_schedule_with_warmup(o, WARM, STEPS), {"name": "cosine"}),
        (
            lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(o, WARM, STEPS, min_lr_rate=0.1),
            {"name": "cosine", "floor": 0.1},
        ),
        (lambda o: optimization.get_inverse_sqrt_schedule(o, WARM), {"name": "inverse_sqrt"}),
        (lambda o: optimization.get_constant_schedule_with_warmup(o, WARM), {"name": "constant"}),
        *(  # theirs begins at its floor
            (
                lambda o, theirs=theirs: optimization.get_wsd_schedule(
                    o, WARM, COOL, num_training_steps=STEPS, decay_type=theirs, min_lr_ratio=0.1
                ),
                {"name": "wsd", "decay": COOL / STEPS, "decay_shape": ours, "start": 0.1, "floor": 0.1},
            )
            for theirs, ours in (("linear", "linear"), ("cosine", "cosine"), ("1-sqrt", "sqrt"))
        ),
        (lambda o: PolynomialLR(o, STEPS, power=1.0), {"name": "linear", "warmup": 0.0}),
        (lambda o: CosineAnnealingLR(o, STEPS, eta_min=0.2), {"name": "cosine", "warmup": 0.0, "floor": 0.2}),
    ],
    ids=["linear", "cosine", "floor", "inverse_sqrt", "constant", "wsd", "wsd-cosine", "wsd-sqrt", "poly", "annealing"],
)
def test_equals_that_of_torch_and_transformers(make: Callable[..., LRScheduler], values: dict[str, Any]) -> None:
    config = ScheduleConfig(**{"warmup": WARM / STEPS, **values})
    found = [factor(step / STEPS, config) for step in range(STEPS)]
    np.testing.assert_allclose(found, _rates(make, STEPS), rtol=0, atol=1e-6)


@given(losses=st.lists(st.integers(0, 9), min_size=1, max_size=40), patience=st.integers(1, 4), floor=st.floats(0, 0.4))
def test_plateau_is_that_of_torch(losses: list[int], patience: int, floor: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    peer = ReduceLROnPlateau(optimizer, factor=0.3, patience=patience - 1, threshold=0.0, min_lr=floor, eps=0.0)
    config = ScheduleConfig(name="plateau", patience=patience, drop=0.3, floor=floor, warmup=0.1)
    best, stalled, dropped_at, drops = math.inf, 0, 0, 0
    for loss in losses:
        peer.step(loss)
        if loss < best:
            best, stalled, dropped_at = loss, 0, 0
        else:
            stalled += 1
        if drop_due(stalled, dropped_at, config):
            drops, dropped_at = drops + 1, stalled
        assert factor(0.5, config, drops=drops) == pytest.approx(optimizer.param_groups[0]["lr"])
        assert factor(0.05, config, drops=0) == pytest.approx(0.5), "the warm-up is that of all"


@pytest.mark.parametrize(("share", "divided", "finally_divided"), [(0.3, 25.0, 1e4), (0.1, 10.0, 1.0), (0.75, 2.0, 8)])
def test_equals_one_cycle_of_torch(share: float, divided: float, finally_divided: float) -> None:
    """Torch counts from its first step to its last: the peak is at step share * STEPS - 1 of STEPS - 1."""

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        cycle = {"pct_start": share, "div_factor": divided, "final_div_factor": finally_divided}
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=STEPS, cycle_momentum=False, **cycle)

    config = ScheduleConfig(
        name="one_cycle",
        warmup=(share * STEPS - 1) / (STEPS - 1),
        start=1 / divided,
        floor=1 / (divided * finally_divided),
    )
    found = [factor(step / (STEPS - 1), config) for step in range(STEPS)]
    # The scheduler of the last step would step past its end.
    theirs = _rates(make, STEPS - 1)
    np.testing.assert_allclose(found[:-1], theirs, rtol=0, atol=1e-6)
    assert found[-1] == pytest.approx(config.floor)


# ---- moments and mistakes


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (None, 9, set()),
        (4, 9, {4, 8, 9}),
        (20, 9, {9}),
        (0.25, 14, {4, 7, 11, 14}),
        (0.01, 3, {1, 2, 3}),
        (0.1, 10, set(range(1, 11))),
        (1, 2, {1, 2}),
    ],
)
def test_moments(every: int | float | None, steps: int, expected: set[int]) -> None:
    assert moments(every, steps) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["schedule.name=cosin"], "schedule.name: expected 'linear', 'cosine', 'polynomial', 'rex'"),
        (["schedule.shape=sqrt"], "schedule.shape: unknown key. Did you mean `decay_shape`?"),
        (["schedule.name=wsd", "schedule.decay_shape=root"], "expected 'linear', 'cosine' or 'sqrt', found 'root'"),
        (["schedule.name=wsd", "schedule.warmup=0.9"], "make them sum to 1 or less"),
        (["schedule.decay_shape=sqrt"], "decay and decay_shape are for wsd, not for linear. Write schedule.name=wsd"),
        (["schedule.name=rex", "schedule.decay=0.5"], "for wsd, not for rex"),
        (["schedule.name=constant", "schedule.floor=0.1"], "constant never falls to floor 0.1. Leave schedule.floor"),
        (
            ["schedule.name=inverse_sqrt", "schedule.warmup=0"],
            "inverse_sqrt needs a warm-up. Write schedule.warmup=0.05",
        ),
        (["schedule.name=one_cycle", "schedule.warmup=0"], "one_cycle needs a warm-up. Write schedule.warmup=0.3"),
        (["schedule.name=one_cycle", "schedule.floor=0.1"], "never ends above start 0.0. Write schedule.start=0.1"),
        (
            ["schedule.start=0.1", "schedule.warmup=0"],
            "start 0.1 is where a warm-up begins. Write schedule.warmup=0.05",
        ),
        (["schedule.floor=1"], "schedule.floor: expected less than 1"),
        (["schedule.power=2"], "power is for polynomial, not for linear. Write schedule.name=polynomial"),
        (["schedule.name=rex", "schedule.cycles=3"], "cycles are for cosine, not for rex. Write schedule.name=cosine"),
        (["schedule.name=cosine", "schedule.cycle_growth=2"], "is for several cycles. Write schedule.cycles=3"),
        (["schedule.name=polynomial", "schedule.power=0"], "schedule.power: expected greater than 0"),
        (["schedule.name=cosine", "schedule.cycles=0"], "schedule.cycles: expected greater than 0"),
    ],
)
def test_mistakes_say_what_to_write(words: list[str], expected: str) -> None:
    good = {"recipe": "sft", "model": {"id": "starter"}, "adapter": {"method": "lora"}, "data": {"train": "a.jsonl"}}
    with pytest.raises(ConfigError, match="1 mistake") as caught:
        parse(RunConfig, override(good, words), source="my.yaml")
    assert expected in str(caught.value)


def test_two_contradictions_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)decay and decay_shape are for wsd.*one_cycle needs a warm-up"):
        ScheduleConfig(name="one_cycle", warmup=0, decay=0.5)


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": 10}, **sections}
    )


@given(steps=st.floats(0, 50), tokens=st.floats(0, 5000), done=st.floats(0, 1))
def test_the_largest_share_counts(steps: float, tokens: float, done: float) -> None:
    found = Limits(40, 4000).share(done, steps=steps, tokens=tokens, part=1)
    assert found == min(1.0, max(steps / 40, tokens / 4000, done))


def test_what_is_not_limited_counts_nothing() -> None:
    assert Limits(None).share(0, steps=1e9, tokens=1e9, part=1) == 0
    assert Limits(None, tokens=100).share(0, steps=1e9, tokens=25, part=1) == 0.25
    assert Limits(8).share(0, steps=2, tokens=1e9, part=1) == 0.25


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_the_clock_is_asked_for_the_same_part_of_a_step(part: float) -> None:
    now = [0.0]
    clock = Deadline(100 / (1 - deadline.SPARE), began=0.0, clock=lambda: now[0])
    clock.begin(0.0)
    now[0] = 10.0
    clock.stepped()
    assert Limits(None, deadline=clock).share(0.0, steps=0, tokens=0, part=part) == pytest.approx(part / 10)


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({}, 10),
        ({"train": {"epochs": 2.5}}, 25),
        ({"train": {"steps": 7, "epochs": 2.5}}, 7),
        ({"budget": {"tokens": 5000}}, None),
        ({"budget": {"tokens": 5000}, "train": {"epochs": 3}}, 30),
        ({"budget": {"time": "2h"}}, None),
        ({"budget": {"time": "2h"}, "train": {"steps": 4}}, 4),
    ],
)
def test_steps_of_a_run(sections: dict[str, Any], steps: int | None) -> None:
    assert total_steps(config(**sections), rows=95) == steps


def test_limits_of_a_configuration() -> None:
    clock = Deadline()
    assert limits(config(budget={"tokens": 5000}, train={"epochs": 3}), 95, clock) == Limits(30, 5000, clock)
    clock = Deadline(60.0)
    assert limits(config(budget={"time": 60}), 95, clock) == Limits(None, None, clock)


def test_a_run_that_ends_in_time_has_a_clock() -> None:
    with pytest.raises(AssertionError):
        limits(config(budget={"time": 60}), 95, Deadline())
