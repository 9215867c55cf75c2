"""Pipeline parallelism: each process holds stretches of a model's blocks, and micro-batches go through them.

torch.distributed.pipelining schedules the passes and sends hidden states and their gradients. The micro-batches of a
step are packed sequences of one length, as its buffers are. The model stays whole in its structure, so that names,
adapters and loss are those of one process; what another process holds has no memory here, and is not computed. The
first process of each pipeline has the head and the loss, and so the scores that it writes.

Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473; Qi et al. 2024
(zero bubble), arXiv:2401.10241.

Legend: B rows, L tokens, D hidden, V vocabulary, M micro-batches, T tokens of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn import functional as F
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.errors import ConfigError
from workbench.models import attention_backend, backbones, forward_hooks, weight_formats
from workbench.runs.ranks import Ranks
from workbench.training.distributed import sequence
from workbench.training.distributed.sharding import Sharded, Trainable, homes
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import optimizer_states

T = TypeVar("T")
FAMILIES = tuple(name for name in attention_backend.FAMILIES if name != "bert")
"""Decoders by transformers' `model_type` whose blocks give hidden states alone."""
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Precisions of hidden states, in the order of their numbers in a message."""
_PLANNED = ContextVar("planned_place", default=0)
"""The place that `planning` names."""


@dataclass(frozen=True)
class Line:
    """The processes of one pipeline, this one among them.

    Each holds one stage, or two: with schedule=interleaved stages s and s + N of 2 N, with zero_bubble s and the one
    that is as far from the end (a V), so that the first process has the head there as it has without.
    """

    place: int
    """Its own, from 0, which embeds."""
    size: int
    """N: how many there are."""
    schedule: str = "1f1b"
    pipeline: int = 0
    """Number of the pipeline, of several that share the rows of a step."""
    group: dist.ProcessGroup | None = None
    """All its processes; None: in a plan, where nothing is sent."""
    others: dist.ProcessGroup | None = None
    """The processes of the same place in all pipelines; None where there is one pipeline."""

    @property
    def stages(self) -> int:
        """How many stages all of them hold."""
        return self.size * (1 if self.schedule == "1f1b" else 2)

    @property
    def own(self) -> list[int]:
        """The stages of this process."""
        return [stage for stage in range(self.stages) if self.holder(stage) == self.place]

    def holder(self, stage: int) -> int:
        """The place of a stage."""
        v = self.schedule == "zero_bubble" and stage >= self.size
        return self.stages - 1 - stage if v else stage % self.size

    @property
    def last(self) -> bool:
        """Whether this process has the head and the loss."""
        return self.place == self.holder(self.stages - 1)

    def rank(self, place: int) -> int:
        """The process of a place, among all."""
        return self.pipeline * self.size + (place if self.schedule == "zero_bubble" else self.size - 1 - place)

    def micro_batches(self, count: int) -> int:
        """As many as a step of `count` micro-batches is filled up to, with some that carry no loss."""
        if self.schedule == "1f1b":
            return max(count, self.size)
        count = max(count, 2 * self.size - 1 if self.schedule == "zero_bubble" else self.size)
        while self.schedule == "interleaved" and count % (count // self.size):
            count += 1
        return count

    @property
    def in_flight(self) -> int:
        """Passes of a stage between whose forward and backward there may be others, in a step of many."""
        if self.schedule == "1f1b":
            return self.size - self.place
        return 2 * self.size if self.schedule == "zero_bubble" else self.size + 2 * (self.size - 1 - self.place) + 1


@contextmanager
def planning(place: int) -> Iterator[None]:
    """Inside, a process that is alone plans this place (from 0) of a pipeline."""
    token = _PLANNED.set(place)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def line(section: DistributedConfig, ranks: Ranks) -> Line:
    """The pipeline of this process; neighbours are in one, as their links are the fastest."""
    size, schedule = section.pipeline, section.schedule
    if ranks.alone:
        return Line(_PLANNED.get(), size, schedule)
    dist.all_reduce(torch.zeros(1, device=backbones.device()))  # NCCL connects processes when all of them call it
    mesh, number = _mesh(ranks.world, size), ranks.rank % size
    others = mesh.get_group("data") if ranks.world > size else None
    place = number if schedule == "zero_bubble" else size - 1 - number
    return Line(place, size, schedule, ranks.rank // size, mesh.get_group("pipeline"), others)


def require(config: TrainingSections, model: PreTrainedModel, modules: Sequence[str]) -> None:
    """Raise ConfigError where the blocks of a backbone cannot be dealt to devices.

    Args:
        modules: Names of the modules that get an adapter, or their ends.
    """
    section, kind = config.distributed, model.config.model_type
    if section.pipeline == 1:
        return
    place = f"distributed.pipeline={section.pipeline}"
    if kind not in FAMILIES:
        raise ConfigError(
            f"{place}: {kind} is none of the architectures that are known to be computed in stages "
            f"({', '.join(FAMILIES)}). Write distributed.pipeline=1, and zero=3 where the backbone is too large."
        )
    (blocks,) = anatomy.blocks(model)
    each = 1 if section.schedule == "1f1b" else 2
    if len(blocks) < each * section.pipeline:
        cure = f"distributed.pipeline={len(blocks) // each} or less"
        raise ConfigError(
            f"{place}: model.id={config.model.id} has {len(blocks)} blocks, and each device needs "
            f"{'one' if each == 1 else 'two with schedule=' + section.schedule}. Write "
            f"{cure if len(blocks) >= 2 * each else 'distributed.schedule=1f1b'}."
        )
    inside, ends = tuple(f"{block}." for block in blocks), tuple(f".{name}" for name in modules)
    outside = [name for name, _ in model.named_modules() if not name.startswith(inside) and f".{name}".endswith(ends)]
    if outside:
        raise ConfigError(
            f"{place} deals adapters with their blocks, and adapter.targets names {outside[0]}, which is in none. "
            "Write adapter.targets=all-linear, or distributed.pipeline=1."
        )


@lru_cache
def _mesh(world: int, size: int) -> DeviceMesh:
    return init_device_mesh(backbones.device().type, (world // size, size), mesh_dim_names=("data", "pipeline"))


class Absent(nn.Parameter):
    """A parameter that another process holds: of its shape and precision, in no memory, and not a number."""


class Stretches:
    """A model of which this process computes some blocks, brought to its device; the rest lets go of memory.

    Args:
        model: A waiting model, with or without an adapter.
    """

    def __init__(self, model: nn.Module, line: Line) -> None:
        self.line = line
        backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
        (paths,) = anatomy.blocks(backbone)
        self.blocks = [backbone.get_submodule(path) for path in paths]
        ends = [-(-stage * len(paths) // line.stages) for stage in range(line.stages + 1)]
        self.stages = [range(*pair) for pair in itertools.pairwise(ends)]
        """The blocks of each stage, all but as many; where they do not come out even, the first have one more."""
        self.embedding, self.head = backbone.get_input_embeddings(), backbone.get_output_embeddings()
        self.width = anatomy.hidden_size(backbone.config)
        self.precision: torch.dtype | None = None
        """Of hidden states between stages, once some have gone through: blocks decide it, and no setting."""
        in_block = {
            id(parameter): {stage}
            for stage, numbers in enumerate(self.stages)
            for number in numbers
            for parameter in self.blocks[number].parameters()
        }
        users = dict(in_block)
        for stage, module in ((0, self.embedding), (line.stages - 1, self.head)):
            for parameter in module.parameters():
                users[id(parameter)] = users.get(id(parameter), set()) | {stage}
        self.stages_of: dict[str, set[int]] = {}
        """The stages that compute with a parameter, by its name: what comes before the blocks is the first one's."""
        outside = 0
        for name, parameter in model.named_parameters():
            outside = line.stages - 1 if id(parameter) in in_block else outside
            self.stages_of[name] = users.get(id(parameter), {outside})
        self.home = {name: line.holder(min(stages)) for name, stages in self.stages_of.items()}
        """The place that answers for a parameter, by its name."""
        self.shared = {name for name, stages in self.stages_of.items() if len(set(map(line.holder, stages))) > 1}
        """Names of what two processes hold: embeddings that are the head's weight, too."""
        self._cut(model, {key: set(map(line.holder, stages)) for key, stages in users.items()})

    def _cut(self, model: nn.Module, holders: dict[int, set[int]]) -> None:
        """Bring to the device what is held here; a parameter that is not listed is held everywhere."""
        own, absent = self.line.place, dict[int, Absent]()
        trains = {id(each) for name, each in model.named_parameters() if self.holds(name)}
        whole = []  # so that no other object gets the id of one that is gone
        for module in model.modules():
            parameters = [(name, each) for name, each in module._parameters.items() if each is not None]
            if all(own in holders.get(id(parameter), {own}) for _, parameter in parameters):
                backbones.bring(module)
                for _, parameter in parameters:
                    parameter.requires_grad_(parameter.requires_grad and id(parameter) in trains)
                continue
            weight_formats.let_go(module)
            for name, parameter in parameters:
                whole.append(parameter)
                if id(parameter) not in absent:
                    absent[id(parameter)] = _absent(parameter)
                module._parameters[name] = absent[id(parameter)]
        for parameter in whole:
            if type(parameter) is nn.Parameter:  # somebody may know it still
                parameter.data = parameter.data.new_empty(0)

    def holds(self, name: str) -> bool:
        """Whether a parameter, if it trains, trains here."""
        return self.line.place in map(self.line.holder, self.stages_of[name])

    @contextmanager
    def routed(
        self, stages: Sequence[int], arriving: Callable[[int, Tensor], Tensor], leaving: Callable[[int, Tensor], None]
    ) -> Iterator[None]:
        """Inside, a call of the model computes these stages, and passes hidden states over all others.

        Args:
            arriving: From a stage, and hidden states (B, L, D) without values, to those of the stage before it.
            leaving: Is given a stage and those for the next one.
        """
        own = {number for stage in stages for number in self.stages[stage]}
        routes: dict[nn.Module, Callable[..., Tensor]] = {
            block: _passed_on for number, block in enumerate(self.blocks) if number not in own
        }
        edges: dict[int, list[Callable[[Tensor], Tensor]]] = {}
        for stage in stages:
            numbers = self.stages[stage]
            if numbers.start > 0 and numbers.start - 1 not in own:
                edges.setdefault(numbers.start - 1, []).append(partial(arriving, stage))
            if numbers.stop < len(self.blocks) and numbers.stop not in own:
                edges.setdefault(numbers.stop, []).insert(0, partial(_left, leaving, stage))
        for number, steps in edges.items():
            routes[self.blocks[number]] = _steps(steps)
        if 0 not in stages:
            routes[self.embedding] = self._unembedded
        if self.line.stages - 1 not in stages:
            routes[self.head] = self._unprojected
        with ExitStack() as stack:
            for module, forward in routes.items():
                forward_hooks.reroute(module, forward)
                stack.callback(forward_hooks.restore, module)
            yield

    def read(self, work: Callable[[], T]) -> T:
        """Result of `work`, which reads the model, where the head is; each pass goes through the stages once."""
        line = self.line

        def arrive(stage: int, like_BLD: Tensor) -> Tensor:
            if line.group is None:
                return like_BLD
            number, source = torch.zeros((), dtype=torch.int64), line.rank(line.holder(stage - 1))
            dist.recv(number, source)
            self.precision = PRECISIONS[int(number)]
            received = torch.empty(like_BLD.shape, dtype=self.precision, device=like_BLD.device)
            dist.recv(received, source)
            return received

        def leave(stage: int, hidden_BLD: Tensor) -> None:
            if line.group is None:
                return
            target, self.precision = line.rank(line.holder(stage + 1)), hidden_BLD.dtype
            dist.send(torch.tensor(PRECISIONS.index(hidden_BLD.dtype)), target)
            dist.send(hidden_BLD.contiguous(), target)

        with self.routed(line.own, arrive, leave):
            return work()

    def _unembedded(self, ids_BL: Tensor) -> Tensor:
        """Hidden states of the shape of embedded tokens, of which nothing is read."""
        (weight, *_) = self.embedding.parameters()
        return torch.zeros(*ids_BL.shape, self.width, dtype=weight.dtype, device=ids_BL.device)

    def _unprojected(self, hidden: Tensor) -> Tensor:
        """Logits of the shape of true ones, of which nothing is read, in no memory."""
        (weight, *_) = self.head.parameters()
        return hidden[..., :1].expand(*hidden.shape[:-1], weight.shape[0])


class PipelineReader:
    """A model in evaluation mode whose stages processes read together, all pipelines the same rows."""

    def __init__(self, model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
        self._stretches, self._ranks = Stretches(model, line(section, ranks)), ranks

    def __call__(self, work: Callable[[], T]) -> T:
        """Result of `work` where the head is; all processes call it together."""
        return self._ranks.agreed(self._stretches.read(work))


@dataclass
class StepBatches:
    """The micro-batches of a step, of one length."""

    batches: list[MicroBatch]
    scales: list[float]
    """Factors of their losses; 0 of those that fill up a schedule."""
    around: Callable[[int, bool], AbstractContextManager[object]]
    """The context of a pass of a micro-batch: its noise, and who hears its losses in a forward pass."""


class Pipelined(Sharded):
    """The trainable parameters of a model whose blocks are dealt to processes: each has masters and states of its own.

    Those of others have no elements here, so that names, groups and their order are those of one process.
    """

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        self._homes = {name: homes(whole.model, parameter) for name, parameter in self._named.items()}
        dimensions = {name: parameter.ndim for name, parameter in self._named.items()}
        self._whole, self.line = whole, line(whole.config.distributed, whole.ranks)
        self.stretches = Stretches(whole.model, self.line)
        self.pipelines = sequence.dealt(whole.config.distributed, whole.ranks)
        """The pipelines as they share the rows of a step."""
        self._masters = MasterWeights(whole.model, whole.compute)
        self._own, device = self._masters.named(), backbones.device()
        others = {name: nn.Parameter(torch.empty((0,) * ndim, device=device)) for name, ndim in dimensions.items()}
        self._named = {name: self._own.get(name, other) for name, other in others.items()}
        self._step: StepBatches
        self._schedule: tuple[int, int, Any] | None = None
        self._buffers: list[Tensor] = []

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter that this process multiplies with; those of others have no elements."""
        return self._named | self._masters.computing()

    def own_computing(self) -> dict[str, nn.Parameter]:
        """Those of them that are here."""
        return self._masters.computing()

    def refresh(self) -> None:
        """Copy this process's masters into the parameters that compute."""
        self._masters.refresh()

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """Raise AssertionError: a stage has no loss of one micro-batch; `add` computes those of a step."""
        raise AssertionError("a pipeline computes whole steps")

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients of this process."""
        loss.backward()

    def compute(self, stage: int, number: int, received: Tensor | None) -> Tensor:
        """Hidden states that a stage gives for a micro-batch of the step, with a graph; of the last stage, the loss.

        Args:
            received: Those of the stage before this one.
        """
        left: list[Tensor] = []
        last, batch = stage == self.line.stages - 1, self._step.batches[number]
        with (
            self._step.around(number, last),
            self.stretches.routed(
                [stage], lambda _, like: like if received is None else received, lambda _, hidden: left.append(hidden)
            ),
        ):
            loss = self._whole.loss(batch if last else _unlabelled(batch), self._step.scales[number])
        return loss if last else left[0]

    def backward_context(self, number: int) -> AbstractContextManager[object]:
        """Around the backward pass of a micro-batch, in which blocks may be computed once more."""
        return self._step.around(number, False)

    def add(self, step: StepBatches) -> Tensor:
        """Add the gradients of a step's micro-batches; returns this pipeline's loss, which is 0 where no head is."""
        self._step = step
        count, tokens = len(step.batches), step.batches[0].inputs["input_ids"].shape[1]
        if self.line.group is None:
            return self._planned(count, tokens)
        if self.stretches.precision is None:
            with torch.no_grad():
                self.stretches.read(lambda: self._whole.loss(step.batches[0], 0.0))
        if self._schedule is None or self._schedule[:2] != (count, tokens):
            self._schedule = count, tokens, self._scheduled(count, tokens)
        numbers, losses = torch.arange(count), list[Tensor]()
        arguments = (numbers,) if 0 in self.line.own else ()
        target = numbers if self.line.last else None
        self._schedule[2].step(*arguments, target=target, losses=losses, return_outputs=False, number=numbers)
        for name, parameter in self._masters.computing().items():
            if parameter.grad is not None and parameter is not (master := self._own[name]):
                # Weight gradients that zero bubble computes later come to no hook.
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
        self._add_up()
        return torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros(())

    def _scheduled(self, count: int, tokens: int) -> Any:
        """torch's schedule of so many micro-batches of one length."""
        shape, precision, device = (1, tokens, self.stretches.width), self.stretches.precision, backbones.device()
        hidden = torch.empty(shape, dtype=precision, device="meta", requires_grad=True)
        stages: list[Any] = []
        for stage in self.line.own:
            given = torch.zeros(1, dtype=torch.int64, device="meta") if stage == 0 else hidden
            loss = torch.empty((), device="meta", requires_grad=True)
            result = loss if stage == self.line.stages - 1 else hidden
            stages.append(_Stage(_StageModule(self, stage), stage, self.line, device, given, result))
        settings: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if self.line.schedule == "1f1b":
            return Schedule1F1B(stages[0], count, **settings)
        kind = ScheduleZBVZeroBubble if self.line.schedule == "zero_bubble" else ScheduleInterleaved1F1B
        return kind(stages, count, **settings)

    def _planned(self, count: int, tokens: int) -> Tensor:
        """As much as the fullest moment of a step holds, in a plan, where nobody sends anything."""
        shape, device = (1, tokens, self.stretches.width), backbones.device()
        if not self._buffers:  # torch's, for what arrives of each micro-batch in both directions
            own, stages = self.line.own, self.line.stages
            ways = sum((stage > 0) + (stage < stages - 1) for stage in own)
            self._buffers = [torch.empty(shape, dtype=self._whole.compute, device=device) for _ in range(ways * count)]
        total, live = torch.zeros((), device=device), list[tuple[int, Tensor]]()

        def finish() -> None:
            number, output = live.pop(0)
            if output.requires_grad:
                with self.backward_context(number):
                    output.backward(None if output.ndim == 0 else torch.empty_like(output))

        for number in range(count):
            for stage in self.line.own:
                if len(live) == self.line.in_flight:
                    finish()
                received = None
                if stage > 0:
                    received = torch.empty(shape, dtype=self._whole.compute, device=device, requires_grad=True)
                live.append((number, self.compute(stage, number, received)))
                total = total + live[-1][1].detach() if live[-1][1].ndim == 0 else total
        while live:
            finish()
        return total

    def _add_up(self) -> None:
        """Sum the gradients over pipelines, and those of embeddings that are the head over the two processes."""
        line = self.line
        for master in self._own.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = {name: master.grad for name, master in self._own.items() if master.grad is not None}
        if line.others is not None:
            bucket = self._whole.config.distributed.bucket_bytes
            self._ranks.add_up(list(gradients.values()), bucket_bytes=bucket, group=line.others)
        other = line.rank(line.holder(0) if line.last else line.holder(line.stages - 1))
        for name in sorted(self.stretches.shared & gradients.keys()):
            own = gradients[name]
            received = torch.empty_like(own)
            requests = [dist.P2POp(dist.isend, own.contiguous(), other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(requests):
                request.wait()
            own += received

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm of the gradients of all stages."""
        place, size = self.line.place, self.line.size
        counted = [self._own[name] for name in self._own if self.stretches.home[name] == place]
        norm = nn.utils.get_total_norm([each.grad for each in counted if each.grad is not None])
        # The first pipeline's, summed in one order: the same bits everywhere.
        squares = [each**2 for each in self._ranks.gathered(float(norm))[:size]]
        total = torch.tensor(math.sqrt(math.fsum(squares)), device=norm.device)
        nn.utils.clip_grads_with_norm_(list(self._own.values()), max_norm, total)
        return total

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work` where the head is."""
        return self._ranks.agreed(self.stretches.read(work))

    def values(self) -> Mapping[str, Tensor]:
        """The masters of all stages on the host of the first process; elsewhere those of this process."""
        return self._gathered({name: master.detach() for name, master in self._own.items()})

    def states(self) -> Mapping[str, Tensor]:
        """Optimizer states of all stages on the host of the first process."""
        assert self._optimizer is not None
        return self._gathered(optimizer_states.state_tensors(self._optimizer, self._named))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor] | None = None) -> None:
        """Set this process's masters and optimizer states."""
        assert self._optimizer is not None
        for name, master in self._own.items():
            master.copy_(values[name])
        if states is not None:
            others = self._named.keys() - self._own.keys()
            here = {key: each for key, each in states.items() if key.rpartition("|")[0] not in others}
            optimizer_states.load_state(self._optimizer, self._named, here)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The first process' model holds the masters of all stages inside the block, so that these are saved."""
        whole = self.values()
        before = [(module, own, module._parameters[own]) for name in whole for module, own in self._homes[name]]
        for name, value in whole.items():
            parameter = nn.Parameter(value)
            for module, own in self._homes[name]:
                module._parameters[own] = parameter
        try:
            yield
        finally:
            for module, own, earlier in before:
                module._parameters[own] = earlier

    def _gathered(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of all stages of the first pipeline on the host of the first process; others keep their own."""
        home, line = self.stretches.home, self.line
        answered = {key: each for key, each in own.items() if home.get(_name(key), line.place) == line.place}
        listed = [(key, each.shape, each.dtype, each.device.type) for key, each in answered.items()]
        by_rank = self._ranks.gathered(listed)[: line.size]
        if not self._ranks.first:
            for tensor in answered.values() if line.pipeline == 0 else ():
                dist.send(tensor.contiguous(), 0)
            return own
        gathered = {key: each.cpu() for key, each in own.items()}
        for rank, tensors in enumerate(by_rank[1:], 1):
            for key, shape, dtype, kind in tensors:
                received = torch.empty(shape, dtype=dtype, device=kind)
                dist.recv(received, rank)
                gathered[key] = received.cpu()
        return gathered


class _StageModule(nn.Module):
    """One stage of a model as torch's pipelining calls it, with its parameters alone."""

    def __init__(self, pipelined: Pipelined, stage: int) -> None:
        super().__init__()
        self.pipelined, self.stage, stages_of = pipelined, stage, pipelined.stretches.stages_of
        trained = pipelined.own_computing().items()
        self.trained = nn.ParameterList([each for name, each in trained if stage in stages_of[name]])

    def forward(self, received: Tensor, number: Tensor) -> Tensor:
        return self.pipelined.compute(self.stage, int(number), None if self.stage == 0 else received)


class _Stage(PipelineStage):
    """A stage whose process is counted from the one that embeds, and whose backward passes have their noise."""

    def __init__(
        self, module: _StageModule, stage: int, line: Line, device: torch.device, given: Tensor, result: Tensor
    ) -> None:
        # The loss gives the gradients of a head once, with those of its inputs: its stage leaves none for later.
        late = (lambda: lambda: None) if stage == line.stages - 1 else None
        super().__init__(module, stage, line.stages, device, given, result, group=line.group, dw_builder=late)
        self._module, self._line, self.group_rank = module, line, line.place

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        return self._line.rank(self._line.holder(stage_idx))

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._module.pipelined.backward_context(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._module.pipelined.backward_context(bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)


def of_one_length(batch: MicroBatch, tokens: int) -> MicroBatch:
    """A packed micro-batch, filled up to so many tokens by a row that nobody looks at."""
    ids_1L, rows = batch.inputs["input_ids"], batch.inputs["row_lengths"]
    if not (more := tokens - ids_1L.shape[1]):
        return batch
    rows = torch.cat([rows, rows.new_tensor([more])])
    position_1L = torch.cat([batch.inputs["position_ids"], torch.arange(more)[None]], dim=1)
    inputs = {
        **batch.inputs,
        "input_ids": F.pad(ids_1L, (0, more)),
        "position_ids": position_1L,
        "row_lengths": rows,
        "row_starts": F.pad(rows.cumsum(0), (1, 0)).int(),
    }
    return replace(batch, inputs=inputs)


def _unlabelled(batch: MicroBatch) -> MicroBatch:
    """The same rows, of which nothing is predicted."""
    weights = None if batch.weights_N is None else batch.weights_N[:0]
    return replace(batch, positions_N=batch.positions_N[:0], labels_N=batch.labels_N[:0], weights_N=weights)


def _name(key: str) -> str:
    """The parameter of a key of optimizer states, or of values."""
    return key.rpartition("|")[0] or key


def _passed_on(*arguments: Any, **named: Any) -> Tensor:
    return forward_hooks.hidden_of(arguments, named)


def _steps(steps: Sequence[Callable[[Tensor], Tensor]]) -> Callable[..., Tensor]:
    """The forward pass of a block in whose place hidden states leave, or arrive, or both."""

    def forward(*arguments: Any, **named: Any) -> Tensor:
        hidden = forward_hooks.hidden_of(arguments, named)
        for step in steps:
            hidden = step(hidden)
        return hidden

    return forward


def _left(leaving: Callable[[int, Tensor], None], stage: int, hidden: Tensor) -> Tensor:
    leaving(stage, hidden)
    return hidden.detach()


def _absent(parameter: nn.Parameter) -> Absent:
    one = torch.zeros(1, dtype=parameter.dtype, device=backbones.device())
    return Absent((one / 0 if one.is_floating_point() else one).expand(parameter.shape), requires_grad=False)
