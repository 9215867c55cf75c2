"""Pipeline parallelism: each process holds stretches of a model's blocks, and micro-batches go through them.

torch.distributed.pipelining schedules the passes and sends hidden states and their gradients. The micro-batches of a
step are packed sequences of one length, as its buffers are. The model stays whole in its structure, so that names,
adapters and loss are those of one process; what another process holds has no memory here, and is not computed.

Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473; Qi et al. 2024
(zero bubble), arXiv:2401.10241.

Legend: B rows, L tokens, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.models import backbones, forward_hooks, weight_formats
from workbench.runs.ranks import Ranks
from workbench.training.checkpoint_parts import Held
from workbench.training.distributed.sharding import Grouped, Trainable, mesh, parameter_of
from workbench.training.master_weights import MasterWeights

T = TypeVar("T")
_SCHEDULES = {"1f1b": ("1F1B", 1, "loop"), "interleaved": ("Interleaved1F1B", 2, "loop")}
_SCHEDULES |= {"zero_bubble": ("ZBVZeroBubble", 2, "v")}
"""torch's name of each schedule, how many stages a process has, and in which order processes have them."""
PLANNED = ContextVar("planned_place", default=0)
"""The place in a pipeline, from 0, that a process plans which is alone."""


class _Left(Exception):
    """Its hidden states (B, L, D) leave the one stage that is computed."""


class Stages:
    """A model of which this process computes some blocks, brought to its device; the rest lets go of memory.

    Args:
        model: A waiting model, with or without an adapter.
    """

    def __init__(self, model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
        self.place, self.size, self.schedule = PLANNED.get(), section.pipeline, section.schedule
        self.group: dist.ProcessGroup | None = None
        """The processes of one pipeline, by their places; None in a plan, where nothing is sent."""
        if not ranks.alone:
            self.group = mesh(ranks.world, self.size).get_group("group")
            self.place = dist.get_rank(self.group)
            dist.all_reduce(torch.zeros(1, device=backbones.device()), group=self.group)  # NCCL connects all of them
        _, each, order = _SCHEDULES[self.schedule]
        self.holders = list(generate_stage_to_rank_mapping(self.size, each * self.size, order).values())
        """The place of each stage; the last one has the head and the loss."""
        self.own, last = (
            [stage for stage, place in enumerate(self.holders) if place == self.place],
            len(self.holders) - 1,
        )
        backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
        (paths,), self.width = anatomy.blocks(backbone), anatomy.hidden_size(backbone.config)
        blocks, head = [backbone.get_submodule(path) for path in paths], backbone.get_output_embeddings()
        self.blocks = [set(part.tolist()) for part in np.array_split(np.arange(len(blocks)), last + 1)]
        """Numbers of the blocks of each stage; where they do not come out even, the first have one more."""
        stage_of = [stage for stage, numbers in enumerate(self.blocks) for _ in numbers]
        inside = {id(each): stage for stage, block in zip(stage_of, blocks, strict=True) for each in block.parameters()}
        ends = set() if head is None else {id(each) for each in head.parameters()}
        self.stages_of: dict[str, set[int]] = {}
        """The stages that compute with a parameter, by its name: what comes before the blocks is the first one's."""
        holders, outside = dict[int, set[int]](), 0
        for name, parameter in model.named_parameters():
            outside = last if id(parameter) in inside else outside
            stages = {inside.get(id(parameter), outside)} | ({last} if id(parameter) in ends else set())
            self.stages_of[name], holders[id(parameter)] = stages, {self.holders[stage] for stage in stages}
        for module in model.modules():
            parameters = [each for each in module._parameters.values() if each is not None]
            away = [each for each in parameters if self.place not in holders[id(each)]]
            (weight_formats.let_go if away else backbones.bring)(module)
            for parameter in away:
                zero = torch.zeros(1, dtype=parameter.dtype, device=backbones.device())
                parameter.data = zero.expand(parameter.shape)
                parameter.requires_grad_(False)
        self._peers = [self.holders[stage] for stage in stage_of]
        self._own = self._computed = {number for stage in self.own for number in self.blocks[stage]}
        self._received: Tensor | None = None
        for number, block in enumerate(blocks):
            block.forward = partial(self._forward, number, block.forward)
        if head is not None and self.place != self.holders[-1]:
            # Logits of the shape of true ones, of which nothing is read, in no memory.
            head.forward = lambda hidden: hidden[..., :1].expand(*hidden.shape[:-1], len(head.weight))

    def _forward(self, number: int, own: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        """A block's result, or where it is not computed its input, which may leave, or what arrives in its place."""
        if number in self._computed:
            return own(*arguments, **named)
        hidden_BLD, peer = forward_hooks.hidden_of(arguments, named), self._peers[number]
        if number - 1 in self._computed:
            if self._computed is not self._own:
                raise _Left(hidden_BLD)
            if self.group is not None:
                dist.send(hidden_BLD.contiguous(), group=self.group, group_dst=peer)
        if number + 1 in self._computed:
            if self._received is not None:
                return self._received
            hidden_BLD = torch.empty_like(hidden_BLD)
            if self.group is not None:
                dist.recv(hidden_BLD, group=self.group, group_src=peer)
        return hidden_BLD

    def compute(self, stage: int, received_BLD: Tensor | None, work: Callable[[], Tensor]) -> Tensor:
        """Hidden states that a stage gives for those of the stage before it; of the last stage, the result of `work`.

        Args:
            work: Calls the model.
        """
        self._computed, self._received = self.blocks[stage], received_BLD
        try:
            return work()
        except _Left as left:
            hidden_BLD: Tensor = left.args[0]
            return hidden_BLD
        finally:
            self._computed, self._received = self._own, None  # as a backward pass may compute blocks once more

    def read(self, work: Callable[[], T]) -> T:
        """Result of `work`, which reads the model, where the head is; all processes call it together."""
        return self.agreed(work(), by=self.holders[-1])

    def agreed(self, value: T, *, by: int) -> T:
        """The value of a place, in all of them."""
        payload = [value]
        if self.group is not None:
            dist.broadcast_object_list(payload, group=self.group, group_src=by)
        return payload[0]

    def micro_batches(self, count: int) -> int:
        """As many as a step of `count` micro-batches is filled up to, with some that carry no loss."""
        least = max(count, 2 * self.size - 1 if self.schedule == "zero_bubble" else self.size)
        rounds = self.schedule == "interleaved"  # all of which have as many
        return next(each for each in itertools.count(least) if not rounds or each % (each // self.size) == 0)


MicroBatchPass = Callable[[int, bool], AbstractContextManager[tuple[MicroBatch, float]]]
"""Around one pass of a micro-batch of a step, by its number, and whether its losses are heard: rows, and the factor of
their loss."""


class Pipelined(Grouped):
    """The trainable parameters of a model whose blocks are dealt to processes: each has masters and states of its own.

    Those of others do not train here, so that names, groups and their order are those of one process.
    """

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        self.stages = Stages(whole.model, whole.config.distributed, whole.ranks)
        self._compute, self._masters = whole.compute, MasterWeights(whole.model, whole.compute)
        self._own = self._masters.named()
        self._named |= self._own
        stages_of, holders = self.stages.stages_of, self.stages.holders
        self._places = {name: list(dict.fromkeys(holders[s] for s in sorted(stages_of[name]))) for name in self._named}
        """The processes that compute with each parameter; the first answers for it."""
        self._schedule, self.carry_out = lru_cache(1)(self._scheduled), self._carried_out

    def computing(self) -> dict[str, nn.Parameter]:
        return self._named | self._masters.computing()

    def refresh(self) -> None:
        self._masters.refresh()

    def compute(self, stage: int, number: int, received_BLD: Tensor | None) -> Tensor:
        """What `Stages.compute` gives for a micro-batch of the step, with a graph; of the last stage, the loss."""
        with self.passing(number, stage == len(self.stages.holders) - 1) as (batch, scale):
            return self.stages.compute(stage, received_BLD, lambda: self._loss(batch, scale))

    def add(self, count: int, tokens: int, passing: MicroBatchPass) -> Tensor:
        """Add the gradients of a step of so many micro-batches; returns the pipeline's loss, 0 where no head is."""
        self.passing = passing
        losses = self.carry_out(count, tokens)
        for name, parameter in self._masters.computing().items():
            master = self._own[name]
            if parameter.grad is not None and parameter is not master:
                # Weight gradients that zero bubble computes later come to no hook.
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
        for name in [
            name for name, places in self._places.items() if len(places) > 1 and self.stages.group is not None
        ]:
            like = self._named[name]  # embeddings that are the head's weight, too
            gradient = torch.zeros(like.shape, device=like.device) if like.grad is None else like.grad
            dist.all_reduce(gradient, group=self.stages.group)
        return torch.stack(losses).detach().sum().float() if losses else torch.zeros(())

    def _carried_out(self, count: int, tokens: int) -> list[Tensor]:
        """Losses of so many micro-batches of one length, which torch's schedule computes where the head is."""
        numbers, losses = torch.arange(count), list[Tensor]()
        step = self._schedule(count, tokens).step
        step(numbers, target=numbers, losses=losses, return_outputs=False, number=numbers)
        return losses

    def _scheduled(self, count: int, tokens: int) -> Any:
        number, loss = torch.zeros(1, dtype=torch.int64), torch.zeros((), requires_grad=True)
        hidden = torch.empty(1, tokens, self.stages.width, dtype=self._compute, device="meta", requires_grad=True)
        edges = [number, *[hidden] * (len(self.stages.holders) - 1), loss]
        stages = [_Stage(self, stage, *edges[stage : stage + 2]) for stage in self.stages.own]
        name, each, _ = _SCHEDULES[self.stages.schedule]
        kind: Any = get_schedule_class(name)
        return kind(stages if each > 1 else stages[0], count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def reading(self, work: Callable[[], T]) -> T:
        return self.stages.read(work)

    def _counts(self, name: str) -> bool:
        """Each process counts what is no parameter, such as counters of groups of them."""
        return self._places.get(name, [self.stages.place])[0] == self.stages.place

    def _gathered(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        gathered = {key: each.cpu() for key, each in own.items() if self._counts(parameter_of(key))}
        for place in range(1, self.stages.size):
            for key in self.stages.agreed(list(gathered), by=place):
                value = self.stages.agreed(gathered.get(key), by=place)
                gathered |= {key: value} if self._ranks.first and value is not None else {}
        return gathered

    def _answered(self, own: Mapping[str, Tensor]) -> Mapping[str, Held]:
        return {key: each for key, each in own.items() if self._counts(parameter_of(key))}

    def _holds(self, name: str) -> bool:
        return name not in self._named.keys() - self._own


class _Stage(PipelineStage):
    """A stage as torch's schedules call it, whose backward passes have the noise of their micro-batch."""

    def __init__(self, pipelined: Pipelined, stage: int, given: Tensor, result: Tensor) -> None:
        of = pipelined.stages
        computing = pipelined.computing().items()
        own = [each for name, each in computing if stage in of.stages_of[name] and each.requires_grad]
        # The loss gives the gradients of a head once, with those of its inputs: its stage leaves none for later.
        late = (lambda: lambda: None) if stage == len(of.holders) - 1 else None
        around = (stage, len(of.holders), backbones.device(), given, result)
        super().__init__(nn.ParameterList(own), *around, group=of.group, dw_builder=late)
        self._pipelined = pipelined

    def forward_maybe_with_nosync(self, received: Tensor, number: Tensor) -> Tensor:
        return self._pipelined.compute(self.stage_index, int(number), None if self.is_first else received)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._pipelined.passing(bwd_chunk_id, False):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
