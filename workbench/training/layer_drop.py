"""Blocks that whole steps leave out: progressive layer dropping and LayerDrop.

A block that is left out is not computed: it gives what it gets, for every row of the step. One that computes adds its
part times 1 / (1 - chance), so that on average over the draws it adds what it adds in evaluation, which uses all blocks
(Zhang & He 2020, arXiv:2010.13369, algorithm 1; Fan et al. 2020, arXiv:1909.11556). With a chance of 0 nothing is
scaled: every bit is what it is without. A block that is left out has a gradient of zero, on one device as on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workbench.config import TrainingSections
from workbench.config.sections.layer_drop_config import LayerDropConfig
from workbench.errors import BackboneError
from workbench.models import rerouting
from workbench.training import block_calls
from workbench.training.block_calls import BlockCall
from workbench.training.freezing.layer_map import stack


class LayerDrop:
    """Leaves out blocks of a backbone during steps.

    Args:
        seed: Of the run.
    """

    def __init__(
        self, backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: LayerDropConfig, *, seed: int
    ) -> None:
        self._backbone, self._blocks, self._config, self._seed = backbone, blocks, config, seed
        self._more: list[tuple[Any, ...] | None] = []
        self._able: list[bool] = []
        """Whether a block adds to its input, so that it can be left out."""
        self._factors: list[float] | None = None
        """Factor of each block's part now, which with 0 is not computed; None outside of steps."""

    def install(self) -> None:
        """Put this in the way of the blocks' calls; nothing where it is off.

        Raises:
            BackboneError: No block's input could stand for its output.
        """
        if not self._config.is_on:
            return
        calls = surveyed(self._backbone, self._blocks)
        self._more, self._able = [each.more for each in calls], [each.adds for each in calls]
        for number, block in enumerate(self._blocks):
            rerouting.reroute(block, partial(self._forward, number, block.forward))

    @contextmanager
    def during(self, step: int, share: float, masters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, the blocks that step `step` (from 0) leaves out are not computed; after it they have zero gradients.

        Args:
            share: Of the run that is done.
            masters: What trains.
        """
        if not self._config.is_on:
            yield
            return
        drawn = self._config.left_out(step, share, blocks=len(self._blocks), seed=self._seed)
        chances = self._config.chances(share, blocks=len(self._blocks))
        self._factors = [0.0 if out else 1 / (1 - each) for out, each in zip(drawn, chances, strict=True)]
        try:
            yield
        finally:
            self._factors = None
        for master in masters:
            if master.requires_grad and master.grad is None:
                master.grad = torch.zeros_like(master)

    def _forward(self, number: int, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The forward pass of a block, or its input."""
        factor = self._factors[number] if self._factors is not None and self._able[number] else 1.0
        if factor == 1:
            return own(*arguments, **named)
        before, more = rerouting.hidden_of(arguments, named), self._more[number]
        if not factor:
            return before if more is None else (before, *more)
        output = own(*arguments, **named)
        after = output[0] if isinstance(output, tuple) else output
        return block_calls.like(output, before + (after - before) * factor)


def surveyed(backbone: PreTrainedModel, blocks: Sequence[nn.Module], *, key: str = "layer_drop") -> list[BlockCall]:
    """The call of each block; the backbone is called once, and one for pictures may be without weights.

    Args:
        key: Setting that lets blocks be left out.

    Raises:
        BackboneError: No block's input could stand for its output.
    """
    calls = block_calls.survey(backbone, blocks)
    if not any(each.adds for each in calls):
        raise BackboneError(
            f"{type(backbone).__name__}: no block gives hidden states alone, of the shape that it gets, so that "
            f"{key} could leave none out. Leave {key} out."
        )
    return calls


def always_computed(config: TrainingSections, backbone: PreTrainedModel) -> Iterator[str]:
    """Yield a sentence on blocks for pictures that no setting leaves out, where one leaves out others.

    Raises:
        BackboneError: There are no others.
    """
    on = {"layer_drop": config.layer_drop.is_on, "regularise.stochastic_depth": config.regularise.stochastic_depth > 0}
    keys = [key for key, is_on in on.items() if is_on] if config.reads_pictures else []
    for key in keys:
        calls = surveyed(backbone, [backbone.get_submodule(path) for path in stack(backbone)], key=key)
        if whole := sum(not each.adds for each in calls):
            yield (
                f"{key}: {whole} of {len(calls)} blocks change the resolution or the width of what they read, so "
                "that nothing could stand for what they give: every step computes them for all rows."
            )
