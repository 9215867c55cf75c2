"""Log-probabilities and entropies in chunks against those from all logits at once."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from workbench.losses import token_entropies, token_log_probs


@pytest.fixture(params=[1, 3, 100])
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", 13 * request.param)


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("head_trains", [False, True])
def test_values_and_gradients_equal_the_whole(head_trains: bool) -> None:
    """With another factor for each position, as a loss that is no sum over them has."""
    torch.manual_seed(0)
    head = nn.Linear(8, 13, dtype=torch.float64).requires_grad_(head_trains)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels, factor = torch.randint(0, 13, (10,)), torch.randn(10, dtype=torch.float64)
    weights = [*head.parameters()] if head_trains else []
    wanted = head(hidden).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    found = token_log_probs(hidden, labels, head, vocabulary=13, weights=weights)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad((found * factor).sum().exp(), [hidden, *weights]),
        torch.autograd.grad((wanted * factor).sum().exp(), [hidden, *weights]),
    )


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("head_trains", [False, True])
def test_entropies_equal_those_of_the_distributions(head_trains: bool) -> None:
    """With a token that has no probability."""
    torch.manual_seed(2)
    head = nn.Linear(8, 13, dtype=torch.float64).requires_grad_(head_trains)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(10, dtype=torch.float64)
    weights = [*head.parameters()] if head_trains else []
    wanted = torch.distributions.Categorical(logits=head(hidden)[:, :12]).entropy()
    none = torch.tensor([0.0] * 12 + [-torch.inf], dtype=torch.float64)
    found = token_entropies(hidden, lambda rows: head(rows) + none, vocabulary=13, weights=weights)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad((found * factor).sum().exp(), [hidden, *weights]),
        torch.autograd.grad((wanted * factor).sum().exp(), [hidden, *weights]),
    )


@pytest.mark.parametrize("head_trains", [False, True])
def test_gradcheck(head_trains: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=head_trains)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (5,))

    def found(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        own = [weight] if head_trains else []
        return token_log_probs(hidden, labels, lambda rows: rows @ weight.T, vocabulary=7, weights=own)

    assert torch.autograd.gradcheck(found, (hidden, weight))


def test_nothing_is_remembered_without_gradients() -> None:
    hidden, labels, calls = torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), list[int]()
    head = nn.Linear(3, 5)

    def project(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        logits: torch.Tensor = head(rows)
        return logits

    with torch.no_grad():
        found = token_log_probs(hidden, labels, project, vocabulary=5, weights=[])
    assert not found.requires_grad and len(calls) == 1 and found.shape == (4,)
