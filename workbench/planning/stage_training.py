"""The training of one stage of a pipeline as a dry run sees it: whole steps, whose micro-batches pass in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workbench.data.batching import Indices, MicroBatch
from workbench.data.packing import RowLayout
from workbench.models import backbones
from workbench.planning.dry_trainings import SingleTraining
from workbench.training.distributed.pipeline import Pipelined, Stages
from workbench.training.trainer import Trainer


def of(fit: Trainer) -> SingleTraining:
    """The training of one model, or of this process's stage of it."""
    return StageTraining(fit) if isinstance(fit.masters, Pipelined) else SingleTraining(fit)


class StageTraining(SingleTraining):
    """The training of one stage: a trial computes all passes of a step, in the order of training."""

    def __init__(self, fit: Trainer) -> None:
        super().__init__(fit)
        assert isinstance(fit.masters, Pipelined)
        self._training, self._stages = fit.masters, fit.masters.stages
        self._training.carry_out = self._carried_out
        self._buffers: list[Tensor] = []
        self._compute = fit.compute
        alive = -(-in_flight(self._stages) // len(self._stages.own))
        self.arrangement: RowLayout = AliveAtOnce(fit.arrangement, alive, lambda: fit.tokens)

    def micro_batches(self) -> Iterator[list[Indices]]:
        """All rows of a step, which the training cuts itself."""
        for parts in super().micro_batches():
            yield [np.concatenate(parts)]

    def _carried_out(self, count: int, tokens: int) -> list[Tensor]:
        """As much as the fullest moment of a step holds, where nobody sends anything; returns the losses."""
        stages, training = self._stages, self._training
        received = partial(torch.empty, 1, tokens, stages.width, dtype=self._compute, device=backbones.device())
        if not self._buffers:  # torch's, for what arrives of each micro-batch in both directions
            ways = sum((stage > 0) + (stage < len(stages.holders) - 1) for stage in stages.own)
            self._buffers = [received() for _ in range(ways * count)]
        losses, live = list[Tensor](), list[tuple[int, Tensor]]()

        def finish() -> None:
            number, output = live.pop(0)
            if output.requires_grad:
                with training.passing(number, False):
                    output.backward(None if output.ndim == 0 else torch.empty_like(output))

        for number, stage in itertools.product(range(count), stages.own):
            if len(live) == in_flight(stages):
                finish()
            hidden = training.compute(stage, number, received(requires_grad=True) if stage > 0 else None)
            live.append((number, hidden))
            losses += [hidden.detach()] if hidden.ndim == 0 else []
        while live:
            finish()
        return losses


def in_flight(stages: Stages) -> int:
    """Passes of a stage between whose forward and backward there may be others, in a step of many."""
    if stages.schedule == "1f1b":
        return stages.size - stages.place
    return (
        2 * stages.size if stages.schedule == "zero_bubble" else stages.size + 2 * (stages.size - 1 - stages.place) + 1
    )


class AliveAtOnce(RowLayout):
    """The rows of steps, of whose micro-batches a stage keeps so many alive at once."""

    def __init__(self, micro: RowLayout, alive: int, tokens: Callable[[], int]) -> None:
        self._micro, self._alive, self._tokens = micro, alive, tokens

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro-batch lie one after another."""
        return self._micro.packed

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Micro-batches of at most `tokens` each."""
        return self._micro.cut(indices, lengths, tokens=tokens)

    def tokens(self, lengths_B: Indices) -> int:
        """Those of the micro-batches that are alive at once, at most."""
        return self._most(lengths_B, lambda part: max(self._tokens(), self._micro.tokens(part)))

    def pairs(self, lengths_B: Indices) -> int:
        """Those of the micro-batches that are alive at once, at most."""
        return self._most(lengths_B, self._micro.pairs)

    def lay(self, padded: MicroBatch) -> MicroBatch:
        """The rows of a micro-batch."""
        return self._micro.lay(padded)

    def _most(self, lengths_B: Indices, count: Callable[[Indices], int]) -> int:
        parts = self._micro.cut(np.arange(len(lengths_B)), lengths_B, tokens=self._tokens())
        counts = [count(lengths_B[part]) for part in parts]
        return max(sum(counts[start : start + self._alive]) for start in range(len(counts)))
