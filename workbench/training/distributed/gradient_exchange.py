"""How the gradients of processes become one: added up as they are, or as codes of few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config import TrainingSections
from workbench.runs.ranks import Ranks, buckets
from workbench.training.distributed.block_codes import BlockCode
from workbench.training.distributed.compressed_sum import CompressedSum
from workbench.training.distributed.sharding import Sharded
from workbench.training.distributed.wire import Wire, ring_bytes
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.onebit_adam import OneBitAdamW


class GradientExchange:
    """Adds up gradients over processes, and keeps what codes have left out, their residuals (a `TrainHook`).

    A checkpoint holds those of each process. As many processes go on bit for bit; others take even parts of their sum,
    so that nothing is lost; one alone, or a run without compression, or of another kind, leaves them out.
    """

    def __init__(self, config: TrainingSections, masters: MasterWeights | Sharded, ranks: Ranks) -> None:
        self._section, self._masters, self._ranks = config.distributed, masters, ranks
        self._longest = config.train.max_grad_norm
        self._wire = masters.wire if isinstance(masters, Sharded) else Wire()
        self._sums: list[CompressedSum] = []
        """One for each bucket, from the first step that is compressed."""
        self._saved: Mapping[str, Tensor] = {}
        """Residuals of a checkpoint, until then."""
        self._optimizer: OneBitAdamW | None = None

    @property
    def hooks(self) -> dict[str, TrainHook]:
        """This, by the name of its file in a checkpoint, where something may wait."""
        waits = self._section.compression.gradients != "none" and not isinstance(self._masters, Sharded)
        return {"compression": self} if waits else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the step by their names in metrics.jsonl."""
        return {"sent_bytes": self._wire.sent} if self._section.compression.is_on else {}

    def begin(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of a step (from 0)."""
        on = self._section.compression.is_on and not self._ranks.alone
        self._wire.compressing = on and step >= self._section.compression.warm_up
        self._wire.sent = 0
        self._optimizer = optimizer if isinstance(optimizer, OneBitAdamW) and self._wire.compressing else None
        if isinstance(optimizer, OneBitAdamW):
            optimizer.frozen = self._wire.compressing

    def add_up(self, loss: Tensor) -> None:
        """Replace the loss, and the gradients where no sharded engine has done so, by their sums over all processes.

        With 1-bit Adam gradients become momenta, of which each process clips its part before: by the root mean square
        of the norms of its gradients and the others', which is no less than the norm of their mean.
        """
        tensors = [loss]
        if not isinstance(self._masters, Sharded) and not self._ranks.alone:
            for master in self._masters:
                if master.requires_grad and master.grad is None:  # no token went to this expert here
                    master.grad = torch.zeros_like(master)
            if self._wire.compressing:
                self._compress()
            else:
                tensors += [master.grad for master in self._masters if master.grad is not None]
            self._wire.sent += sum(ring_bytes(tensor.nbytes, self._ranks.world) for tensor in tensors)
        self._ranks.add_up(tensors, bucket_bytes=self._section.bucket_bytes)

    @torch.no_grad()
    def _compress(self) -> None:
        trained = buckets([each for each in self._masters if each.requires_grad], self._section.bucket_bytes)
        if not self._sums:
            self._make_sums(trained)
        scale = 1.0 if self._optimizer is None else self._clipping()
        for bucket, compressed in zip(trained, self._sums, strict=True):
            summed_N = compressed(self._contribution(each, scale) for each in bucket)
            for master, part in zip(bucket, summed_N.split([each.numel() for each in bucket]), strict=True):
                assert master.grad is not None
                master.grad.copy_(part.view_as(master))
            self._wire.sent += compressed.sent_bytes

    def _contribution(self, master: nn.Parameter, scale: Tensor | float) -> Tensor:
        """Gradient of a parameter in this process, or its part of the mean momentum."""
        assert master.grad is not None
        if self._optimizer is None:
            return master.grad
        world = self._ranks.world
        return self._optimizer.momentum(master, master.grad * (world * scale)) / world

    def _clipping(self) -> Tensor:
        """The factor on the gradients of each process; a process's gradient is as many times its share of the mean."""
        norms = [master.grad.norm() for master in self._masters if master.grad is not None]
        squared = torch.stack(norms).square().sum()
        self._ranks.add_up([squared], bucket_bytes=squared.nbytes)
        return (self._longest / (squared * self._ranks.world).sqrt()).clamp_max_(1.0)

    def _make_sums(self, trained: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the sums of buckets, with the residuals of a checkpoint."""
        kind = self._section.compression.gradients
        assert kind != "none"
        code, counts = BlockCode(kind, self._section.compression.block), [_count(bucket) for bucket in trained]
        self._sums = [
            CompressedSum(count, code, self._ranks, bucket[0].device)
            for count, bucket in zip(counts, trained, strict=True)
        ]
        waiting_WN = [value for key, value in sorted(self._saved.items()) if key.startswith(self._own(""))]
        if not waiting_WN:
            return
        same = len(waiting_WN) == self._ranks.world
        own_N = self._saved[self._own(self._ranks.rank)] if same else torch.stack(waiting_WN).sum(0) / self._ranks.world
        parts = zip(self._sums, own_N.split(counts), self._saved[self._summed].split(counts), strict=True)
        for compressed, waiting_N, sum_N in parts:
            compressed.load(waiting_N, sum_N)
        self._saved = {}

    def on_gradients(self) -> None:
        """Do nothing: they are added up by now."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Tensor]:
        """Residuals of each process, and of the sum, as vectors of all trained values; in the first process."""
        if not self._sums:
            return dict(self._saved)
        own_N = torch.cat([each.waiting_N[: each.count] for each in self._sums])
        waiting_WN = [torch.empty_like(own_N) for _ in range(self._ranks.world)]
        dist.gather(own_N, waiting_WN if self._ranks.first else None)
        sum_N = torch.cat([each.gathered_shards() for each in self._sums])
        return {**{self._own(rank): each for rank, each in enumerate(waiting_WN)}, self._summed: sum_N}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with these residuals, from the next step that is compressed."""
        self._sums, self._saved = [], state

    def _own(self, rank: int | str) -> str:
        """Name of the residual of a process; those of momenta are none of gradients."""
        return f"{self._section.compression.gradients} process {rank}"

    @property
    def _summed(self) -> str:
        return f"{self._section.compression.gradients} sum"


def _count(bucket: Sequence[nn.Parameter]) -> int:
    return sum(each.numel() for each in bucket)
