"""Mixout (Lee et al. 2020, arXiv:1909.11299): in each step some values stand where they began.

With w a value, u its start and p the rate, a step computes with u + (w - u) k / (1 - p), where k is 0 with chance p and
else 1, drawn for each value: as in the paper's equation 2, on average over k it is w. The gradient of w is that of what
computed, times k / (1 - p). With p = 0, or while w = u, every value computes as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


class Mixout:
    """The starts of the values that train, and their part in each step.

    Args:
        values: In float32 or wider, by name, as they begin.
        rate: p; 0 holds nothing and does nothing.
        seed: Of the run.
    """

    def __init__(self, values: Mapping[str, nn.Parameter], *, rate: float, seed: int) -> None:
        self._rate, self._seed = rate, seed
        self._values = dict(values) if rate else {}
        self.start = {name: each.detach().clone() for name, each in self._values.items()}

    @contextmanager
    def mixed(self, step: int, *, refresh: Callable[[], None]) -> Iterator[None]:
        """Inside the block values compute mixed with their start; after it they, and their gradients, are their own.

        Which ones depends on seed, step and name alone. Frozen values stay. They come back to the same bits, whatever
        happens in the block.

        Args:
            step: From 0.
            refresh: Called when the values have changed: copies them to where they compute.
        """
        moved = {name: each for name, each in self._values.items() if each.requires_grad}
        if not moved:
            yield
            return
        kept = {name: each.detach().clone() for name, each in moved.items()}
        goes = {name: self._goes(name, each, step) for name, each in moved.items()}
        try:
            with torch.no_grad():
                for name, each in moved.items():
                    way = (each - self.start[name]).mul_(goes[name]).div_(1 - self._rate)
                    torch.add(self.start[name], way, out=each)
            refresh()
            yield
            for name, each in moved.items():
                if each.grad is not None:
                    each.grad.mul_(goes[name]).div_(1 - self._rate)
        finally:
            with torch.no_grad():
                for name, each in moved.items():
                    each.copy_(kept[name])
            refresh()

    def _goes(self, name: str, value: Tensor, step: int) -> Tensor:
        """Whether each element goes its way in a step, bool: k."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        seed = np.random.SeedSequence([self._seed, step, number]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(value.device).manual_seed(int(seed >> np.uint64(1)))
        return torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - self._rate, generator=generator)
