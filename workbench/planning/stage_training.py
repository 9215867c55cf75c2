"""The training of one stage of a pipeline as a dry run sees it: whole steps, whose micro-batches pass in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from workbench.data.batching import Indices, MicroBatch
from workbench.data.packing import RowLayout
from workbench.planning.dry_trainings import SingleTraining
from workbench.training.distributed.pipeline import Pipelined
from workbench.training.trainer import Trainer


def of(fit: Trainer) -> SingleTraining:
    """The training of one model, or of this process's stage of it."""
    return StageTraining(fit) if isinstance(fit.masters, Pipelined) else SingleTraining(fit)


class StageTraining(SingleTraining):
    """The training of one stage: a trial computes all passes of a step, in the order of training."""

    def __init__(self, fit: Trainer) -> None:
        super().__init__(fit)
        assert isinstance(fit.masters, Pipelined)
        line = fit.masters.line
        alive = -(-line.in_flight // len(line.own))
        self.arrangement: RowLayout = AliveAtOnce(fit.arrangement, alive, lambda: fit.tokens)

    def micro_batches(self) -> Iterator[list[Indices]]:
        """All rows of a step, which the training cuts itself."""
        for parts in super().micro_batches():
            yield [np.concatenate(parts)]


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
