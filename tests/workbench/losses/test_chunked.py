"""The chunked sum against the criterion of all positions at once, with further tensors of each position."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from workbench.losses import chunked
from workbench.losses.divergences import forward_kl, log_probs

N, D, V = 10, 8, 13


def _criterion(logits_nV: Tensor, teacher_nV: Tensor, weights_n: Tensor) -> Tensor:
    """Not the same at every position, so that chunks that are mixed up show."""
    return forward_kl(log_probs(logits_nV, 2.0), teacher_nV) + (weights_n * logits_nV.logsumexp(-1)).sum()


@pytest.mark.parametrize("rows", [1, 3, N, 100])
@pytest.mark.parametrize("head_trains", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradients_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, head_trains: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sys.modules["workbench.losses.chunked"], "CHUNK_ELEMENTS", V * rows)
    torch.manual_seed(0)
    head = nn.Linear(D, V, dtype=dtype).requires_grad_(head_trains)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    known = [log_probs(torch.randn(N, V, dtype=dtype), 2.0), torch.rand(N, dtype=dtype)]
    weights = [*head.parameters()] if head_trains else []
    seen = []

    def project(hidden_nD: Tensor) -> Tensor:
        seen.append(len(hidden_nD))
        return head(hidden_nD)

    wanted = _criterion(head(hidden), *known) * 0.25
    wanted_grads = torch.autograd.grad(wanted * 3, [hidden, *weights])
    found = chunked(hidden, known, _criterion, project, vocabulary=V, weights=weights, scale=0.25)
    found_grads = torch.autograd.grad(found * 3, [hidden, *weights])
    torch.testing.assert_close((found, *found_grads), (wanted, *wanted_grads))
    assert max(seen) == min(rows, N) and sum(seen) == N
