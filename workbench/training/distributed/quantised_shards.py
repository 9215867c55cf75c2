"""Codes for what FSDP2 gathers and scatters: qwZ and qgZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209).

Its hpZ, a second copy of weights inside a machine, is `distributed.replicas`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from workbench.config.sections.compression_config import CompressionConfig
from workbench.errors import TrainingError
from workbench.training.distributed.block_codes import BlockCode
from workbench.training.distributed.wire import Wire


def install(module: nn.Module, section: CompressionConfig, wire: Wire) -> None:
    """Let what FSDP2 sends of a module and its blocks travel as codes, in the steps in which `wire` says so."""
    code = BlockCode("int8", section.block)
    gather, scatter = (QuantisedAllGather(code, wire), QuantisedReduceScatter(code, wire))
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(gather if section.weights == "int8" else CountedAllGather(wire))
            each.set_custom_reduce_scatter(scatter if section.gradients == "int8" else CountedReduceScatter(wire))


class CountedAllGather(DefaultAllGather):
    """torch's own, whose bytes are counted."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the shards of a group of processes."""
        self._wire.sent += (group.size() - 1) * input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


class QuantisedAllGather(CountedAllGather):
    """Weights as every process decodes them, the owner of a shard, too; its masters are exact."""

    def __init__(self, code: BlockCode, wire: Wire) -> None:
        super().__init__(wire)
        self._code = code

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the shards of a group of processes."""
        if not input_tensor.is_floating_point():
            raise TrainingError(
                "distributed.compression.weights=int8 is of weights of one precision, and this model has several."
                "\n  Write model.weights and model.compute alike, such as bfloat16, or leave it out."
            )
        if not self._wire.compressing:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        codes_B = _encoded(input_tensor[None], self._code)[0]
        codes_WB = codes_B.new_empty(group.size(), len(codes_B))
        dist.all_gather_into_tensor(codes_WB.view(-1), codes_B, group=group)
        for shard, shard_codes_B in zip(output_tensor.view(group.size(), -1), codes_WB, strict=True):
            shard.copy_(_decoded(shard_codes_B, input_tensor.numel(), self._code))
        self._wire.sent += (group.size() - 1) * codes_B.nbytes
        return None


class CountedReduceScatter(DefaultReduceScatter):
    """torch's own, whose bytes are counted."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce what the processes of a group have of each shard."""
        self._wire.sent += (group.size() - 1) * output_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class QuantisedReduceScatter(CountedReduceScatter):
    """Gradients that are sent as codes once, and added up in float32."""

    def __init__(self, code: BlockCode, wire: Wire) -> None:
        super().__init__(wire)
        self._code = code

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce what the processes of a group have of each shard."""
        if not self._wire.compressing:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"{op} of gradients"
        codes_WB = _encoded(input_tensor.view(group.size(), -1), self._code)
        received_WB = torch.empty_like(codes_WB)
        dist.all_to_all_single(received_WB, codes_WB, group=group)
        output_tensor.zero_()
        for codes_B in received_WB:
            output_tensor += _decoded(codes_B, output_tensor.numel(), self._code)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()
        self._wire.sent += (group.size() - 1) * codes_WB[0].nbytes
        return None


def _encoded(values_CN: Tensor, code: BlockCode) -> Tensor:
    """Codes (C, B), of values whose last block is filled with zeros."""
    return code.encode(F.pad(values_CN.float(), (0, -values_CN.shape[1] % code.block)))


def _decoded(codes_B: Tensor, count: int, code: BlockCode) -> Tensor:
    """The first `count` values of a chunk."""
    return code.decode(codes_B[None])[0, :count]
