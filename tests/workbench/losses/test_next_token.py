"""The chunked loss against F.cross_entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench.losses import next_token, token_scores


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("head_trains", [False, True])
def test_loss_and_gradients_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, head_trains: bool
) -> None:
    import sys

    monkeypatch.setattr(sys.modules["workbench.losses.chunked"], "CHUNK_ELEMENTS", 13 * rows_per_chunk)
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


def test_scores_are_per_token() -> None:
    torch.manual_seed(1)
    head, hidden, labels = nn.Linear(4, 7), torch.randn(5, 4), torch.randint(0, 7, (5,))
    losses, hits = token_scores(hidden, labels, head, vocabulary=7)
    logits = head(hidden)
    torch.testing.assert_close(losses, -logits.log_softmax(-1)[range(5), labels].detach())
    assert hits.tolist() == (logits.argmax(-1) == labels).tolist()
