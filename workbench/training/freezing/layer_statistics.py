"""Measurements for policies: sums of gradients, and how much outputs still change.

Legend: B rows, L padded length, D hidden, N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.losses.chunked import wide


class GradientSums:
    """The sum of each parameter's gradients over an interval. Parameters that get none take no memory.

    Args:
        layers: Layer of each parameter, by name.
        trainable: The values that train, in float32 or wider, by name.
        blocks: Of the backbone; layers are 0 to blocks + 1.
    """

    def __init__(self, layers: Mapping[str, int], trainable: Mapping[str, nn.Parameter], *, blocks: int) -> None:
        self._layers, self._trainable, self._blocks = layers, trainable, blocks
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self) -> None:
        """Count the gradients that the parameters hold now: once a step, before they are clipped."""
        for name, parameter in self._trainable.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                self._sums[name] += parameter.grad
            else:
                self._sums[name] = parameter.grad.clone()

    def finish(self) -> tuple[float, ...]:
        """End the interval: the norm of each layer's sum, NaN where there was no gradient. Then start over.

        The norm is the sum of absolute values, as in the authors' code of AutoFreeze, where the paper names none.
        """
        norms = [math.nan] * (self._blocks + 2)
        for name, total in self._sums.items():
            layer, norm = self._layers[name], float(total.abs().sum())
            norms[layer] = norm if math.isnan(norms[layer]) else norms[layer] + norm
        self._sums = {}
        return tuple(norms)

    def state(self) -> dict[str, Tensor]:
        """The sums so far, for a checkpoint."""
        return dict(self._sums)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._sums = {name: total.to(self._trainable[name].device, copy=True) for name, total in state.items()}


class Plasticity:
    """How much each block's outputs changed in an interval: the similarity-preserving loss to those at its beginning.

    That is |G - G'|_F^2 / B^2, where G holds the dot products of whole rows, each row of it scaled to norm 1 (Tung &
    Mori 2019, arXiv:1907.09682).

    All that it keeps of a model an interval ago is which rows its blocks found alike, (N, B, B).

    Args:
        outputs: Runs the micro-batch that is looked at, always the same one of at least two rows and without dropout,
            and gives every block's output (B, L, D), zero at padding.
    """

    def __init__(self, outputs: Callable[[], Sequence[Tensor]]) -> None:
        self._outputs = outputs
        self._reference_NBB: Tensor | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """Look at the model for the first time, before the first interval."""
        self._reference_NBB = torch.stack([_likeness(each) for each in self._outputs()])

    def finish(self, trains: Sequence[bool]) -> tuple[float, ...]:
        """End the interval: the plasticity of each block that trains, NaN for other layers. Then start over.

        Args:
            trains: Of each layer, embeddings and what comes after the blocks included.
        """
        before_NBB = self._reference_NBB
        assert before_NBB is not None, "`begin` or `load` comes first"
        self.begin()
        assert self._reference_NBB is not None
        changes = (self._reference_NBB - before_NBB.to(self._reference_NBB.device)).square().mean((1, 2)).tolist()
        blocks = (change if on else math.nan for change, on in zip(changes, trains[1:-1], strict=True))
        return (math.nan, *blocks, math.nan)

    def state(self) -> dict[str, Tensor]:
        """Reference of the next interval, for a checkpoint."""
        return {} if self._reference_NBB is None else {"reference": self._reference_NBB}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._reference_NBB = state.get("reference")


def _likeness(states_BLD: Tensor) -> Tensor:
    """Dot products (B, B) of whole rows, each row of them scaled to norm 1, in float32 or wider."""
    rows_BX = states_BLD.to(wide(states_BLD.dtype)).flatten(1)
    return F.normalize(rows_BX @ rows_BX.T, dim=1)
