"""How the gradients of processes become one: added up as they are, or compressed by DDP's communication hooks.

Vogels et al. 2019 (PowerSGD), arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from workbench.adapters.method import TrainHook
from workbench.config import TrainingSections
from workbench.runs.ranks import Ranks
from workbench.training.distributed.sharding import Sharded
from workbench.training.master_weights import MasterWeights

MEBIBYTE = 2**20
_MATRICES = ("p_memory_dict", "q_memory_dict")


class GradientExchange:
    """Adds up gradients over processes once a step, and keeps what PowerSGD has left out (a `TrainHook`).

    A checkpoint holds what it has left out in each process. As many processes go on bit for bit; others take even
    parts of its sum; one alone, or a run without PowerSGD, leaves it out.
    """

    def __init__(self, config: TrainingSections, masters: MasterWeights | Sharded, ranks: Ranks) -> None:
        self._section, self._masters, self._ranks = config.distributed, masters, ranks
        self._compresses = self._section.compression.gradients != "none" and not isinstance(masters, Sharded)
        self._reducer: DistributedDataParallel | None = None
        self._power: PowerSGDState | None = None
        self._saved: Mapping[str, Tensor] = {}
        """State of a checkpoint, until the first step."""

    @property
    def hooks(self) -> dict[str, TrainHook]:
        """This, by the name of its file in a checkpoint, where it keeps something."""
        return {"compression": self} if self._compresses and self._section.compression.gradients == "powersgd" else {}

    def add_up(self, loss: Tensor) -> None:
        """Replace the loss, and the gradients where no sharded engine has done so, by their sums over all processes."""
        tensors = [loss]
        if not isinstance(self._masters, Sharded) and not self._ranks.alone:
            for master in self._masters:
                if master.requires_grad and master.grad is None:  # no token went to this expert here
                    master.grad = torch.zeros_like(master)
            if self._compresses:
                self._compress()
            else:
                tensors += [master.grad for master in self._masters if master.grad is not None]
        self._ranks.add_up(tensors, bucket_bytes=self._section.bucket_bytes)

    def _compress(self) -> None:
        """Let DDP reduce the gradients, as if they came out of a backward pass of its own."""
        trained = [each for each in self._masters if each.requires_grad]
        gradients = [each.grad for each in trained]
        self._reducer = self._reducer or self._begin(trained)
        for each in trained:
            each.grad = None
        self._reducer(gradients).backward()
        torch._foreach_mul_([each.grad for each in trained if each.grad is not None], self._ranks.world)  # DDP's mean

    def _begin(self, trained: Sequence[nn.Parameter]) -> DistributedDataParallel:
        section = self._section.compression
        # Of several buckets, gloo would run the sums of PowerSGD's second matrices in another order in each process.
        together = sum(each.nbytes for each in trained) + MEBIBYTE
        size = together if section.gradients == "powersgd" else self._section.bucket_bytes
        reducer = DistributedDataParallel(_KnownGradients(trained), bucket_cap_mb=size / MEBIBYTE, init_sync=False)
        for _ in range(2):  # before its second pass DDP lays out its buckets for good: a checkpoint's fit them
            for each in trained:
                each.grad = None
            reducer([torch.zeros_like(each) for each in trained]).backward()
        if section.gradients == "powersgd":
            self._power = PowerSGDState(None, section.rank, section.warm_up)
            self._restore(self._power, trained[0].device)
            reducer.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
        else:
            half = section.gradients == "bfloat16"
            cast = default_hooks.bf16_compress_hook if half else default_hooks.fp16_compress_hook
            reducer.register_comm_hook(None, cast)
        return reducer

    def _restore(self, power: PowerSGDState, device: torch.device) -> None:
        """Go on as a checkpoint says."""
        power.iter = int(self._saved.get("step", 0))
        buckets = {key.rpartition(" ")[2] for key in self._saved} - {"step"}
        for bucket in buckets:
            left = [value for key, value in sorted(self._saved.items()) if key.endswith(f"left out, bucket {bucket}")]
            own = left[self._ranks.rank] if len(left) == self._ranks.world else torch.stack(left).mean(0)
            power.error_dict[int(bucket)] = own.to(device, copy=True)  # aligned
            for name in _MATRICES:
                getattr(power, name)[int(bucket)] = self._saved[f"{name} {bucket}"].to(device, copy=True)
        self._saved = {}

    def on_gradients(self) -> None:
        """Do nothing: they are added up by now."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Tensor]:
        """PowerSGD's, with what each process has left out; in the first process."""
        if self._power is None:
            return dict(self._saved)
        state = {"step": torch.tensor(self._power.iter)}
        for bucket, left in self._power.error_dict.items():
            by_rank = [torch.empty_like(left) for _ in range(self._ranks.world)]
            dist.gather(left, by_rank if self._ranks.first else None)
            state |= {f"process {rank:05} left out, bucket {bucket}": each for rank, each in enumerate(by_rank)}
            state |= {f"{name} {bucket}": getattr(self._power, name)[bucket] for name in _MATRICES}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with this, from the next step."""
        self._saved, self._reducer, self._power = state, None, None


class _KnownGradients(nn.Module):
    """Parameters whose gradients are known: its output's backward pass gives each its own."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(trained)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        given: Tensor = _GiveGradients.apply(gradients, *self.trained)  # type: ignore[no-untyped-call]
        return given


class _GiveGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *trained: Tensor) -> Tensor:
        ctx.gradients = gradients
        return trained[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
