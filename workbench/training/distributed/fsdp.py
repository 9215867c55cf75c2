"""Steps that torch's FSDP2 takes: each process holds a share of every tensor, and a whole block while it computes.

Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.models import backbones
from workbench.models.weight_formats import HALVES
from workbench.runs.ranks import Ranks
from workbench.training.distributed.sharding import TorchSharded, Trainable, place_model

T = TypeVar("T")
_REDUCED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precision in which gradients travel, by `compression.gradients`."""


class ShardedReader:
    """A model that processes read together: each holds a share, and a block whole while that computes.

    Args:
        model: What is outside of its blocks is whole as long as a pass goes on.
        section: The stage, and what is offloaded to the host.
        compute: Precision of matrix products; None: that of the stored weights.
        auxiliary: A module that trains with the model.
        apart: Parameters that stay whole in each process.
    """

    def __init__(
        self,
        model: nn.Module,
        section: DistributedConfig,
        ranks: Ranks,
        *,
        compute: torch.dtype | None = None,
        auxiliary: nn.Module | None = None,
        apart: Collection[nn.Parameter] = (),
    ) -> None:
        device = backbones.device()
        _connect()
        options: dict[str, Any] = {
            "mesh": _mesh(section, ranks),
            "reshard_after_forward": section.zero != 2,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute if compute in HALVES else None,
                reduce_dtype=_REDUCED.get(section.compression.gradients, torch.float32),
                cast_forward_inputs=False,
            ),
            "offload_policy": _offloading(section, device),
        }
        self.module, stay = _Called(model, auxiliary), set(apart)
        for part in place_model(self.module, ranks):  # masters are never here for more than one block
            whole = [each for each in part.parameters() if not isinstance(each, DTensor) and each not in stay]
            for parameter in whole:
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            fully_shard(part, **options, ignored_params=stay)
            for parameter in whole:  # others stand in their places, and somebody may know them still
                parameter.data = parameter.data.new_empty(0)

    def forward(self, work: Callable[[], T]) -> T:
        """Call `work`, a forward pass, in all processes together; the backward pass comes after it."""
        result: T = self.module(work)
        return result

    def __call__(self, work: Callable[[], T]) -> T:
        """Call `work`, which reads the model, in all processes together; the model's shares are released afterwards."""
        result = self.forward(work)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return result


class FullySharded(TorchSharded):
    """The trainable parameters of a model that FSDP2 cuts, frozen ones too."""

    def __init__(self, whole: Trainable) -> None:
        self._loss, section = whole.loss, whole.config.distributed
        self._shared = ShardedReader(
            whole.model, section, whole.ranks, compute=whole.compute, auxiliary=whole.auxiliary
        )
        super().__init__(whole)

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The loss, with a graph."""
        # FSDP2 takes the mean over processes.
        return self._shared.forward(lambda: self._loss(batch, scale * self._ranks.world))

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work`, with the modules outside of blocks gathered meanwhile."""
        return self._shared(work)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of all processes."""
        total_norm = nn.utils.clip_grad_norm_(list(self._named.values()), max_norm)
        return total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm


class _Called(nn.Module):
    """Does any work with a model as one pass, whose beginning and end FSDP2 sees."""

    def __init__(self, model: nn.Module, auxiliary: nn.Module | None) -> None:
        super().__init__()
        self.model, self.auxiliary = model, auxiliary

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def _mesh(section: DistributedConfig, ranks: Ranks) -> DeviceMesh:
    """Processes that share weights; of several copies, neighbours share one, as they are on one machine."""
    kind, copies = backbones.device().type, section.replicas
    if copies == 1:
        return init_device_mesh(kind, (ranks.world,))
    return init_device_mesh(kind, (copies, ranks.world // copies), mesh_dim_names=("replicas", "shares"))


def _connect() -> None:
    """One process can leave things on the host, too."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _offloading(section: DistributedConfig, device: torch.device) -> OffloadPolicy:
    wanted = section.offload_parameters == "cpu" and device.type != "cpu"
    return CPUOffloadPolicy() if wanted else OffloadPolicy()
