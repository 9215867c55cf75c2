"""The chunked loss against F.cross_entropy over all logits at once."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench.losses import next_token, token_scores
from workbench.losses.label_losses import LabelTap, token_losses
from workbench.losses.next_token import CrossEntropy
from workbench.planning.counters import LiveBytes


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("head_trains", [False, True])
def test_loss_and_gradients_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, head_trains: bool
) -> None:
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", 13 * rows_per_chunk)
    torch.manual_seed(0)
    head = nn.Linear(8, 13, dtype=torch.float64).requires_grad_(head_trains)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (10,))
    weights = [*head.parameters()] if head_trains else []

    wanted = F.cross_entropy(head(hidden), labels, reduction="sum") * 0.25
    wanted_grads = torch.autograd.grad(wanted * 3, [hidden, *weights])
    found = next_token(hidden, labels, head, vocabulary=13, weights=weights, scale=0.25)
    found_grads = torch.autograd.grad(found * 3, [hidden, *weights])

    torch.testing.assert_close((found, *found_grads), (wanted, *wanted_grads))


@pytest.mark.parametrize("weighted", [False, True])
def test_smoothing_and_z_loss_are_their_formulas(weighted: bool) -> None:
    """Cross-entropy with the smoothed one-hot target, and the squared log of the softmax's denominator, in float64."""
    torch.manual_seed(2)
    head = nn.Linear(8, 13, dtype=torch.float64)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (10,))
    factor = torch.rand(10, dtype=torch.float64) if weighted else None
    logits = head(hidden)
    target = 0.8 * F.one_hot(labels, 13) + 0.2 / 13
    each = -(target * logits.log_softmax(-1)).sum(-1) + 0.3 * logits.exp().sum(-1).log() ** 2
    wanted = (each if factor is None else each * factor).sum() * 0.25
    found = next_token(
        hidden,
        labels,
        head,
        vocabulary=13,
        weights=[*head.parameters()],
        scale=0.25,
        factor_N=factor,
        smoothing=0.2,
        z_loss=0.3,
    )
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs))


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_in_closed_form_is_that_of_autograd(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, z_loss: float, weighted: bool
) -> None:
    """In float64, a few positions at a time, some without a label; what would overflow in exp does not."""
    monkeypatch.setattr(sys.modules["workbench.losses.next_token"], "CACHED_ELEMENTS", 3 * 13)
    torch.manual_seed(3)
    logits = (torch.randn(10, 13, dtype=torch.float64) * 300).requires_grad_()
    labels = torch.randint(0, 13, (10,)).index_fill_(0, torch.tensor([0, 7]), -100)
    factor = torch.rand(10, dtype=torch.float64) if weighted else None
    criterion = CrossEntropy(smoothing, z_loss)
    wanted = criterion(logits, labels, factor) * 0.25
    loss, gradient = criterion.with_gradient(logits.detach(), labels, factor, scale=0.25)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logits)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    """From float32: no further from float64's than half a unit in the last place of its own precision."""
    torch.manual_seed(4)
    logits = (torch.randn(70, 513) * 4).to(dtype)
    labels = torch.randint(0, 513, (70,))
    loss, gradient = CrossEntropy().with_gradient(logits, labels, scale=1 / 64)
    wanted_loss, wanted = CrossEntropy().with_gradient(logits.double(), labels, scale=1 / 64)
    assert gradient.dtype == dtype and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=1e-6, atol=0)
    info = torch.finfo(dtype)
    slack = wanted.abs() * (info.eps / 2 + 2e-6) + info.tiny * info.eps / 2 + 1e-9 * (dtype == torch.float32)
    assert ((gradient.double() - wanted).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_tap_gets_the_losses_of_log_probabilities_only_while_it_listens(dtype: torch.dtype, smoothing: float) -> None:
    """Those of the labels themselves, whatever trains; of values that tie, each is the likeliest."""
    torch.manual_seed(5)
    logits, labels = torch.randn(60, 13).to(dtype), torch.randint(0, 13, (60,))
    logits[:9] = logits[:9].round()
    tap = LabelTap(token_losses)
    criterion = CrossEntropy(smoothing, tap=tap)
    unheeded = criterion.with_gradient(logits, labels, scale=1.0)
    with tap.listening() as seen:
        heeded = criterion.with_gradient(logits, labels, scale=1.0)
    assert all(torch.equal(*each) for each in zip(heeded, unheeded, strict=True))
    (losses,) = seen
    wanted = token_losses(logits.double().log_softmax(-1), labels)
    torch.testing.assert_close(losses.loss_N.double(), wanted.loss_N, rtol=1e-6, atol=1e-6)
    assert torch.equal(losses.right_N, wanted.right_N) and 0 < losses.right_N.sum() < 60
    if not smoothing:
        torch.testing.assert_close(losses.loss_N.sum(), heeded[0])


def test_who_listens_takes_no_memory_of_a_chunk() -> None:
    logits, labels = torch.randn(4096, 512).bfloat16(), torch.randint(0, 512, (4096,))
    tap = LabelTap(token_losses)
    with LiveBytes() as alone:
        CrossEntropy().with_gradient(logits, labels, scale=1.0)
    with tap.listening(), LiveBytes() as beside:
        CrossEntropy(tap=tap).with_gradient(logits, labels, scale=1.0)
    assert beside.peak <= alone.peak + 0.05 * logits.nbytes


def test_scores_are_per_token() -> None:
    torch.manual_seed(1)
    head, hidden, labels = nn.Linear(4, 7), torch.randn(5, 4), torch.randint(0, 7, (5,))
    losses, hits = token_scores(hidden, labels, head, vocabulary=7)
    logits = head(hidden)
    torch.testing.assert_close(losses, -logits.log_softmax(-1)[range(5), labels].detach())
    assert hits.tolist() == (logits.argmax(-1) == labels).tolist()
