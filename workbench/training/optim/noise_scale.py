"""The gradient noise scale: the batch size from which larger batches stop paying (McCandlish et al. 2018).

The gradient of a step is that of the mean over its supervised tokens. A part of its rows, which has the share w of
these tokens, has a mean gradient of its own, g; the step's is the sum of w g. For random rows, g varies about the true
gradient G by S / b, where b are its rows and S is the covariance of one row's; so

    E sum w |g|^2 = |G|^2 + tr(S) sum w / b        E |sum w g|^2 = |G|^2 + tr(S) sum w^2 / b,

two equations for |G|^2 and tr(S). For parts of equal size they are those of the paper (appendix A.1). The parts have to
be random: micro-batches, which hold rows of similar length, are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.data.batching import Indices
from workbench.training.checkpoints import Checkpointed

MEMORY = 0.9
"""Share of the smoothed estimates that is kept when a new one is added."""


class GradientPart(NamedTuple):
    """Some of a step's rows."""

    squared: float
    """Squared norm of its share of the step's gradient, w g."""
    rows: int
    share: float
    """Share of the step's supervised tokens, w."""


class NoiseEstimate(NamedTuple):
    """Estimates from one step; both are unbiased, so that `signal` may be negative."""

    signal: float
    """|G|^2."""
    noise: float
    """tr(S), of a single row; never negative."""


def cut(rows: Indices, *, parts: int = 8) -> list[Indices]:
    """Split the rows of a step, which are in random order, into parts of nearly equal size."""
    return np.array_split(rows, min(parts, len(rows)))


def estimate(parts: Sequence[GradientPart], squared: float) -> NoiseEstimate | None:
    """|G|^2 and tr(S) from the parts of one step; None where fewer than two of them are supervised.

    Args:
        squared: Squared norm of the step's gradient, before it is clipped.
    """
    parts = [part for part in parts if part.share > 0]
    if len(parts) < 2:
        return None
    apart = sum(part.squared / part.share for part in parts)
    noise_apart = sum(part.share / part.rows for part in parts)
    noise_together = sum(part.share**2 / part.rows for part in parts)
    noise = (apart - squared) / (noise_apart - noise_together)
    return NoiseEstimate(squared - noise * noise_together, noise)


class GradientParts:
    """Records the gradients of a step as they grow, part by part.

    Args:
        parameters: Their gradients are None when the step begins.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: dict[nn.Parameter, Tensor] = {}
        self._parts: list[GradientPart] = []

    @torch.no_grad()
    def add(self, rows: int, *, share: float) -> None:
        """Record the gradients after a part was added to them, of so many rows and this share of supervised tokens."""
        added = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                before = self._before.get(parameter)
                added.append(parameter.grad if before is None else parameter.grad - before)
                self._before[parameter] = parameter.grad.clone()
        self._parts.append(GradientPart(_squared(added), rows, share))

    def estimate(self) -> NoiseEstimate | None:
        """Estimate from all parts; None where fewer than two are supervised."""
        return estimate(self._parts, _squared(self._before.values()))


def _squared(tensors: Iterable[Tensor]) -> float:
    """Squared norm of all values together."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


class NoiseScale(Checkpointed):
    """The noise scale of a run: both estimates smoothed over its steps, and only then divided."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, estimate: NoiseEstimate | None) -> None:
        """Add the estimate of a step; None changes nothing."""
        if estimate is not None:
            # Both sums have the same weights, so their quotient needs no correction for a short history.
            self._signal = MEMORY * self._signal + (1 - MEMORY) * estimate.signal
            self._noise = MEMORY * self._noise + (1 - MEMORY) * estimate.noise

    @property
    def value(self) -> float | None:
        """tr(S) / |G|^2, the critical batch size in rows; None as long as the estimate of |G|^2 is not positive."""
        return self._noise / self._signal if self._signal > 0 else None

    def state(self) -> dict[str, Tensor]:
        """Both smoothed estimates, for a checkpoint."""
        return {
            "signal": torch.tensor(self._signal, dtype=torch.float64),
            "noise": torch.tensor(self._noise, dtype=torch.float64),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a `state`."""
        self._signal, self._noise = state["signal"].item(), state["noise"].item()
