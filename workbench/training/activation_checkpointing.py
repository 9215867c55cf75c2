"""Activation checkpointing: which activations each block keeps for the backward pass, and which it recomputes.

A block keeps all of them, or all but the results of elementwise operations, or only its inputs; the rest is recomputed
(Chen et al. 2016, arXiv:1604.06174). Every way computes the same bits.
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
from workbench.config.checks.step_checks import unable_by_block
from workbench.config.sections.basic_sections import Checkpointing
from workbench.data.batching import Examples, Indices
from workbench.errors import ConfigError
from workbench.models.activation_recomputation import recomputing_elementwise
from workbench.runs.ranks import Ranks
from workbench.training import activation_offload, capacity

T = TypeVar("T")
Way = Literal["kept", "elementwise", "whole"]
"""What a block recomputes: nothing, elementwise operations, or everything."""

ENOUGH = 8192
"""Tokens of a forward pass from which half as many are as fast on an accelerator: so fewer tokens are tried first.

An estimate: unpacking 4-bit weights takes 10 % of a step with 2,000 tokens in a forward pass, and 2 % with 8,000, as
much as recomputing elementwise operations.
"""
HALF = 0.5
"""Share of the blocks that `auto` recomputes whole before it recomputes all."""


def ways(wanted: Checkpointing, blocks: int) -> list[Way]:
    """The way of each block, in the order in which they compute; `auto` starts by keeping everything.

    A share of the blocks means the first ones, rounded up, and never the last, which the backward pass would have to
    recompute at once. The others recompute elementwise operations.
    """
    if wanted is True:
        return ["whole"] * blocks
    if wanted is False or wanted == "auto":
        return ["kept"] * blocks
    whole = 0 if wanted == "elementwise" else min(blocks - 1, math.ceil(wanted * blocks - 1e-9))
    return [*["whole"] * whole, *["elementwise"] * (blocks - whole)]  # type: ignore[list-item]


def require(config: TrainingSections, model: Any) -> None:
    """Raise ConfigError where activations are to be recomputed, and this method or backbone does not allow it.

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
    """The setting with which this backbone's activations cannot be recomputed; empty where they can."""
    if reason := config.adapter.no_checkpointing(model):
        return f"adapter.method={config.adapter.method}: {reason}"
    if not model.supports_gradient_checkpointing:
        return f"model.id={config.model.id}, for which transformers has no such thing"
    return ""


def by_block(config: TrainingSections, model: nn.Module) -> bool:
    """Whether each block can have its own way."""
    alone = [isinstance(block, GradientCheckpointingLayer) for block in _blocks(model)]
    return bool(alone) and all(alone) and not any(unable_by_block(config))


def keep(model: Any, wanted: Checkpointing) -> None:
    """Let the blocks of a backbone keep activations as `wanted`; what was recomputed before still is."""
    if wanted is True:
        # Transformers' present name; 5.17 has only the older one.
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
    """How a training keeps activations: as configured, or with `auto` fewer and fewer of them as memory runs out.

    Args:
        device: The device from which inputs of blocks may be offloaded; None: they may not.
    """

    def __init__(self, config: TrainingSections, backbone: Any, device: torch.device | None = None) -> None:
        self._config, self._backbone, self._device = config, backbone, device
        asked = config.train.checkpointing
        self.now: Checkpointing = False if asked == "auto" else asked
        """The present way, as a setting."""
        self.offloads = False
        """Whether inputs of blocks are offloaded."""

    def begin(self, remembered: Checkpointing | None = None, *, offloads: bool = False) -> None:
        """Start as configured; with `auto` by keeping all, or as an earlier run did.

        Raises:
            ConfigError: the backbone does not allow it.
        """
        require(self._config, self._backbone)  # a plan has not checked it before
        asked = self._config.train.checkpointing
        self._take((remembered or False) if asked == "auto" else asked)
        if self._device is not None and (offloads or self._config.train.offload_activations is True):
            self._take("offload")

    def until_it_fits(
        self, compute: Callable[[int], T], tokens: int, *, longest: int, retry: Callable[[int], None]
    ) -> T:
        """Result of `compute(tokens)`; where memory runs out, with fewer tokens or with fewer activations kept.

        Args:
            tokens: Most tokens in a forward pass.
            longest: Tokens of the longest row, the fewest that are tried.
            retry: Called with the number of tokens before each further try, to free memory and to report.

        Raises:
            torch.OutOfMemoryError: not even one row fits.
        """
        while True:
            upcoming, least = self._following(longest)
            try:
                return capacity.smaller_until_fits(compute, tokens, longest=least, retry=retry)
            except torch.OutOfMemoryError:
                if upcoming is None:
                    raise
            tokens = min(tokens, least)
            self._take(upcoming)
            retry(tokens)

    def largest_that_fits(
        self,
        tokens: int,
        train: Examples,
        trial: Callable[[Indices], None],
        *,
        remembered: capacity.Remembered,
        together: Ranks | None = None,
        device: torch.device | None = None,
    ) -> int:
        """Number of tokens with which a forward and backward pass over the longest rows fits in memory.

        Args:
            trial: Such a pass, over some rows.
            together: The processes that compute each pass together; None: this one computes alone.
            device: Where they compute; None: that from which inputs of blocks may be offloaded.

        Raises:
            TrainingError: not even one row fits.
        """
        known = remembered.read()
        if (known := known if together is None else together.agreed(known)) is not None:
            if self._config.train.checkpointing == "auto":
                self._take(known.checkpointing)
            return min(tokens, known.tokens)
        order = (-train.lengths).argsort(kind="stable")
        longest = int(train.lengths[order[0]])
        if together is not None:
            return self._largest_foreseen(tokens, train, trial, remembered, together, device or self._device)

        def compute(fewer: int) -> int:
            trial(order[: max(1, fewer // longest)])
            return fewer

        def retry(fewer: int) -> None:
            remembered.write(fewer, self.now)

        try:
            return self.until_it_fits(compute, tokens, longest=longest, retry=retry)
        except torch.OutOfMemoryError:
            raise capacity.nothing_fits(longest, train) from None

    def _largest_foreseen(
        self,
        tokens: int,
        train: Examples,
        trial: Callable[[Indices], None],
        remembered: capacity.Remembered,
        together: Ranks,
        device: torch.device | None,
    ) -> int:
        assert device is not None
        longest = int(train.lengths.max())
        passes = capacity.growing_passes(train.lengths, tokens=tokens)
        most = longest * len(passes[-1])
        while True:
            upcoming, least = self._following(longest)
            fits = capacity.largest_foreseen(passes, train, trial, device=device, ranks=together)
            if fits >= min(most, least) or upcoming is None:
                break
            self._take(upcoming)
        if fits < longest:
            raise capacity.nothing_fits(longest, train)
        if together.first and (fits < most or self.to_write):
            remembered.write(fits, self.now)
        return tokens if fits == most else fits

    def _following(self, longest: int) -> tuple[Checkpointing | Literal["offload"] | None, int]:
        """The way that keeps less than the present one, if there is one, and the fewest tokens to try before it."""
        if self._order and (following := self._order.index(self.now) + 1) < len(self._order):
            upcoming = self._order[following]
            return upcoming, max(longest, ENOUGH) if upcoming == "elementwise" else longest
        accelerated = self._device is not None and self._device.type != "cpu"
        able = accelerated and self.now is True and not self.offloads
        return "offload" if able and self._config.train.offload_activations == "auto" else None, longest

    @property
    def in_words(self) -> str:
        """End of a sentence on what is recomputed; empty where nothing is."""
        return f", recomputing activations ({self.to_write.strip()})" if self.to_write else ""

    @property
    def to_write(self) -> str:
        """The present way as words of the command line, after a space; empty where everything is kept."""
        words = f" train.checkpointing={str(self.now).lower()}" if self.now else ""
        return f"{words} train.offload_activations=true" if self.offloads else words

    def _take(self, wanted: Checkpointing | Literal["offload"]) -> None:
        if wanted == "offload":
            assert self._device is not None
            activation_offload.begin(self._backbone, self._device)
            self.offloads = True
            return
        self.now = wanted
        keep(self._backbone, wanted)

    @cached_property
    def _order(self) -> list[Checkpointing]:
        """Ways that keep less and less, if the configuration allows them; cached, because every step asks."""
        if self._config.train.checkpointing != "auto" or refusal(self._config, self._backbone):
            return []
        return [False, "elementwise", HALF, True] if by_block(self._config, self._backbone) else [False, True]


def _blocks(model: nn.Module) -> list[Any]:
    return [model.get_submodule(path) for stack in anatomy.blocks(model) for path in stack]
