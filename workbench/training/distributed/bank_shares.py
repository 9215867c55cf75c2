"""A bank that processes train together: each holds a share of the frozen backbone and computes a share of the rows.

Adapters are whole in every process, as their optimizers are: they are small beside the backbone, each member has an
optimizer, a schedule and an end of its own, and sums of gradients that are the same bits everywhere keep them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import Indices
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_settings
from workbench.training.distributed.fsdp import ShardedReader
from workbench.training.distributed.row_shares import RowShare, share_rows

T = TypeVar("T")
METHODS = ("lora", "rslora", "lora+")
"""Methods whose members stand in the backbone's own modules; those of others have copies of these."""


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
        "adapter.method": (shared and method not in METHODS, f"{method} in a bank needs weights that are whole"),
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
        if layout_settings.cuts_weights(section):
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
