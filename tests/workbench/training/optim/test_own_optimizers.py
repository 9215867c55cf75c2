"""Sophia, and sparse gradients with error feedback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from tests.workbench.training.optim import formulas
from tests.workbench.training.optim.test_optimizers import gradients, made, settled, weights
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.losses.label_losses import LabelDraws, LabelTap, token_losses
from workbench.losses.next_token import NO_LABEL, drawn_cross_entropy
from workbench.training.optim.own_optimizers import WAITING, Sophia, apply_largest, see_curvature

CPU = torch.device("cpu")


def test_steps_are_those_of_the_paper() -> None:
    """A curvature is seen in steps 0 and 4, as that of 30 labels; the gradients of the step are there again after."""
    trainable = weights()
    expected = {key: parameter.detach().double() for key, parameter in trainable.items()}
    optimizer = made(settled({"name": "sophia", "curvature_every": 4, "curvature_factor": 0.02}), trainable)
    for step, found in enumerate(gradients()):
        for name, parameter in trainable.items():
            parameter.grad = found[name].clone()

        def again(state: dict[str, torch.Tensor] = found) -> None:
            for name, parameter in trainable.items():
                assert parameter.grad is None
                parameter.grad = state[name].clone()

        see_curvature(optimizer, step, again, LabelDraws(), labels=30)
        for group in optimizer.param_groups:
            group["lr"] = formulas.rate(step)
        optimizer.step()
    formulas.sophia(expected, gradients(), {"wide": 0.1, "tall": 0.1, "vector": 0.0})
    for key, parameter in trainable.items():
        assert (parameter - expected[key]).abs().max() < 1e-6, key
        assert (parameter - weights()[key]).abs().max() > 1e-3, key


def test_without_curvature_it_steps_by_the_sign_of_the_momentum() -> None:
    trainable = weights()
    optimizer = made(settled({"name": "sophia"}, train={"learning_rate": 0.5, "weight_decay": 0.0}), trainable)
    assert isinstance(optimizer, Sophia)
    for name, parameter in trainable.items():
        parameter.grad = gradients()[0][name]
    optimizer.step()
    for name, parameter in trainable.items():
        moved = weights()[name] - parameter
        torch.testing.assert_close(moved, 0.5 * gradients()[0][name].sign())


def test_drawn_labels_follow_what_is_predicted_and_their_loss_is_the_cross_entropy() -> None:
    """Evenly spread numbers draw each label as often as it is predicted; where there is no label none is drawn."""
    logits_V, count = torch.randn(5, generator=torch.Generator().manual_seed(0)), 20_000
    number_N = (torch.arange(count) + 0.5) / count
    counted = [drawn_cross_entropy(logits_V[None], torch.zeros(1), each[None]) for each in number_N[:: count // 40]]
    losses_V = F.cross_entropy(logits_V.expand(5, 5), torch.arange(5), reduction="none")
    assert all(float((losses_V - each).abs().min()) < 1e-6 for each in counted)
    labels_N = torch.zeros(count, dtype=torch.long)
    whole = drawn_cross_entropy(logits_V.expand(count, 5), labels_N, number_N)
    assert float(whole) / count == pytest.approx(float(losses_V @ logits_V.softmax(0)), rel=1e-3)
    labels_N[:10] = NO_LABEL
    rest = drawn_cross_entropy(logits_V.expand(count, 5), labels_N, number_N)
    tap = LabelTap(token_losses)
    with tap.listening() as parts:
        drawn_cross_entropy(logits_V.expand(count, 5), labels_N, number_N, tap=tap)
    assert torch.equal(parts[0].loss_N[10:], losses_V[:1].expand(count - 10)), "who listens hears the rows' own labels"
    assert float(whole - rest) == pytest.approx(10 * float(losses_V[0]), rel=1e-2), "the first numbers draw the first"


def test_a_draw_depends_on_seed_step_row_and_token_alone() -> None:
    draws, positions = LabelDraws(), torch.tensor([1, 3, 4])

    def numbers(
        rows: list[int], lengths: list[int], *, tokens: int, packed: bool = False, step: int = 0
    ) -> list[float]:
        draw = RowDraw(0, step, np.array(rows), np.array(lengths), packed)
        at = positions if packed else torch.tensor([place + tokens * row for row, place in ((0, 1), (1, 0), (1, 1))])
        with drawing([draw], CPU), draws.drawing():
            found = draws.numbers(at, tokens=tokens)
        assert found is not None and bool(((found >= 0) & (found < 1)).all())
        return list(found.tolist())

    whole = numbers([7, 8], [3, 2], tokens=3)
    assert numbers([7, 8], [3, 2], tokens=9) == whole and numbers([7, 8], [3, 2], tokens=3, step=1) != whole
    assert numbers([7, 8], [3, 2], tokens=5, packed=True) == whole
    with drawing([RowDraw(0, 0, np.array([8]))], CPU), draws.drawing():
        assert draws.numbers(torch.tensor([0, 1]), tokens=2).tolist() == whole[1:]  # type: ignore[union-attr]
    assert draws.numbers(positions, tokens=3) is None, "nothing is drawn outside"


def test_it_resumes_to_the_same_bits_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """Stopped between two looks at the curvature."""
    model = build("Llama", blocks=2)
    settings = {"optimizer": {"name": "sophia", "curvature_every": 3}}
    whole = train(model, configured(**settings), tmp_path / "whole")
    assert_same_bits(interrupted(model, configured(**settings), tmp_path / "parts", after=2), whole)
    small = train(model, configured(**settings, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert small.losses == pytest.approx(whole.losses, rel=1e-4)
    once = train(model, configured(optimizer={"name": "sophia", "curvature_every": 99}), tmp_path / "once")
    assert once.losses[:4] == whole.losses[:4] and once.losses[4:] != whole.losses[4:], "the fourth step looks again"


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def points() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((3, 4), (5,))]


def random_gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,))]


def test_the_largest_values_of_all_are_applied_and_the_rest_waits() -> None:
    """Stich et al. 2018, algorithm 1, over both parameters as one vector of 17 values, of which 3 are applied."""
    moved = points()
    optimizer = torch.optim.SGD(moved, lr=0.1)
    apply_largest(optimizer, share=3 / 17)
    x = torch.cat([each.detach().flatten() for each in moved])
    start, e, total = x.clone(), torch.zeros(17, dtype=torch.float64), torch.zeros(17, dtype=torch.float64)
    for step in range(7):
        for point, gradient in zip(moved, random_gradients(step), strict=True):
            point.grad = gradient
        g = torch.cat([each.flatten() for each in random_gradients(step)])
        optimizer.step()
        p = g + e
        kept = torch.zeros(17, dtype=torch.bool).scatter_(0, p.abs().topk(3).indices, True)
        x, e, total = x - 0.1 * p * kept, p * ~kept, total + g
        torch.testing.assert_close(torch.cat([each.detach().flatten() for each in moved]), x)
        waits = torch.cat([optimizer.state[each][WAITING].flatten() for each in moved])
        torch.testing.assert_close(waits, e)
        torch.testing.assert_close(start - x + 0.1 * waits, 0.1 * total, msg="nothing of a gradient is lost")


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
)
def test_where_all_is_applied_nothing_changes(make: Make) -> None:
    ends = []
    for sparse in (False, True):
        moved = points()
        optimizer = make(moved)
        if sparse:
            apply_largest(optimizer, share=1.0)
        for step in range(5):
            for point, gradient in zip(moved, random_gradients(step), strict=True):
                point.grad = gradient
            optimizer.step()
        ends.append(moved)
    assert all(torch.equal(plain, sparse) for plain, sparse in zip(*ends, strict=True))


def test_values_as_large_as_the_smallest_are_applied_too() -> None:
    point = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([point], lr=1.0)
    apply_largest(optimizer, share=0.25)
    point.grad = torch.tensor([2.0, -2.0, 1.0, 0.0])
    optimizer.step()
    assert point.tolist() == [-2.0, 2.0, 0.0, 0.0]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    first, second = points()
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    apply_largest(optimizer, share=0.5)
    before = second.detach().clone()
    first.grad = random_gradients(0)[0]
    optimizer.step()
    assert torch.equal(second, before) and WAITING not in optimizer.state[second]


SPARSE: dict[str, Any] = {"optimizer": {"gradient_share": 0.1}}


def test_sparse_gradients_resume_to_the_same_bits_and_do_not_depend_on_micro_batches(tmp_path: Path) -> None:
    model = build("Llama", blocks=2)
    whole = train(model, configured(**SPARSE), tmp_path / "whole")
    assert_same_bits(interrupted(model, configured(**SPARSE), tmp_path / "parts", after=3), whole)
    smaller = train(model, configured(**SPARSE, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert smaller.losses == pytest.approx(whole.losses, rel=1e-5)
    dense = train(model, configured(), tmp_path / "dense")
    assert dense.losses != whole.losses
