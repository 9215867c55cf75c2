"""Measurement for policies: how far the values of each layer go.

Legend: S sampled values of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

SAMPLED = 1024
"""Values of a parameter that are followed, evenly over it, at most twice as many as that."""


class ValueWays:
    """Ways of a sample of each layer's values: in each interval, and from the start.

    Args:
        layers: Layer of each parameter, by name.
        trainable: The values that train, in float32 or wider, by name.
        blocks: Number of blocks of the backbone; layers are 0 to blocks + 1.
    """

    def __init__(self, layers: Mapping[str, int], trainable: Mapping[str, nn.Parameter], *, blocks: int) -> None:
        self._trainable, self._count = trainable, blocks + 2
        self._names: dict[int, list[str]] = {}
        for name in trainable:
            self._names.setdefault(layers.get(name, blocks + 1), []).append(name)
        self._start: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Note where the values start."""
        self._start = {layer: sample(self._trainable, names) for layer, names in self._names.items()}
        self._last = dict(self._start)

    def finish(self, trains: Sequence[bool]) -> tuple[float, ...]:
        """End the interval: the way of each layer in it, then the distance of each from its start; NaN where frozen.

        Args:
            trains: Of each layer, embeddings and what comes after the blocks included.
        """
        moved, away = ([math.nan] * self._count for _ in range(2))
        for layer, names in self._names.items():
            if trains[layer]:
                now_S = sample(self._trainable, names)
                moved[layer] = float(torch.dist(now_S, self._last[layer]))
                away[layer] = float(torch.dist(now_S, self._start[layer]))
                self._last[layer] = now_S
        return (*moved, *away)

    def state(self) -> dict[str, Tensor]:
        """Samples at the start and at the last interval, for a checkpoint."""
        return {
            **{f"start|{layer}": each for layer, each in self._start.items()},
            **{f"last|{layer}": each for layer, each in self._last.items()},
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        for name, kept in {"start": self._start, "last": self._last}.items():
            kept.clear()
            for layer, names in self._names.items() if state else ():
                kept[layer] = state[f"{name}|{layer}"].to(self._trainable[names[0]].device, copy=True)


@torch.no_grad()
def sample(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The followed values of these parameters (S), the same of each at any time."""
    parts = [values[name].detach().flatten() for name in names]
    return torch.cat([part[:: max(1, part.numel() // SAMPLED)] for part in parts]).clone()
