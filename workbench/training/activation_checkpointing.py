"""How the activations of each block are kept for the backward pass: the one place that decides it.

A block keeps all of them, or all but results of elementwise operations, or its inputs alone; whatever is not kept is
computed again (Chen et al. 2016, arXiv:1604.06174). All ways give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.config.checks.checkpointing_checks import unable_by_block
from workbench.config.sections.basic_sections import Checkpointing
from workbench.data.batching import Examples, MicroBatch
from workbench.errors import ConfigError
from workbench.models.recomputation import recomputing_elementwise
from workbench.training import activation_offload, capacity

T = TypeVar("T")
Way = Literal["kept", "elementwise", "whole"]
"""Activations of a block that are kept, or computed again: none, those of elementwise operations, all."""

ENOUGH = 8192
"""Tokens of a forward pass from which half of them are as fast on an accelerator, and so are tried first.

By arithmetic: unpacking 4-bit weights takes 10 % of a step of 2,000 tokens in a forward pass, and 2 % of one of 8,000,
as much as computing elementwise operations again.
"""
HALF = 0.5
"""Share of the blocks that are recomputed whole before all are."""


def ways(wanted: Checkpointing, blocks: int) -> list[Way]:
    """The way of each of so many blocks, in the order in which they compute; `auto` begins by keeping everything.

    A share of the blocks means the first ones, rounded up, and never the last: the backward pass would begin by
    computing it. The others recompute elementwise operations.
    """
    if wanted is True:
        return ["whole"] * blocks
    if wanted is False or wanted == "auto":
        return ["kept"] * blocks
    whole = 0 if wanted == "elementwise" else min(blocks - 1, math.ceil(wanted * blocks - 1e-9))
    return [*["whole"] * whole, *["elementwise"] * (blocks - whole)]  # type: ignore[list-item]


def require(config: TrainingSections, model: Any) -> None:
    """Raise ConfigError where activations are to be recomputed, and on this backbone the method does not allow it.

    Args:
        model: The backbone, with the adapter or without.
    """
    wanted = config.train.checkpointing
    if wanted in (False, "auto"):
        return
    if reason := refusal(config, model):
        raise ConfigError(
            f"train.checkpointing does not go with {reason}. "
            "Write train.checkpointing=false and a smaller batch.tokens_per_device."
        )
    if wanted is not True and not by_block(config, model):
        raise ConfigError(
            f"train.checkpointing={wanted} does not go with model.id={config.model.id}, whose blocks transformers "
            "recomputes all together. Write train.checkpointing=true."
        )


def refusal(config: TrainingSections, model: Any) -> str:
    """Say with what on this backbone activations cannot be recomputed; empty where they can be."""
    if reason := config.adapter.no_checkpointing(model):
        return f"adapter.method={config.adapter.method}: {reason}"
    if not model.supports_gradient_checkpointing:
        return f"model.id={config.model.id}, for which transformers has no such thing"
    return ""


def by_block(config: TrainingSections, model: nn.Module) -> bool:
    """Whether each block can be kept in a way of its own."""
    blocks = _blocks(model)
    return bool(blocks) and all(map(_is_alone, blocks)) and not any(unable_by_block(config))


def keep(model: Any, wanted: Checkpointing) -> None:
    """Let the blocks of a backbone keep their activations as is wanted; what was recomputed before stays so."""
    if wanted is True:
        # Transformers' name for it; 5.17 has the older one alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        return
    blocks = _blocks(model)
    calls: dict[Way, Any] = {"whole": partial(checkpoint, use_reentrant=False), "elementwise": recomputing_elementwise}
    for block, way in zip(blocks, ways(wanted, len(blocks)), strict=True):
        if way in calls:  # transformers calls a block through this function, and its hooks around it
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = calls[way]


class ActivationKeeping:
    """How a training keeps activations: as configured, or in `auto` fewer and fewer of them as memory runs out.

    Args:
        device: From which inputs of blocks may go to the host; None: they stay.
    """

    def __init__(self, config: TrainingSections, backbone: Any, device: torch.device | None = None) -> None:
        self._config, self._backbone, self._device = config, backbone, device
        asked = config.train.checkpointing
        self.now: Checkpointing = False if asked == "auto" else asked
        """Setting that does the same."""
        self.offloads = False
        """Whether inputs of blocks wait on the host."""

    def begin(self, remembered: Checkpointing | None = None, *, offloads: bool = False) -> None:
        """Keep them as configured; in `auto` all, or as an earlier run did.

        Raises:
            ConfigError: the backbone cannot.
        """
        require(self._config, self._backbone)  # a plan comes here without having asked
        asked = self._config.train.checkpointing
        self._take((remembered or False) if asked == "auto" else asked)
        if self._device is not None and (offloads or self._config.train.offload_activations is True):
            self._take("offload")

    def until_it_fits(
        self, compute: Callable[[int], T], tokens: int, *, longest: int, retry: Callable[[int], None]
    ) -> T:
        """Result of `compute(tokens)`; where memory runs out, with fewer tokens or with fewer activations kept.

        Args:
            tokens: The most in a forward pass.
            longest: Tokens of the longest row, the fewest that are tried.
            retry: Called with the number of tokens before each further try, to free memory and to report.

        Raises:
            torch.OutOfMemoryError: not even one row fits.
        """
        while True:
            upcoming = self._upcoming()
            least = max(longest, ENOUGH) if upcoming == "elementwise" else longest
            try:
                return capacity.smaller_until_fits(compute, tokens, longest=least, retry=retry)
            except torch.OutOfMemoryError:
                if upcoming is None:
                    raise
            tokens = min(tokens, least)
            self._take(upcoming)
            retry(tokens)

    def largest_that_fits(
        self, tokens: int, train: Examples, trial: Callable[[MicroBatch], None], *, remembered: capacity.Remembered
    ) -> int:
        """Tokens of which a forward and backward pass over the longest rows fits the accelerator's memory.

        Raises:
            TrainingError: not even one row fits.
        """
        if (known := remembered.read()) is not None:
            if self._config.train.checkpointing == "auto":
                self._take(known.checkpointing)
            return min(tokens, known.tokens)
        order = (-train.lengths).argsort(kind="stable")
        longest = int(train.lengths[order[0]])

        def compute(fewer: int) -> int:
            trial(train.batch(order[: max(1, fewer // longest)]))
            return fewer

        def retry(fewer: int) -> None:
            remembered.write(fewer, self.now)

        try:
            return self.until_it_fits(compute, tokens, longest=longest, retry=retry)
        except torch.OutOfMemoryError:
            raise capacity.nothing_fits(longest, train) from None

    @property
    def in_words(self) -> str:
        """Half a sentence on what is not kept; empty where everything is."""
        return f", recomputing activations ({self.to_write.strip()})" if self.to_write else ""

    @property
    def to_write(self) -> str:
        """The present setting after a space, as the command line has it; empty where everything is kept."""
        words = f" train.checkpointing={str(self.now).lower()}" if self.now else ""
        return f"{words} train.offload_activations=true" if self.offloads else words

    def _take(self, wanted: Checkpointing | Literal["offload"]) -> None:
        if wanted == "offload":
            assert self._device is not None, "inputs of blocks go to the host from a device"
            activation_offload.begin(self._backbone, self._device)
            self.offloads = True
            return
        self.now = wanted
        keep(self._backbone, wanted)

    def _upcoming(self) -> Checkpointing | Literal["offload"] | None:
        """The next way that keeps less, where the configuration leaves it open."""
        if self._order and (following := self._order.index(self.now) + 1) < len(self._order):
            return self._order[following]
        able = self._device is not None and self._device.type != "cpu" and self.now is True and not self.offloads
        return "offload" if able and self._config.train.offload_activations == "auto" else None

    @cached_property
    def _order(self) -> list[Checkpointing]:
        """Ways that keep less and less, where the configuration leaves it open: each step asks, and blocks are many."""
        if self._config.train.checkpointing != "auto" or refusal(self._config, self._backbone):
            return []
        return [False, *(_PARTS if by_block(self._config, self._backbone) else []), True]


_PARTS: list[Checkpointing] = ["elementwise", HALF]


def _blocks(model: nn.Module) -> list[Any]:
    return [model.get_submodule(path) for stack in anatomy.blocks(model) for path in stack]


def _is_alone(block: nn.Module) -> bool:
    """Whether transformers recomputes a block by itself."""
    return isinstance(block, GradientCheckpointingLayer)
