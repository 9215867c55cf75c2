"""Ways of values: lengths of differences, in a sample that is the same each time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, train
from workbench.training.freezing.observers import SAMPLED, ValueWays, sample

LAYERS = {"a": 1, "b": 1, "c": 2}


def _values() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def test_ways_are_norms_of_differences_from_the_last_interval_and_from_the_start() -> None:
    values = _values()
    ways = ValueWays(LAYERS, values, blocks=2)
    ways.begin()
    places = [torch.cat([values["a"].detach().flatten(), values["b"].detach()])]
    for _ in range(3):
        with torch.no_grad():
            for each in values.values():
                each += torch.randn(each.shape)
        found = ways.finish([True, True, False, True])
        places.append(torch.cat([values["a"].detach().flatten(), values["b"].detach()]))
        assert found[1] == pytest.approx(float((places[-1] - places[-2]).norm()), rel=1e-6)
        assert found[5] == pytest.approx(float((places[-1] - places[0]).norm()), rel=1e-6)
        assert [number for number, value in enumerate(found) if not math.isnan(value)] == [1, 5]


def test_large_values_are_sampled_evenly() -> None:
    large = torch.arange(10_000.0)
    found = sample({"large": large}, ["large"])
    assert SAMPLED <= len(found) <= 2 * SAMPLED and found[1] - found[0] == found[-1] - found[-2]


def test_a_policy_that_freezes_nothing_changes_nothing(tmp_path: Path) -> None:
    model = build("Llama", blocks=2)
    watched = train(model, configured(freeze={"policy": "smartfrz", "every": 2, "threshold": 1}), tmp_path / "watched")
    plain = train(model, configured(), tmp_path / "plain")
    for record in watched.records:
        assert record.pop("frozen_layers") == 0
    assert_same_bits(watched, plain)
