"""The ledger against counts by hand."""

from __future__ import annotations

import torch

from workbench.planning.ledger import Ledger


def test_every_byte_is_for_something_and_the_peak_is_theirs() -> None:
    before = torch.zeros(100)
    view = before.view(10, 10)
    with Ledger() as ledger:
        ledger.hold([before, view], "weights")
        with ledger.making("optimizer"):
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
    with Ledger() as ledger:
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
