"""What is measured: sums of gradients that go on bit by bit after a pause, and how alike rows are to one another."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from workbench.training.freezing.observers import GradientSums, Plasticity

LAYERS = {"embed": 0, "one.weight": 1, "one.bias": 1, "two": 2, "three": 3, "norm": 4}
"""Of three blocks."""


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 2)) for name in LAYERS}


def step(trainable: dict[str, nn.Parameter], *, seed: int, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """New gradients; those that are frozen get none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(3, 2, generator=generator) for name in trainable}
    for name, parameter in trainable.items():
        parameter.grad = None if name in frozen else drawn[name].clone()
    return drawn


def test_the_norm_is_that_of_the_sum_of_an_interval() -> None:
    trainable = parameters()
    sums = GradientSums(LAYERS, trainable, blocks=3)
    for interval in range(2):
        drawn = []
        for seed in range(4):
            drawn.append(step(trainable, seed=10 * interval + seed, frozen=("embed", "two")))
            sums.look()
        found = sums.finish()
        total = {name: sum(each[name] for each in drawn).abs().sum().item() for name in LAYERS}
        assert math.isnan(found[0]) and math.isnan(found[2])
        assert found[1] == pytest.approx(total["one.weight"] + total["one.bias"], rel=1e-6)
        assert found[3:] == pytest.approx((total["three"], total["norm"]), rel=1e-6)


def test_gradients_that_are_freed_or_changed_afterwards_do_not_matter() -> None:
    trainable = parameters()
    sums = GradientSums(LAYERS, trainable, blocks=3)
    drawn = step(trainable, seed=1)
    sums.look()
    for parameter in trainable.values():
        assert parameter.grad is not None
        parameter.grad.mul_(100)
        parameter.grad = None
    sums.look()
    assert sums.finish()[2] == pytest.approx(drawn["two"].abs().sum().item(), rel=1e-6)
    assert all(math.isnan(norm) for norm in sums.finish()), "an interval without a gradient"


def test_sums_go_on_after_a_resume_as_if_nothing_had_been() -> None:
    trainable = parameters()
    whole = GradientSums(LAYERS, trainable, blocks=3)
    for seed in range(3):
        step(trainable, seed=seed, frozen=("embed",))
        whole.look()
    resumed = GradientSums(LAYERS, trainable, blocks=3)
    resumed.load({name: total.clone() for name, total in whole.state().items()})
    assert "embed" not in whole.state(), "what does not train takes no memory"
    for sums in (whole, resumed):
        for seed in range(3, 6):
            step(trainable, seed=seed, frozen=("embed",))
            sums.look()
    both = [torch.tensor(sums.finish()) for sums in (whole, resumed)]
    assert torch.equal(both[0][1:], both[1][1:])


def test_loading_does_not_change_what_was_loaded() -> None:
    trainable, saved = parameters(), {"two": torch.ones(3, 2)}
    sums = GradientSums(LAYERS, trainable, blocks=3)
    sums.load(saved)
    step(trainable, seed=0)
    sums.look()
    assert torch.equal(saved["two"], torch.ones(3, 2))


def written_out(a_BLD: Tensor, b_BLE: Tensor) -> float:
    """The loss of Tung & Mori, element by element."""
    rows, total = len(a_BLD), 0.0
    for i in range(rows):
        likeness = []
        for states in (a_BLD, b_BLE):
            products = [float((states[i] * states[j]).sum()) for j in range(rows)]
            length = math.sqrt(sum(value**2 for value in products))
            likeness.append([value / length for value in products])
        total += sum((x - y) ** 2 for x, y in zip(*likeness, strict=True))
    return total / rows**2


def blocks(weights: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A chain of three blocks over fixed rows."""
    inputs = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))

    def outputs() -> list[Tensor]:
        found, states = [], inputs
        for weight in weights:
            states = torch.tanh(states @ weight)
            found.append(states)
        return found

    return outputs


def test_plasticity_is_the_loss_to_an_interval_ago_and_a_resume_changes_nothing() -> None:
    weights = [torch.randn(6, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    outputs, trains = blocks(weights), (False, False, True, True, True)
    watch = Plasticity(outputs)
    watch.begin()
    for interval in range(3):
        before = outputs()
        saved = {name: tensor.clone() for name, tensor in watch.state().items()}
        weights[1] += 0.1 / (interval + 1)
        after = outputs()
        resumed = Plasticity(outputs)
        resumed.load(saved)
        found = watch.finish(trains)
        assert [math.isnan(value) for value in found] == [True, True, False, False, True]
        expected = [written_out(x, y) for x, y in zip(after, before, strict=True)]
        assert found[2:4] == pytest.approx(expected[1:], rel=1e-5) and min(found[2:4]) > 0
        assert resumed.finish(trains)[2:4] == found[2:4]
    assert watch.finish(trains)[2:4] == (0, 0), "nothing moved"


def test_a_checkpoint_before_the_first_look_holds_nothing() -> None:
    watch = Plasticity(list)
    assert watch.state() == {}
    watch.load({})
    with pytest.raises(AssertionError, match="comes first"):
        watch.finish(())
