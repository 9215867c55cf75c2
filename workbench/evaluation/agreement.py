"""How far two models differ on the same tokens.

Legend: N positions, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.data.batching import micro_batches
from workbench.data.text.tokenized import TokenizedSet
from workbench.models.output_heads import Head

POSITIONS = 256
"""Positions that are projected to the vocabulary at once."""


@dataclass(frozen=True)
class Agreement:
    """Difference of model B from model A over N positions."""

    kl: float
    """Mean KL(A || B) of the next-token distributions, nats per token."""
    top1: float
    """Share of positions where both have the same most likely token."""
    positions: int

    @property
    def sentence(self) -> str:
        """For a person."""
        return (
            f"On {self.positions:,} held-out tokens: KL divergence {self.kl:.2e} nats per token, "
            f"same first choice {self.top1:.2%}."
        )


@torch.no_grad()
def hidden_states(model: nn.Module, head: Head, tokens: TokenizedSet, *, rows: int, budget: int = 4096) -> Tensor:
    """Hidden states (N, D) in front of the head, at the supervised positions of the first `rows` examples."""
    first = tokens.subset(torch.arange(min(rows, len(tokens))).numpy())
    states = []
    for indices in micro_batches(torch.arange(len(first)).numpy(), first.lengths, tokens=budget):
        batch = first.batch(indices).to(next(model.parameters()).device)
        states.append(head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N])
    return torch.cat(states)


@torch.no_grad()
def agreement(a: Head, hidden_a_ND: Tensor, b: Head, hidden_b_ND: Tensor) -> Agreement:
    """Compare the distributions that two heads give for their own model's hidden states at the same positions."""
    divergence, same = 0.0, 0
    for first, second in zip(hidden_a_ND.split(POSITIONS), hidden_b_ND.split(POSITIONS), strict=True):
        # In float64, because a divergence of almost nothing would round to less than nothing.
        log_a = F.log_softmax(a.project(first).double(), dim=-1)
        log_b = F.log_softmax(b.project(second).double(), dim=-1)
        divergence += float(F.kl_div(log_b, log_a, reduction="sum", log_target=True))
        same += int((log_a.argmax(-1) == log_b.argmax(-1)).sum())
    count = len(hidden_a_ND)
    return Agreement(kl=divergence / count, top1=same / count, positions=count)
