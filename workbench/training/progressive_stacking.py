"""Progressive stacking: the first blocks train alone, and are stacked to all blocks of the backbone during the run.

Block i becomes a copy of block i mod k, where k blocks trained before (Gong et al. 2019, ICML, algorithm 1; Du et al.
2024, arXiv:2405.15319, who call it G_stack). Embeddings, final norm and head stay as they are. The optimizer state is
reset, and the learning rate follows its schedule, as in the paper's own runs. Until they are stacked, blocks return
their input: they are not computed and have neither gradients nor optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters.method import TrainHook
from workbench.config.sections.grow_config import GrowConfig
from workbench.errors import BackboneError, ConfigError, TrainingError
from workbench.models import classifier, forward_hooks
from workbench.training import early_stopping, layer_and_token_drop
from workbench.training.adapter_trainer import AdapterTrainer
from workbench.training.checkpoints import Checkpointed


class TrainedValues(Protocol):
    """The values that train, and their copies that compute."""

    def named(self) -> dict[str, nn.Parameter]:
        """Each by its name."""

    def computing(self) -> dict[str, nn.Parameter]:
        """Parameters that the model multiplies with, by the same names."""


class ProgressiveStacking(Checkpointed):
    """Decides how many blocks of a backbone compute and train, and stacks them."""

    def __init__(
        self, backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: GrowConfig, values: TrainedValues
    ) -> None:
        self._backbone, self._blocks, self._config = backbone, blocks, config
        self._values = values
        self._more: list[tuple[Any, ...] | None] = []
        self._computed = len(blocks)
        """Blocks that compute now."""
        self._trained: int | None = None
        """Blocks that train; None before the first step."""
        self._stackings: list[tuple[int, int]] = []
        """Optimizer steps done, and blocks from then on."""

    @property
    def hooks(self) -> dict[str, TrainHook]:
        """Itself where it has a state, by the name of its file in a checkpoint."""
        return {"stacking": self} if self._config.is_on else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Blocks that train, for metrics.jsonl; empty where it is off."""
        return {"blocks": self._computed} if self._config.is_on else {}

    def install(self) -> None:
        """Reroute the calls of blocks that are stacked later through this; nothing where it is off.

        Raises:
            BackboneError: One of them cannot be skipped.
        """
        if not self._config.is_on:
            return
        classifier.widen_last_block(
            self._backbone
        )  # at first another block is the last one, and has to return every token
        calls = layer_and_token_drop.survey(self._backbone, self._blocks)
        first = self._depth(0, 0.0)
        if not all(each.adds for each in calls[first:]):
            raise BackboneError(
                f"{type(self._backbone).__name__} has blocks that give something else than hidden states of the shape "
                "that they get, so that none can be left out before it grows. Leave grow out."
            )
        self._more = [each.more for each in calls]
        for number in range(first, len(self._blocks)):
            forward_hooks.reroute(self._blocks[number], partial(self._forward, number, self._blocks[number].forward))

    @contextmanager
    def during(self, step: int, share: float) -> Iterator[None]:
        """Inside, as many blocks compute as in step `step` (from 0), after a share of the run."""
        before = self._computed
        self._computed = self._depth(step, share)
        try:
            yield
        finally:
            self._computed = before

    def follow(self, member: AdapterTrainer, say: Callable[[str], None]) -> None:
        """Before a step: stack the blocks where it is due, and let all of them train.

        Raises:
            ConfigError: The run is too short to reach its last stacking.
        """
        if not self._config.is_on:
            return
        wanted, before = self._depth(member.progress.step, member.progress.share), self._trained
        if wanted == before:
            return
        if before is None:
            last, steps = self._config.at[-1], member.total
            if member.task.config.budget.unlimited and last > (steps - 1) / steps:
                raise ConfigError(
                    f"grow.at={list(self._config.at)}: of {steps} steps none begins after {last:g} of the run. "
                    f"Write grow.at=[{(steps // 2) / steps:.2g}], or more steps."
                    if steps > 1
                    else "grow needs several steps, and this run has one. Leave grow out."
                )
        else:
            self._stack(before, wanted)
            member.optimizer.state.clear()
            member.progress = early_stopping.without_history(member.progress)
            member.loss_guard.clear()
            self._stackings.append((member.progress.step, wanted))
            say(f"Stacked {before} blocks to {wanted}, after step {member.progress.step}.")
        self._train(wanted)
        written = [{"step": step, "blocks": blocks} for step, blocks in self._stackings]
        member.task.run.note(grow={"first": self._depth(0, 0.0), "stackings": written})

    def require_grown(self) -> None:
        """Raise TrainingError where a run ended before all blocks were stacked."""
        if self._config.is_on and self._trained != len(self._blocks):
            raise TrainingError(
                f"The run ended with {self._trained} of {len(self._blocks)} blocks, before "
                f"grow.at={list(self._config.at)} of it was done. Write earlier shares, or a larger budget."
            )

    def state(self) -> dict[str, Tensor]:
        """Steps and numbers of blocks of all stackings so far, for a checkpoint."""
        return {"stackings": torch.tensor(self._stackings, dtype=torch.int64).view(-1, 2)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._stackings = [(step, blocks) for step, blocks in state["stackings"].tolist()]
        self._train(self._stackings[-1][1] if self._stackings else self._depth(0, 0.0))

    def _depth(self, step: int, share: float) -> int:
        return self._config.depth(step, share, blocks=len(self._blocks)) if self._config.is_on else len(self._blocks)

    def _train(self, blocks: int) -> None:
        """Let the first blocks compute and train, and no others."""
        self._trained = self._computed = blocks
        masters = self._masters()
        for number, block in enumerate(self._blocks):
            for parameter in block.parameters():
                if id(parameter) in masters:
                    parameter.requires_grad_(number < blocks)
                    masters[id(parameter)].requires_grad_(number < blocks)

    @torch.no_grad()
    def _stack(self, before: int, after: int) -> None:
        """Make each block from number `before` on a copy of the one `before` blocks below it."""
        masters = self._masters()
        for number in range(before, after):
            source, block = self._blocks[number % before], self._blocks[number]
            block.load_state_dict(source.state_dict())
            for from_, to in zip(source.parameters(), block.parameters(), strict=True):
                masters[id(to)].copy_(masters[id(from_)])

    def _masters(self) -> Mapping[int, nn.Parameter]:
        """Master of each parameter that computes, by its identity."""
        named = self._values.named()
        return {id(parameter): named[name] for name, parameter in self._values.computing().items()}

    def _forward(self, number: int, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if number < self._computed:
            return own(*arguments, **named)
        return layer_and_token_drop.skipped(forward_hooks.hidden_of(arguments, named), self._more[number])


def require(config: GrowConfig, blocks: Sequence[nn.Module]) -> None:
    """Raise ConfigError where blocks cannot be stacked: too few, or of different shapes."""
    if not config.is_on:
        return
    if reason := config.refusal(len(blocks)):
        raise ConfigError(reason)
    shapes = [{name: value.shape for name, value in block.state_dict().items()} for block in blocks]
    first = config.depth(0, 0.0, blocks=len(blocks))
    for number in range(first, len(blocks)):
        if shapes[number] != shapes[number % first]:
            raise ConfigError(
                f"grow copies block {number % first + 1} to block {number + 1} of this backbone, and their weights "
                "have other names or shapes. Leave grow out, or take a backbone whose blocks are alike."
            )
