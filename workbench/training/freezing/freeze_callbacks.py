"""Training hooks that measure for policies; their measurements are in checkpoints.

Legend: B rows, L padded length, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config.freeze_config import Observation
from workbench.data.batching import MicroBatch
from workbench.training.freezing.cached_prefix import parts
from workbench.training.freezing.freezer import Freezer
from workbench.training.freezing.layer_statistics import GradientSums, Plasticity
from workbench.training.freezing.value_ways import ValueWays


def observers(
    freezer: Freezer, trainable: Mapping[str, nn.Parameter], run: Callable[[], MicroBatch]
) -> dict[str, TrainHook]:
    """The hook that measures for a freezer's policy, by the name of its file in a checkpoint; arguments as below."""
    if freezer.policy.observes == "gradients":
        return {"freezing": GradientCallback(freezer, trainable)}
    if freezer.policy.observes == "values":
        return {"freezing": ValueCallback(freezer, trainable)}
    return {"freezing": ActivationCallback(freezer, run)} if freezer.policy.observes == "activations" else {}


class GradientCallback:
    """Shows a policy the sums of gradients over each interval.

    Args:
        trainable: The values that train, in float32 or wider, by name.
    """

    def __init__(self, freezer: Freezer, trainable: Mapping[str, nn.Parameter]) -> None:
        self._freezer = freezer
        self._sums = GradientSums(freezer.layers, trainable, blocks=len(freezer.blocks))

    def on_gradients(self) -> None:
        """Add them up."""
        self._sums.add()

    def after_step(self, step: int) -> None:
        """At the end of an interval, let the policy see their sums."""
        if step % self._freezer.policy.interval == 0:
            self._freezer.seen += (Observation(step, self._sums.finish()),)

    def state(self) -> dict[str, Tensor]:
        """The sums so far, and what was seen."""
        return {**{f"sum|{name}": each for name, each in self._sums.state().items()}, **_written(self._freezer.seen)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._freezer.seen = _read(state)
        self._sums.load({key.removeprefix("sum|"): each for key, each in state.items() if key.startswith("sum|")})


class ValueCallback:
    """Shows a policy how far the values of each layer went in each interval, and how far they are from their start.

    Args:
        trainable: The values that train, in float32 or wider, by name.
    """

    def __init__(self, freezer: Freezer, trainable: Mapping[str, nn.Parameter]) -> None:
        self._freezer = freezer
        self._ways = ValueWays(freezer.layers, trainable, blocks=len(freezer.blocks))

    def on_gradients(self) -> None:
        """Before the first step, note where the values start."""
        if not self._ways.state():
            self._ways.begin()

    def after_step(self, step: int) -> None:
        """At the end of an interval, let the policy see the ways."""
        if step % self._freezer.policy.interval == 0:
            values = self._ways.finish(self._freezer.plan.trains)
            self._freezer.seen += (Observation(step, values),)

    def state(self) -> dict[str, Tensor]:
        """Samples of the values at the start and at the last interval, and what was seen."""
        return {**{f"way|{name}": each for name, each in self._ways.state().items()}, **_written(self._freezer.seen)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._freezer.seen = _read(state)
        self._ways.load({key.removeprefix("way|"): each for key, each in state.items() if key.startswith("way|")})


class ActivationCallback:
    """Shows a policy how much the outputs of each block changed in each interval.

    Args:
        run: Runs the model on the same few rows each time, without dropout, and gives them.
    """

    def __init__(self, freezer: Freezer, run: Callable[[], MicroBatch]) -> None:
        self._freezer, self._run = freezer, run
        self._plasticity = Plasticity(self._outputs)

    def on_gradients(self) -> None:
        """Before the first step, look for the first time."""
        if not self._plasticity.state():
            self._plasticity.begin()

    def after_step(self, step: int) -> None:
        """At the end of an interval, look again, and let the policy see what changed."""
        if step % self._freezer.policy.interval == 0:
            values = self._plasticity.finish(self._freezer.plan.trains)
            self._freezer.seen += (Observation(step, values),)

    def state(self) -> dict[str, Tensor]:
        """Reference of the next interval, and measurements so far."""
        return {**self._plasticity.state(), **_written(self._freezer.seen)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._freezer.seen = _read(state)
        self._plasticity.load(state)

    def _outputs(self) -> Sequence[Tensor]:
        """Outputs of each block (B, L, D), with zeros at padding."""
        activations: list[Tensor] = []
        handles = [
            block.register_forward_hook(lambda _, __, output: activations.append(parts(output)[0]))
            for block in self._freezer.blocks
        ]
        try:
            batch = self._run()
        finally:
            for handle in handles:
                handle.remove()
        mask_BL = _mask(batch)
        if mask_BL is None:
            return activations
        # A classifier's last block may compute nothing but the first token, which is no padding.
        return [
            each.masked_fill(~mask_BL[..., None], 0) if each.shape[:2] == mask_BL.shape else each
            for each in activations
        ]


def _mask(batch: MicroBatch) -> Tensor | None:
    """Real tokens (B, L) of a model with one stack of blocks; None where no row is padded: pictures, packed rows."""
    if "row_lengths" in batch.inputs:
        return None
    if "attention_mask" in batch.inputs:
        return batch.inputs["attention_mask"].bool()
    if batch.lengths_B is None:
        return None
    ids_BL = batch.inputs["input_ids"]
    return torch.arange(ids_BL.shape[1], device=ids_BL.device) < batch.lengths_B[:, None]


def _written(seen: tuple[Observation, ...]) -> dict[str, Tensor]:
    return {
        "seen|steps": torch.tensor([each.step for each in seen], dtype=torch.int64),
        "seen|values": torch.tensor([each.values for each in seen], dtype=torch.float64),
    }


def _read(state: Mapping[str, Tensor]) -> tuple[Observation, ...]:
    pairs = zip(state["seen|steps"].tolist(), state["seen|values"].tolist(), strict=True)
    return tuple(Observation(step, tuple(values)) for step, values in pairs)
