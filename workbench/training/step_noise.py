"""Noise of a step: dropout of rows, layers and tokens, and mixout; a function of seed, step and row.

It never depends on micro-batches. Mixout (Lee et al. 2020, arXiv:1909.11299) sets some values to where they started:
with w a value, u its start and p the rate, a step computes with u + (w - u) k / (1 - p), where k is 0 with chance p and
else 1 for each value: as in equation 2 of the paper, its expectation over k is w. The gradient of w is that of what
computed, times k / (1 - p). With p = 0, or while w = u, every value computes as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config import TrainingSections
from workbench.data.batching import Indices, MicroBatch
from workbench.models import forward_hooks
from workbench.training.distributed.sharding import Sharded
from workbench.training.freezing.freezer import Freezer
from workbench.training.layer_and_token_drop import LayerDrop, TokenDrop
from workbench.training.master_weights import MasterWeights
from workbench.training.progressive_stacking import ProgressiveStacking
from workbench.training.signal import Units


class Mixout:
    """Mixes values with their starts during steps.

    Args:
        values: The values that train, in float32 or wider, by name, as they start.
        rate: p; with 0 this keeps and does nothing.
        seed: Of the run.
    """

    def __init__(self, values: Mapping[str, nn.Parameter], *, rate: float, seed: int) -> None:
        self._rate, self._seed = rate, seed
        self._values = dict(values) if rate else {}
        self.start = {name: each.detach().clone() for name, each in self._values.items()}

    @contextmanager
    def mixed(self, step: int, *, refresh: Callable[[], None]) -> Iterator[None]:
        """Inside the block values are mixed with their starts; afterwards they and their gradients are their own.

        The choice depends only on seed, step and name. Frozen values stay. Values return to the same bits, whatever
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
        goes = {name: self._kept(name, each, step) for name, each in moved.items()}
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

    def _kept(self, name: str, value: Tensor, step: int) -> Tensor:
        """k of each element in a step, bool."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        seed = np.random.SeedSequence([self._seed, step, number]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(value.device).manual_seed(int(seed >> np.uint64(1)))
        return torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - self._rate, generator=generator)


class StepNoise:
    """The noise of the steps of a run.

    Args:
        packed: Whether the rows of a micro-batch lie in one sequence.
    """

    def __init__(
        self,
        config: TrainingSections,
        freezer: Freezer,
        masters: MasterWeights | Sharded,
        device: torch.device,
        *,
        packed: bool,
    ) -> None:
        self._config, self._freezer, self._masters = config, freezer, masters
        self._passes = 2 if config.regularise.r_drop else 1
        self._device, self._packed = device, packed
        began = {name: each for name, each in masters.named().items() if name in freezer.layers.keys() - freezer.fresh}
        self.mixout = Mixout(began, rate=config.regularise.mixout, seed=config.seed)
        self.layer_drop = LayerDrop(freezer.backbone, freezer.blocks, config.layer_drop, seed=config.seed)
        self.token_drop = TokenDrop(freezer.backbone, freezer.blocks, config.token_drop)
        self.stacking = ProgressiveStacking(freezer.backbone, freezer.blocks, config.grow, masters)

    def install(self) -> None:
        """Install the noise in the backbone, which has to be in training mode."""
        freezer = self._freezer
        forward_hooks.install(freezer.backbone, freezer.blocks, self._config.regularise)
        for block in freezer.blocks:  # as an earlier training left them
            forward_hooks.restore(block)
        self.layer_drop.install()
        self.token_drop.install()
        self.stacking.install()

    @contextmanager
    def during(self, step: int, share: float) -> Iterator[None]:
        """Around all passes of step `step` (from 0), after a share of the run."""
        with (
            self.layer_drop.during(step, share, self._masters),
            self.token_drop.during(share),
            self.stacking.during(step, share),
            self.mixout.mixed(step, refresh=self._masters.refresh),
        ):
            yield

    @contextmanager
    def of(self, batch: MicroBatch, indices: Indices, seen: Units, *, step: int) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch of the examples `indices`."""
        seed = self._config.seed
        first = RowDraw(seed, step, *batch.numbered(indices, seen.lengths), self._packed)
        # For the backbone's own dropout, which does not know rows.
        backbones = int(np.random.SeedSequence([seed, step, int(indices[0])]).generate_state(1)[0])
        # On a CPU only the generator: torch.manual_seed also records the whole call stack, for devices not yet in use.
        (torch.default_generator.manual_seed if self._device.type == "cpu" else torch.manual_seed)(backbones)
        draws = [first._replace(copy=number) for number in range(self._passes)]
        with drawing(draws, self._device), self.token_drop.of(first.lengths):
            yield
