"""Measurements for freezing policies: sums of gradients, and changes of activations.

A policy sees one observation at the end of each interval of steps. All measurements are in checkpoints.

Legend: B rows, L padded length, D hidden, N blocks, S sampled values of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.method import TrainHook
from workbench.config.freeze_config import Observation
from workbench.data.batching import MicroBatch
from workbench.losses.chunked_loss import wide
from workbench.training.freezing.cached_prefix import parts
from workbench.training.freezing.freezer import Freezer

SAMPLED = 1024
"""Values of a parameter that are followed, evenly spaced; at most twice as many."""


class Measurement(Protocol):
    """What is measured over an interval of steps. Layers are the embeddings, the blocks, and what comes after them."""

    def look(self) -> None:
        """Called once a step when its gradients are there, before they are clipped."""

    def finish(self, trains: Sequence[bool]) -> tuple[float, ...]:
        """End the interval and start the next: the value of each layer, NaN where it has none.

        Args:
            trains: Whether each layer trains.
        """

    def state(self) -> dict[str, Tensor]:
        """The measurements so far, for a checkpoint."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""


class PolicyObserver(TrainHook):
    """Shows a freezer's policy the measurement of each interval.

    Args:
        prefix: Of the measurement's tensors in a checkpoint.
    """

    def __init__(self, freezer: Freezer, measurement: Measurement, *, prefix: str) -> None:
        self._freezer, self._measurement, self._prefix = freezer, measurement, prefix

    def on_gradients(self) -> None:
        self._measurement.look()

    def after_step(self, step: int) -> None:
        freezer = self._freezer
        if step % freezer.policy.interval == 0:
            freezer.seen += (Observation(step, self._measurement.finish(freezer.plan.trains)),)

    def state(self) -> dict[str, Tensor]:
        """The measurement so far, and all observations."""
        seen = self._freezer.seen
        return {
            **{f"{self._prefix}{name}": each for name, each in self._measurement.state().items()},
            "seen|steps": torch.tensor([each.step for each in seen], dtype=torch.int64),
            "seen|values": torch.tensor([each.values for each in seen], dtype=torch.float64),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        pairs = zip(state["seen|steps"].tolist(), state["seen|values"].tolist(), strict=True)
        self._freezer.seen = tuple(Observation(step, tuple(values)) for step, values in pairs)
        own = {name: each for name, each in state.items() if not name.startswith("seen|")}
        self._measurement.load({name.removeprefix(self._prefix): each for name, each in own.items()})


def of(freezer: Freezer, trainable: Mapping[str, nn.Parameter], run: Callable[[], MicroBatch]) -> dict[str, TrainHook]:
    """The observer for a freezer's policy, by the name of its file in a checkpoint; empty where it observes nothing.

    Args:
        trainable: The values that train, in float32 or wider, by name.
        run: Runs the model on the same few rows each time, without dropout, and returns them.
    """
    policy, blocks = freezer.policy, len(freezer.blocks)
    if policy.observes == "gradients":
        sums = GradientSums(freezer.layers, trainable, blocks=blocks)
        return {"freezing": PolicyObserver(freezer, sums, prefix="sum|")}
    plasticity = Plasticity(lambda: block_outputs(freezer.blocks, run))
    return {"freezing": PolicyObserver(freezer, plasticity, prefix="")} if policy.observes == "activations" else {}


class GradientSums:
    """The sum of each parameter's gradients over an interval, of SAMPLED values that stand for all: all of MiniLM's
    made a step 8 % longer and took a tenth more memory. Parameters without gradients take no memory.

    Args:
        layers: Layer of each parameter, by name.
        trainable: The values that train, in float32 or wider, by name.
        blocks: Number of blocks of the backbone; layers are 0 to blocks + 1.
    """

    def __init__(self, layers: Mapping[str, int], trainable: Mapping[str, nn.Parameter], *, blocks: int) -> None:
        self._layers, self._trainable, self._blocks = layers, trainable, blocks
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self) -> None:
        """Add the present gradients."""
        for name, parameter in self._trainable.items():
            if parameter.grad is None:
                continue
            values_S = parameter.grad.flatten()[:: _stride(parameter)]
            if name in self._sums:
                self._sums[name] += values_S
            else:
                self._sums[name] = values_S.clone()

    def finish(self, trains: Sequence[bool] = ()) -> tuple[float, ...]:
        """End the interval: the norm of each layer's sum, NaN where there was no gradient.

        The norm is the sum of absolute values, as in the authors' code of AutoFreeze; the paper does not say.
        """
        norms = [math.nan] * (self._blocks + 2)
        for name, total in self._sums.items():
            layer, norm = self._layers[name], float(total.abs().sum()) * _stride(self._trainable[name])
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
    Mori 2019, arXiv:1907.09682). Only this similarity of the rows, (N, B, B), is kept of the model an interval ago.

    Args:
        outputs: Runs the same micro-batch of at least two rows each time, without dropout, and returns the output of
            every block (B, L, D), zero at padding.
    """

    def __init__(self, outputs: Callable[[], Sequence[Tensor]]) -> None:
        self._outputs = outputs
        self._reference_NBB: Tensor | None = None

    def look(self) -> None:
        """Before the first step, measure the reference of the first interval."""
        if self._reference_NBB is None:
            self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Measure the reference of the next interval."""
        rows_NBX = [each.to(wide(each.dtype)).flatten(1) for each in self._outputs()]
        self._reference_NBB = torch.stack([F.normalize(rows_BX @ rows_BX.T, dim=1) for rows_BX in rows_NBX])

    def finish(self, trains: Sequence[bool]) -> tuple[float, ...]:
        """End the interval: the plasticity of each block that trains, NaN for other layers."""
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


def block_outputs(blocks: Sequence[nn.Module], run: Callable[[], MicroBatch]) -> Sequence[Tensor]:
    """Output of each block (B, L, D) in a forward pass, with zeros at padding.

    Args:
        run: Calls the model, and returns the rows that it read.
    """
    activations: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda _, __, output: activations.append(parts(output)[0])) for block in blocks
    ]
    try:
        batch = run()
    finally:
        for handle in handles:
            handle.remove()
    if "row_lengths" in batch.inputs:  # packed
        return activations
    if "attention_mask" in batch.inputs:
        mask_BL = batch.inputs["attention_mask"].bool()
    elif batch.lengths_B is not None:
        ids_BL = batch.inputs["input_ids"]
        mask_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device) < batch.lengths_B[:, None]
    else:  # pictures have no padding
        return activations
    # A classifier's last block may compute only the first token, which is never padding.
    return [
        each.masked_fill(~mask_BL[..., None], 0) if each.shape[:2] == mask_BL.shape else each for each in activations
    ]


def _stride(values: Tensor) -> int:
    """Distance between the values of a tensor that are followed."""
    return max(1, values.numel() // SAMPLED)
