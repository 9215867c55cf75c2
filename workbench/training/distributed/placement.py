"""Where the weights, gradients and optimizer states of a run live: whole in every process, or a share in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.data.packing import RowLayout
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.run_directory import Run
from workbench.training.distributed import sequence, sharding, tensor_parallel, zero_offload
from workbench.training.distributed.fsdp import FullySharded, ShardedReader
from workbench.training.distributed.pipeline import Pipelined, Stages
from workbench.training.distributed.sharding import Loss, Sharded, Trainable
from workbench.training.distributed.tensor_parallel import TensorParallel
from workbench.training.distributed.zero import ZeroParameters

T = TypeVar("T")


class Reading(Protocol):
    """Does work that reads a model."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Result of `work`."""


@dataclass(frozen=True)
class Placement:
    """The layout of one run over the processes that train it."""

    config: DistributedConfig
    ranks: Ranks

    @property
    def cuts_weights(self) -> bool:
        """Whether a process holds a share of each weight: a backbone is loaded on the host then, and cut later."""
        return zero_offload.cuts_weights(self.config)

    @property
    def keeps_weights(self) -> bool:
        """Whether a layer may keep its plain weight for the backward pass: DeepSpeed puts another in its place."""
        return not self.cuts_weights or self.config.engine == "fsdp2" or self.config.pipeline > 1

    @property
    def groups(self) -> Ranks:
        """The groups of processes that deal the rows of a step among them, each row to all processes of one."""
        return sharding.dealt(self.config, self.ranks)

    @property
    def dealt(self) -> Ranks:
        """The processes that whole trainings are dealt to; none where all share each of them."""
        return ALONE if self.config.sharded else self.ranks

    def own(self, run: Run, name: str) -> Run:
        """The directory inside a run of one of several trainings, which this process alone has, or all share."""
        return run.child(name) if self.config.sharded else run.own(name)

    @property
    def waiting(self) -> bool:
        """Whether the weights of a model wait on the host, block by block, for the processes that cut them."""
        return self.cuts_weights

    @property
    def probes(self) -> bool:
        """Whether this process alone looks at a backbone before training: the first does that holds all of it."""
        return self.ranks.first and not self.cuts_weights

    @property
    def scores(self) -> bool:
        """Whether this process scores: the first does, or all of those that share weights."""
        return self.ranks.first or self.cuts_weights

    def arranged(self, whole: RowLayout) -> RowLayout:
        """An arrangement of what this process computes of each row."""
        return sequence.arranged(whole, sequence.group(self.config, self.ranks))

    def within(self, loss: Loss) -> Loss:
        """A loss of rows so arranged."""
        return sequence.within(loss, sequence.group(self.config, self.ranks))

    def reading(self, model: nn.Module) -> Reading:
        """For a model in evaluation mode: processes that would share its weights in training cut and read it together.

        Where they do not, work is just done.
        """
        if self.config.pipeline > 1:
            return Stages(model, self.config, self.ranks).read
        if self.config.tensor > 1:
            tensor_parallel.cut(model, self.config, self.ranks)
            return _called
        return ShardedReader(model, self.config, self.ranks) if self.cuts_weights else _called

    def unread(self, load: Callable[[], T], read: Callable[[T], bool]) -> T:
        """A loaded model, after `read` has looked at it; loaded once more where processes had to cut it for that.

        Args:
            read: Returns whether it did look.
        """
        loaded = load()
        if read(loaded) and self.cuts_weights:
            del loaded  # before there are two
            loaded = load()
        return loaded

    def whole(self, model: T) -> T | None:
        """A model that `reading` has read, where this process still holds all of it."""
        return None if self.cuts_weights else model

    def shared(self, whole: Trainable, *, sample: Callable[[], MicroBatch]) -> Sharded | None:
        """Trainable parameters in shares of DeepSpeed, FSDP2 or a group; None where every process holds all of them.

        Args:
            sample: Rows that the model may be called with.
        """
        if self.config.pipeline > 1:
            return Pipelined(whole)
        if self.config.tensor > 1:
            return TensorParallel(whole)
        if not self.config.sharded:
            return None
        return FullySharded(whole) if self.config.engine == "fsdp2" else ZeroParameters(whole, sample=sample)


WHOLE = Placement(DistributedConfig(), ALONE)
"""One process, which holds everything."""


def _called(work: Callable[[], T]) -> T:
    return work()
