"""Difference of two models' predictions on the same tokens.

Legend: B rows, L padded length, D hidden, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.data.batching import Indices
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.row_passes import over_rows
from workbench.losses.chunked import chunks
from workbench.models.output_heads import Head


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
        """Both measures, as `merge` prints them."""
        return (
            f"On {self.positions:,} held-out tokens: KL divergence {self.kl:.2e} nats per token, "
            f"same first choice {self.top1:.2%}."
        )


def hidden_states(model: nn.Module, head: Head, tokens: TokenizedSet, *, rows: int) -> Tensor:
    """Hidden states (N, D) in front of the head, at the supervised positions of the first `rows` examples, in order."""
    first = tokens.subset(np.arange(min(rows, len(tokens))))
    device = next(model.parameters()).device

    def compute(numbers: Indices) -> list[Tensor]:
        batch = first.batch(numbers).to(device)
        hidden_BLD = head.hidden(model, batch.inputs)
        supervised_BL = torch.zeros(hidden_BLD.shape[:2], dtype=torch.bool, device=device)
        supervised_BL.view(-1)[batch.positions_N] = True
        return [hidden_LD[supervised_L] for hidden_LD, supervised_L in zip(hidden_BLD, supervised_BL, strict=True)]

    hidden_by_row = over_rows(model, first.lengths, compute)
    return torch.cat([hidden_by_row[row] for row in range(len(first))])


@torch.no_grad()
def agreement(a: Head, hidden_a_ND: Tensor, b: Head, hidden_b_ND: Tensor) -> Agreement:
    """Compare the distributions that two heads give for their own model's hidden states at the same positions."""
    divergence, same = 0.0, 0
    # In float64, which takes twice as much: a divergence of almost nothing would round to less than nothing.
    for first, second in chunks(4 * a.vocabulary, hidden_a_ND, hidden_b_ND):
        log_a = F.log_softmax(a.project(first).double(), dim=-1)
        log_b = F.log_softmax(b.project(second).double(), dim=-1)
        divergence += float(F.kl_div(log_b, log_a, reduction="sum", log_target=True))
        same += int((log_a.argmax(-1) == log_b.argmax(-1)).sum())
    count = len(hidden_a_ND)
    return Agreement(kl=divergence / count, top1=same / count, positions=count)
