"""Processes that share the rows of a step: which rows each computes, and a bank of adapters that they train together.

Adapters of a bank are whole in every process, as their optimizers are: they are small beside the backbone, each member
has an optimizer, a schedule and an end of its own, and sums of gradients that are the same bits everywhere keep them
equal. Each process holds a shard of the frozen backbone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import Indices
from workbench.data.packing import RowLayout
from workbench.errors import Stopped
from workbench.runs.ranks import Ranks
from workbench.training.callbacks import Callback
from workbench.training.distributed import zero_offload
from workbench.training.distributed.fsdp import ShardedReader

T = TypeVar("T")
LOOK = 0.2
"""Seconds between two looks."""


class RowShare(NamedTuple):
    """Rows of one forward pass."""

    rows: Indices
    counts: bool = True
    """Whether they carry loss; others keep a process in step with those that have one more."""


def own_rows(lengths: Indices, ranks: Ranks) -> Indices:
    """Rows of a set that this process reads: each process gets as many, give or take one, and as long ones.

    Args:
        lengths: Tokens of every row.
    """
    own: Indices = np.sort(np.argsort(lengths, kind="stable")[ranks.rank :: ranks.world])
    return own


def share_rows(
    rows: Indices, lengths: Indices, arrangement: RowLayout, *, tokens: int, ranks: Ranks, in_step: bool
) -> list[RowShare]:
    """The micro-batches of a global batch that this process computes; all processes cut it alike.

    Args:
        lengths: Tokens of every example.
        arrangement: How the rows of a micro-batch are laid out.
        tokens: In a micro-batch at most.
        in_step: All processes must do the same number of forward passes.
    """
    parts = list(arrangement.cut(rows, lengths, tokens=tokens))
    while len(parts) % ranks.world and max(map(len, parts)) > 1:
        # Everybody gets as many where that is possible: the one with most tokens is the one to halve.
        widest = max((part for part in parts if len(part) > 1), key=lambda part: arrangement.tokens(lengths[part]))
        place = next(number for number, part in enumerate(parts) if part is widest)
        half = (len(widest) + 1) // 2
        parts[place : place + 1] = [widest[:half], widest[half:]]
    own = [RowShare(part) for part in parts[ranks.rank :: ranks.world]]
    missing = -(-len(parts) // ranks.world) - len(own) if in_step else 0
    return [*own, *(RowShare(parts[-1][-1:], counts=False) for _ in range(missing))]


def wait_for_ranks(done: Callable[[], bool], callback: Callback) -> None:
    """Return when `done` holds; unlike a process that waits in a collective, this one can be asked to stop.

    Raises:
        Stopped: the callback asked for it.
    """
    while not done():
        if callback.stop_requested():
            raise Stopped("Stopped while other processes train; all of this one's members are saved.")
        time.sleep(LOOK)


def refusals(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """Whether a setting keeps processes from training a bank over shares of its backbone, and why, by its key."""
    section, method = config.distributed, config.adapter.method
    shared = section.sharded and section.engine == "fsdp2"
    return {
        "distributed.engine": (
            section.sharded and not shared,
            "DeepSpeed steps one optimizer, and each member has its own; engine=fsdp2 trains them together",
        ),
        "distributed.offload_parameters": (shared and section.offload_parameters != "none", "not tried with a bank"),
        "adapter.method": (
            shared and not config.adapter.facts.plain_lora,
            f"{method} in a bank needs weights that are whole",
        ),
    }


class BankShares:
    """This process's part of a bank's model and of its rows: all, where it trains alone.

    Args:
        model: Of the bank, its members' parameters trainable; the others are cut where `section` says so.
        ranks: The processes that train all members together.
    """

    def __init__(self, model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
        self._section, self.ranks = section, ranks
        self._shared: ShardedReader | None = None
        if zero_offload.cuts_weights(section):
            trained = [each for each in model.parameters() if each.requires_grad]
            self._shared = ShardedReader(model, section, ranks, apart=trained)

    def forward(self, work: Callable[[], T]) -> T:
        """Result of `work`, a forward pass in training; all processes do as many."""
        return work() if self._shared is None else self._shared.forward(work)

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work`, which reads the model in all processes together, of the first one."""
        return self.ranks.agreed(work() if self._shared is None else self._shared(work))

    def cut(self, rows: Indices, lengths: Indices, arrangement: RowLayout, *, tokens: int) -> list[RowShare]:
        """Micro-batches of this process, as many as every other one has; see `share_rows`."""
        return share_rows(rows, lengths, arrangement, tokens=tokens, ranks=self.ranks, in_step=True)

    @torch.no_grad()
    def add_up(self, losses: Tensor, trained: Collection[nn.Parameter]) -> None:
        """Replace losses and gradients of a step by their sums over the processes that computed its rows."""
        if self.ranks.alone:
            return
        for parameter in trained:
            if parameter.grad is None:  # none of its member's rows were computed here
                parameter.grad = torch.zeros_like(parameter)
        gradients = [each.grad for each in trained if each.grad is not None]
        self.ranks.add_up([losses, *gradients], bucket_bytes=self._section.bucket_bytes)
