"""Sophia-G against the formula of its paper, its draws against what is predicted, and a training that uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from tests.workbench.training.optim import formulas
from tests.workbench.training.optim.test_optimizers import gradients, made, settled, weights
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.losses.drawn_labels import LabelDraws
from workbench.losses.label_losses import LabelTap, token_losses
from workbench.losses.next_token import NO_LABEL, drawn_cross_entropy
from workbench.training.optim.own_optimizers import Sophia, see_curvature

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
