"""LookSAM against the formulas of its paper, and SAM as a training uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.sharpness_aware import Sharpness


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))

    def loss(self) -> Tensor:
        return self.first.pow(4).sum() + (self.second * self.first[0, 0]).cos().sum()


def _flat(model: Model, *, gradients: bool = False) -> Tensor:
    parts = [each.grad if gradients else each.detach() for each in (model.first, model.second)]
    return torch.cat([each.flatten().clone() for each in parts if each is not None])


def _gradient(at: Tensor) -> Tensor:
    model = Model()
    with torch.no_grad():
        model.first.copy_(at[:12].view(3, 4))
        model.second.copy_(at[12:])
    model.loss().backward()  # type: ignore[no-untyped-call]
    return _flat(model, gradients=True)


def test_steps_between_reuse_what_was_orthogonal_to_the_gradient() -> None:
    """Liu et al. 2022, algorithm 1, with plain gradient descent, SAM in steps 0 and 3."""
    model, rho, alpha = Model(), 0.05, 0.7
    settings = OptimizerConfig(sam=rho, sam_every=3, sam_reuse=alpha)
    values = MasterWeights(model, torch.float64)
    sharpness, w, v = Sharpness(settings, values), _flat(model), torch.zeros(17)
    for step in range(5):
        model.zero_grad()
        model.loss().backward()  # type: ignore[no-untyped-call]
        sharpness.sharpen(step, lambda: model.loss().backward())  # type: ignore[no-untyped-call]
        g = _gradient(w)
        if step % 3 == 0:
            s = _gradient(w + rho * g / g.norm())
            v, wanted = s - g * (g @ s) / (g @ g), s
        else:
            wanted = g + alpha * g.norm() / v.norm() * v
        torch.testing.assert_close(_flat(model, gradients=True), wanted)
        with torch.no_grad():
            for each in (model.first, model.second):
                each -= 1e-3 * each.grad  # type: ignore[operator]
        w = w - 1e-3 * wanted


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_nothing_is_added_where_nothing_was_orthogonal(gradient: float) -> None:
    model = Model()
    sharpness = Sharpness(OptimizerConfig(sam=0.1, sam_every=2, sam_reuse=0.7), MasterWeights(model, torch.float64))

    def again() -> None:
        for each in (model.first, model.second):
            each.grad = torch.full_like(each, gradient)

    again()
    sharpness.sharpen(0, again)
    again()
    sharpness.sharpen(1, again)
    assert bool((_flat(model, gradients=True) == gradient).all())


LOOK: dict[str, Any] = {"optimizer": {"sam": 0.05, "sam_every": 3, "sam_reuse": 0.7}}


def test_it_resumes_to_the_same_bits_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """Stopped between two steps that use SAM."""
    model = build("Llama", blocks=2)
    whole = train(model, configured(**LOOK), tmp_path / "whole")
    assert_same_bits(interrupted(model, configured(**LOOK), tmp_path / "parts", after=2), whole)
    small = train(model, configured(**LOOK, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert small.losses == pytest.approx(whole.losses, rel=1e-5)
    without = {"optimizer": {"sam": 0.05, "sam_every": 3}}
    plain = train(model, configured(**without), tmp_path / "plain")
    assert plain.losses[:2] == whole.losses[:2] and plain.losses[2:] != whole.losses[2:], "the second step reuses"
