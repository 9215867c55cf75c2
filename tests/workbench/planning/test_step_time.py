"""Small models stand for the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from workbench.config import ModelConfig
from workbench.data.packing import PADDED
from workbench.models import backbones
from workbench.planning import step_time
from workbench.planning.step_time import Measured, Roofline, Small, StepWork, Subject, roofline, smaller
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan

SHORT = ["data.limit=60", "data.max_tokens=64", "batch.size=8", "model.weights=float32"]
REST, BLOCK, NEW_SHAPE = 1e-3, 2e-3, 0.5
"""Seconds of a token in all else and in a block, and those that a shape takes when it is met for the first time."""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["{method: lora}", "{method: full}"])
def test_operations_of_small_models_add_up_to_those_of_the_whole(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "PASSES", (1, 1))
    config = load("sft/quickstart", [*SHORT, f"adapter={adapter}"])
    whole = _measured(plan(config).work)
    monkeypatch.setattr(step_time, "WHOLE", 0)
    assert _measured(plan(config).work).flops == pytest.approx(whole.flops, rel=1e-6)
    monkeypatch.setattr(step_time, "WIDTH", 128)
    assert _measured(plan(config).work).flops == pytest.approx(whole.flops, rel=0.2), (
        "narrower, too, but for LoRA's thin products"
    )


def _measured(work: StepWork) -> Measured:
    assert work.measure is not None
    ticks = iter(range(10**9))
    return work.measure(lambda: float(next(ticks)), 1.0)


class Machine:
    """A clock that computing moves, on a machine that prepares kernels once for each shape."""

    def __init__(self, rest: float = REST) -> None:
        self.now, self._rest = 0.0, rest
        self._known: set[tuple[int, int]] = set()

    def __call__(self) -> float:
        self.now += 1e-2
        return self.now

    def compute(self, shape: tuple[int, int], blocks: int) -> None:
        """A micro-batch."""
        self.now += shape[0] * shape[1] * (self._rest + blocks * BLOCK)
        self.now += 0.0 if shape in self._known else NEW_SHAPE
        self._known.add(shape)


class Masters(list[nn.Parameter]):
    """Of a training."""

    def refresh(self) -> None:
        """Nothing is computed in another precision."""


@contextmanager
def _training(machine: Machine, small: Small) -> Iterator[Any]:
    """One whose every micro-batch has a shape of its own."""
    lengths = np.arange(1, 4001)

    def backward(rows: Any, *, step: int) -> None:
        machine.compute((len(rows), int(lengths[rows].max())), small.blocks)
        torch.ones(8, 8) @ torch.ones(8, 8)

    yield SimpleNamespace(
        prepare=lambda: None,
        config=SimpleNamespace(freeze=SimpleNamespace(fixed=True)),
        freezer=SimpleNamespace(follow=lambda **_: None),
        train=SimpleNamespace(lengths=lengths),
        arrangement=PADDED,
        kinds={0: 1.0},
        masters=Masters([nn.Parameter(torch.ones(1))]),
        micro_batches=lambda: ([np.array([600 + 7 * step])] for step in count()),
        backward=backward,
        update=lambda _: None,
    )


@pytest.mark.parametrize("rest", [REST, pytest.param(-0.7 * BLOCK, id="the last block takes less than the others")])
def test_what_each_new_shape_takes_is_counted_once_however_deep_the_model_is(rest: float) -> None:
    machine, depth = Machine(rest), 8
    subject = Subject(depth, 1, 10**12, 1, 1e30, torch.float32, packed=False)
    found = step_time.measure(lambda small: _training(machine, small), subject, clock=machine, seconds=60.0)
    tokens = 820  # of a micro-batch, about
    assert found.token == pytest.approx(rest + depth * BLOCK + NEW_SHAPE / tokens, rel=0.01)


@pytest.mark.parametrize("seconds", [10.0, 60.0])
def test_timing_ends_in_time_after_as_many_passes_as_fit(seconds: float) -> None:
    machine = Machine()
    with _training(machine, Small(1)) as one, _training(machine, Small(2)) as two:
        timed = [step_time._Timed(each, torch.device("cpu"), machine) for each in (one, two)]
        began = machine.now
        samples = step_time._samples(timed, 1e30, machine, seconds)
    taken = machine.now - began
    assert len(samples[0]) == len(samples[1]) >= 3
    assert taken <= seconds or len(samples[0]) == 3
    assert taken >= seconds * (1 - 1.5 / len(samples[0])) or len(samples[0]) == step_time.PASSES[1]


def test_whole_models_are_timed_where_that_is_soon_done_and_deep_ones_otherwise() -> None:
    def depths(**changed: float) -> tuple[int, ...]:
        known = {"depth": 12, "narrower": 1, "parameters": 10**8, "flops": 1e12} | changed
        return step_time._depths(Subject(trainable=1, dtype=torch.float32, packed=False, **known), 1e12)  # type: ignore[arg-type]

    assert depths() == (12,)
    assert depths(flops=2e12) == (3, 6) and depths(flops=1e15) == (1, 2)
    assert depths(parameters=8 * 10**8) == (3, 6), "memory, too, is limited"
    assert depths(narrower=4, flops=1) == (1, 4)
    assert depths(narrower=4, flops=1, depth=2) == (1, 2)


def test_a_narrower_backbone_can_be_cut_too() -> None:
    hub = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    assert [step_time.narrowing(hub, parts=parts) for parts in (1, 2, 4, 8)] == [4, 4, 2, 1]
    hub.num_hidden_layers = 1
    assert step_time.narrowing(hub) == 1, "of a single block nothing can be told apart"


def test_few_samples_are_even() -> None:
    found = [step_time._spread(number) for number in range(7)]
    assert found[:3] == [0.5, 0.25, 0.75] and sorted(found) == [each / 8 for each in range(1, 8)]


def test_a_smaller_backbone_is_of_the_same_kind(tmp_path: Path) -> None:
    whole = backbones.hub_config(ModelConfig())
    small = backbones.hub_config(smaller(ModelConfig(), whole, Small(2, 2), tmp_path))
    assert type(small) is type(whole) and small.vocab_size == whole.vocab_size
    assert (small.num_hidden_layers, small.hidden_size) == (2, whole.hidden_size // 2)
    assert small.head_dim == whole.head_dim


@pytest.mark.parametrize(("weight_bytes", "least"), [(0, 0.1), (10**9, 2.0)])
def test_no_step_is_faster_than_its_products_and_its_weights(weight_bytes: int, least: float) -> None:
    measured = Measured(token=1e-9, error=0.0, update=0.0, flops=1e6, machine=Roofline(1e9, 1e9))
    work = StepWork(padded=100, tokens=80, passes=1, weight_bytes=weight_bytes, measure=lambda *_: measured)
    found = step_time.timed(work, 1e6)
    assert found.low <= found.seconds <= found.high
    assert found.seconds == pytest.approx(least)


def test_passes_that_only_read_take_their_share_of_a_step() -> None:
    """A forward pass of a third of the operations takes a third of the time, in each step or once before the first."""
    measured = Measured(token=0.01, error=0.0, update=0.0, flops=3e6, machine=Roofline(1e12, 1e12))
    work = StepWork(padded=100, tokens=100, passes=1, measure=lambda *_: measured, forward=1e6)
    plain = step_time.timed(work, 3e6)
    more = step_time.timed(replace(work, looked=100, once=1000), 3e6)
    assert (plain.seconds, plain.once) == (pytest.approx(1.0), 0)
    assert (more.seconds, more.once) == (pytest.approx(4 / 3), pytest.approx(10 / 3))
    there = step_time.assumed(replace(work, looked=100, once=1000), 3e6)
    assert there.seconds == pytest.approx(4e8 / step_time.ACCELERATOR_FLOPS)
    assert there.once == pytest.approx(1e9 / step_time.ACCELERATOR_FLOPS)


def test_the_roofline_has_rates_of_this_machine() -> None:
    found = roofline(torch.device("cpu"), torch.float32)
    assert 1e8 < found.flops < 1e15 and 1e8 < found.bandwidth < 1e13


@pytest.mark.nightly
def test_a_bank_is_timed_with_all_its_members(monkeypatch: pytest.MonkeyPatch, stories: str) -> None:
    built: list[int] = []

    def measure(build: Any, subject: Subject, **_: object) -> None:
        with build(Small(2)) as training:
            built.extend([sum(each.numel() for each in training.masters), len(training.freezer.blocks)])

    monkeypatch.setattr(step_time, "measure", measure)
    words = [f"model.id={stories}", "data.limit=200", "data.max_tokens=32"]
    for folds in (2, 4):
        work = plan(load("crossval/quickstart", [*words, f"folds.k={folds}"])).work
        assert work.measure is not None
        work.measure(float, 1.0)
    (two, blocks, four, _) = built
    assert four == 2 * two and blocks == 2
