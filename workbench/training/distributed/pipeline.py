"""Pipeline parallelism: each process holds stretches of a model's blocks, and micro-batches go through them.

torch.distributed.pipelining schedules the passes and sends hidden states and their gradients. The micro-batches of a
step are packed sequences of one length, as its buffers are. The model stays whole in its structure, so that names,
adapters and loss are those of one process; what another process holds has no memory here, and is not computed.

Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473; Qi et al. 2024
(zero bubble), arXiv:2401.10241.

Legend: B rows, L tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.models import backbones, forward_hooks, weight_formats
from workbench.runs.ranks import Ranks
from workbench.training.distributed.sharding import Grouped, Trainable, mesh, parameter_of
from workbench.training.master_weights import MasterWeights

T = TypeVar("T")
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "ZBVZeroBubble"}
"""torch's names of schedules."""
_PLANNED = ContextVar("planned_place", default=0)
"""The place that `planning` names."""


@dataclass(frozen=True)
class Line:
    """The processes of one pipeline, this one among them.

    Each holds one stage, or two: with schedule=interleaved stages s and s + N of 2 N, with zero_bubble s and the one
    that is as far from the end (a V).
    """

    place: int
    """Its own, from 0, which embeds."""
    size: int
    """N: how many there are."""
    schedule: str = "1f1b"
    group: dist.ProcessGroup | None = None
    """All of them, in this order; None: in a plan, where nothing is sent."""

    @property
    def stages(self) -> int:
        """How many stages all of them hold."""
        return self.size * (1 if self.schedule == "1f1b" else 2)

    def holder(self, stage: int) -> int:
        """The place of a stage."""
        v = self.schedule == "zero_bubble" and stage >= self.size
        return self.stages - 1 - stage if v else stage % self.size

    @property
    def own(self) -> list[int]:
        """The stages of this process."""
        return [stage for stage in range(self.stages) if self.holder(stage) == self.place]

    @property
    def head(self) -> int:
        """The place that has the head and the loss."""
        return self.holder(self.stages - 1)

    def agreed(self, value: T, *, by: int) -> T:
        """The value of a place, in all of them."""
        payload = [value]
        if self.group is not None:
            dist.broadcast_object_list(payload, group=self.group, group_src=by)
        return payload[0]

    def micro_batches(self, count: int) -> int:
        """As many as a step of `count` micro-batches is filled up to, with some that carry no loss."""
        least = max(count, 2 * self.size - 1 if self.schedule == "zero_bubble" else self.size)
        if self.schedule != "interleaved":
            return least
        return next(each for each in itertools.count(least) if each % (each // self.size) == 0)


@contextmanager
def planning(place: int) -> Iterator[None]:
    """Inside, a process that is alone plans this place (from 0) of a pipeline."""
    token = _PLANNED.set(place)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def line(section: DistributedConfig, ranks: Ranks) -> Line:
    """The pipeline of this process."""
    if ranks.alone:
        return Line(_PLANNED.get(), section.pipeline, section.schedule)
    group = mesh(ranks.world, section.pipeline).get_group("group")
    dist.all_reduce(torch.zeros(1, device=backbones.device()), group=group)  # lets NCCL connect all of them
    return Line(dist.get_rank(group), section.pipeline, section.schedule, group)


class Stages:
    """A model of which this process computes some blocks, brought to its device; the rest lets go of memory.

    Args:
        model: A waiting model, with or without an adapter.
    """

    def __init__(self, model: nn.Module, line: Line) -> None:
        self.line = line
        backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
        (paths,), self.width = anatomy.blocks(backbone), anatomy.hidden_size(backbone.config)
        blocks = [backbone.get_submodule(path) for path in paths]
        ends = [-(-stage * len(paths) // line.stages) for stage in range(line.stages + 1)]
        self.blocks = [range(*pair) for pair in itertools.pairwise(ends)]
        """Numbers of the blocks of each stage; where they do not come out even, the first have one more."""
        head = backbone.get_output_embeddings()
        inside = {id(each) for block in blocks for each in block.parameters()}
        parts = [(stage, blocks[number]) for stage, numbers in enumerate(self.blocks) for number in numbers]
        users: dict[int, set[int]] = {}
        for stage, part in ((0, backbone.get_input_embeddings()), *parts, (line.stages - 1, head)):
            for parameter in part.parameters() if part is not None else ():
                users.setdefault(id(parameter), set()).add(stage)
        self.stages_of: dict[str, set[int]] = {}
        """The stages that compute with a parameter, by its name: what comes before the blocks is the first one's."""
        before = True
        for name, parameter in model.named_parameters():
            before = before and id(parameter) not in inside
            self.stages_of[name] = users.get(id(parameter), {0 if before else line.stages - 1})
        self._cut(model, {key: set(map(line.holder, stages)) for key, stages in users.items()})
        self._own = {number for stage in line.own for number in self.blocks[stage]}
        self._computed = self._own  # as blocks may be computed once more in a backward pass
        self._passing: dict[int, list[Callable[[Tensor], Tensor]]] = {}
        for number, block in enumerate(blocks):
            block.forward = partial(self._forward, number, block.forward)
        if head is not None and line.place != line.head:
            # Logits of the shape of true ones, of which nothing is read, in no memory.
            head.forward = lambda hidden: hidden[..., :1].expand(*hidden.shape[:-1], len(head.weight))

    def _cut(self, model: nn.Module, holders: Mapping[int, set[int]]) -> None:
        """Bring to the device what is held here; small parts outside of blocks are held everywhere."""
        own = self.line.place
        for module in model.modules():
            parameters = [each for each in module._parameters.values() if each is not None]
            away = [each for each in parameters if own not in holders.get(id(each), {own})]
            (weight_formats.let_go if away else backbones.bring)(module)
            for parameter in away:
                zero = torch.zeros(1, dtype=parameter.dtype, device=backbones.device())
                parameter.data = zero.expand(parameter.shape)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and own in map(self.line.holder, self.stages_of[name]))

    def _forward(self, number: int, own: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        """A block's result, or its input where it is not computed; hidden states may leave or arrive there."""
        if number in self._computed:
            return own(*arguments, **named)
        hidden = forward_hooks.hidden_of(arguments, named)
        for step in self._passing.get(number, ()):
            hidden = step(hidden)
        return hidden

    @contextmanager
    def routed(
        self,
        stages: Sequence[int],
        arriving: Callable[[int, Tensor], Tensor],
        leaving: Callable[[int, Tensor], Tensor],
    ) -> Iterator[None]:
        """Inside, a call of the model computes these stages, and passes hidden states (B, L, D) over all others.

        Args:
            arriving: From a stage, and hidden states without values, to those that it gets.
            leaving: From a stage, and what it gives, to what goes on here without values.
        """
        self._computed = {number for stage in stages for number in self.blocks[stage]}
        self._passing = {}
        for stage in stages:
            numbers = self.blocks[stage]
            for number, step in ((numbers.start - 1, arriving), (numbers.stop, leaving)):
                if number not in self._computed:
                    self._passing.setdefault(number, []).append(partial(step, stage))
        try:
            yield
        finally:
            self._computed, self._passing = self._own, {}

    def read(self, work: Callable[[], T]) -> T:
        """Result of `work`, which reads the model, where the head is; all processes call it together."""
        line = self.line

        def arrive(stage: int, like_BLD: Tensor) -> Tensor:
            received = torch.empty_like(like_BLD)
            if line.group is not None:
                dist.recv(received, group=line.group, group_src=line.holder(stage - 1))
            return received

        def leave(stage: int, hidden_BLD: Tensor) -> Tensor:
            if line.group is not None:
                dist.send(hidden_BLD.contiguous(), group=line.group, group_dst=line.holder(stage + 1))
            return hidden_BLD

        with self.routed(line.own, arrive, leave):
            return line.agreed(work(), by=line.head)


class StagePass(NamedTuple):
    """A micro-batch of a step, all of which have one length."""

    batch: MicroBatch
    scale: float
    """Factor of its loss; 0 of one that fills up a schedule."""
    around: Callable[[bool], AbstractContextManager[object]]
    """Context of one of its passes: its noise, and where the argument is true who hears its losses."""


class Pipelined(Grouped):
    """The trainable parameters of a model whose blocks are dealt to processes: each has masters and states of its own.

    Those of others do not train here, so that names, groups and their order are those of one process.
    """

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        self._whole, self.line = whole, line(whole.config.distributed, whole.ranks)
        self.stages = Stages(whole.model, self.line)
        self._masters = MasterWeights(whole.model, whole.compute)
        self._own = self._masters.named()
        self._named |= self._own
        self._passes: Sequence[StagePass] = ()
        self._schedule: tuple[tuple[int, int], Any] | None = None
        self.carry_out = self._carried_out
        """From the number of passes and their tokens to their losses, where the head is."""

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter that this process multiplies with; those of others do not train."""
        return self._named | self._masters.computing()

    def refresh(self) -> None:
        """Copy this process's masters into the parameters that compute."""
        self._masters.refresh()

    def compute(self, stage: int, number: int, received: Tensor | None) -> Tensor:
        """Hidden states that a stage gives for a micro-batch of the step, with a graph; of the last stage, the loss.

        Args:
            received: Those of the stage before this one.
        """
        left: list[Tensor] = []
        last, (batch, scale, around) = stage == self.line.stages - 1, self._passes[number]

        def leave(_: int, hidden: Tensor) -> Tensor:
            left.append(hidden)
            return hidden.detach()

        with around(last), self.stages.routed([stage], lambda _, like: like if received is None else received, leave):
            loss = self._whole.loss(batch if last else batch.unlabelled(), scale)
        return loss if last else left[0]

    def recomputing(self, number: int) -> AbstractContextManager[object]:
        """Around the backward pass of a micro-batch, in which blocks may be computed once more."""
        return self._passes[number].around(False)

    def add(self, passes: Sequence[StagePass]) -> Tensor:
        """Add the gradients of a step; returns this pipeline's loss, which is 0 where no head is."""
        self._passes = passes
        losses = self.carry_out(len(passes), passes[0].batch.width)
        for name, parameter in self._masters.computing().items():
            master = self._own[name]
            if parameter.grad is not None and parameter is not master:
                # Weight gradients that zero bubble computes later come to no hook.
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self._add_up_shared()
        return torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros(())

    def _carried_out(self, count: int, tokens: int) -> list[Tensor]:
        """By torch's schedule of so many micro-batches of one length."""
        if self._schedule is None or self._schedule[0] != (count, tokens):
            self._schedule = (count, tokens), self._scheduled(count, tokens)
        numbers, losses = torch.arange(count), list[Tensor]()
        arguments = (numbers,) if self.line.place == 0 else ()
        target = numbers if self.line.place == self.line.head else None
        self._schedule[1].step(*arguments, target=target, losses=losses, return_outputs=False, number=numbers)
        return losses

    def _scheduled(self, count: int, tokens: int) -> Any:
        number, loss = torch.zeros(1, dtype=torch.int64), torch.zeros((), requires_grad=True)
        hidden = torch.empty(1, tokens, self.stages.width, dtype=self._whole.compute, device="meta", requires_grad=True)
        edges = [number, *[hidden] * (self.line.stages - 1), loss]
        stages = [_Stage(self, stage, *edges[stage : stage + 2]) for stage in self.line.own]
        own: Any = stages[0] if self.line.schedule == "1f1b" else stages
        kind: Any = get_schedule_class(_SCHEDULES[self.line.schedule])
        return kind(own, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _add_up_shared(self) -> None:
        """Sum the gradients of what two processes hold: embeddings that are the head's weight, too."""
        for name, like in self._named.items() if self.line.group is not None else ():
            if len(set(map(self.line.holder, self.stages.stages_of[name]))) > 1:
                zeros = torch.zeros(like.shape, device=like.device) if like.grad is None else like.grad
                dist.all_reduce(zeros, group=self.line.group)

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work` where the head is."""
        return self.stages.read(work)

    def _counts(self, name: str) -> bool:
        return self.line.holder(min(self.stages.stages_of[name])) == self.line.place

    def _gathered(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        gathered = {key: each.cpu() for key, each in own.items() if self._answers(key)}
        for place in range(self.line.size):
            for key in self.line.agreed(list(gathered), by=place) if place else ():
                value = self.line.agreed(gathered.get(key), by=place)
                if self._ranks.first and value is not None:
                    gathered[key] = value
        return gathered

    def _answers(self, key: str) -> bool:
        """Whether this process answers for a value or a state; each does for counters of groups of parameters."""
        name = parameter_of(key)
        return name not in self._named or (name in self._own and self._counts(name))

    def _parts(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {key: each for key, each in whole.items() if parameter_of(key) not in self._named.keys() - self._own}


class _Stage(PipelineStage):
    """A stage as torch's schedules call it, whose backward passes have the noise of their micro-batch."""

    def __init__(self, pipelined: Pipelined, stage: int, given: Tensor, result: Tensor) -> None:
        line, of = pipelined.line, pipelined.stages.stages_of
        own = [each for name, each in pipelined.computing().items() if stage in of[name] and each.requires_grad]
        # The loss gives the gradients of a head once, with those of its inputs: its stage leaves none for later.
        late = (lambda: lambda: None) if stage == line.stages - 1 else None
        around = (stage, line.stages, backbones.device(), given, result)
        super().__init__(nn.ParameterList(own), *around, group=line.group, dw_builder=late)
        self._pipelined = pipelined

    def forward_maybe_with_nosync(self, received: Tensor, number: Tensor) -> Tensor:
        return self._pipelined.compute(self.stage_index, int(number), None if self.is_first else received)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._pipelined.recomputing(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
