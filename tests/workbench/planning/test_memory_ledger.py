"""The ledger against counts by hand."""

from __future__ import annotations

import torch
from torch import nn

from workbench.planning.counters import MemoryLedger


def test_every_byte_is_for_something_and_the_peak_is_theirs() -> None:
    before = torch.zeros(100)
    view = before.view(10, 10)
    with MemoryLedger() as ledger:
        ledger.hold([before, view], "weights")
        with ledger.making("optimizer", "somewhere"):
            state = torch.zeros_like(before)
        activation = before * state
        assert ledger.now == ledger.peak == 1200
        assert ledger.at_peak == {"weights": 400, "optimizer": 400, "activations": 400}
        del activation
        smaller = state[:5] + 1
        assert ledger.now == 820 and sum(ledger.at_peak.values()) == ledger.peak == 1200
    del smaller


def test_a_tensor_may_turn_out_to_be_a_gradient() -> None:
    weight = torch.ones(50, requires_grad=True)
    with MemoryLedger() as ledger:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        ledger.rename([weight.grad], "gradients")
        later = torch.zeros(200)
        assert ledger.at_peak == {"gradients": 200, "activations": 800}
        weight.grad = None
        del later
        assert ledger.now == 0
        again = torch.zeros(400)
        assert ledger.at_peak == {"gradients": 0, "activations": 1600}
    del again


def test_every_byte_was_made_somewhere() -> None:
    first, second = nn.Linear(10, 10), nn.Linear(10, 20)
    with MemoryLedger() as ledger, ledger.placing({"first": first, "second": second}):
        ledger.hold([second.weight], "weights", "second")
        output = second(first(torch.ones(3, 10)) ** 2)
        made = {"head and loss": 3 * 10 * 4 * 2, "first": 3 * 10 * 4, "second": (3 * 20 + 200) * 4}
        assert ledger.places_at_peak == made
        output.sum().backward()
        assert ledger.places_at_peak["backward pass"] > 0
        assert sum(ledger.places_at_peak.values()) == sum(ledger.at_peak.values()) == ledger.peak


def test_a_peak_is_looked_for_from_a_moment_on() -> None:
    with MemoryLedger() as ledger:
        kept = torch.zeros(100)
        large = torch.zeros(1000)
        del large
        assert ledger.peak == 4400
        ledger.restart()
        assert ledger.peak == 400 and ledger.at_peak == {"activations": 400}
        small = torch.zeros(10)
        assert ledger.peak == 440 and ledger.at_peak == {"activations": 440}
    del kept, small
