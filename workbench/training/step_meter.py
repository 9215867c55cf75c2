"""Means over the examples of a step of what their loss is made of, for metrics.jsonl.

Legend: P examples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.runs.ranks import Ranks


class StepMeter:
    """Adds up figures of examples over micro-batches and processes; it changes no bit of the training."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._sums = {}

    @torch.no_grad()
    def add(self, figures: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Figures of a micro-batch by their names: values (P,) and the weight (P,) of each in the mean."""
        for name, (value_P, weight_P) in figures.items():
            weight_P = weight_P.double()
            sums = torch.stack([(value_P.detach().double() * weight_P).sum(), weight_P.sum()])
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def means(self, ranks: Ranks) -> dict[str, float]:
        """The means since `begin`; each process has to ask. Without those of which there was nothing."""
        rank_sums = ranks.gathered({name: sums.tolist() for name, sums in self._sums.items()})
        names = dict.fromkeys(name for each in rank_sums for name in each)
        sums = {name: [sum(each.get(name, (0.0, 0.0))[at] for each in rank_sums) for at in (0, 1)] for name in names}
        return {name: value / weight for name, (value, weight) in sums.items() if weight}
