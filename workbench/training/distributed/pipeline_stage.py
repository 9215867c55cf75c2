"""A stage of a pipeline: the stretch of a model's blocks that this process holds, and its neighbours.

The model stays whole in its structure, so that names, adapters and loss are those of one process; what another stage
holds has no memory here, and is not computed. The first process of a group is the last stage: it has the head and the
loss, and so the scores that the first process writes.

Legend: B rows, L tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError
from workbench.models import backbones, packed_attention, quantisation, rerouting
from workbench.runs.ranks import Ranks
from workbench.training.distributed.pipeline_schedule import stretches

T = TypeVar("T")
FAMILIES = tuple(name for name in packed_attention.FAMILIES if name != "bert")
"""Decoders by transformers' `model_type` whose blocks give hidden states alone."""
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Precisions of hidden states, in the order of their numbers in a message."""
_PLANNED = ContextVar("planned_stage", default=0)
"""The stage that `planning` names."""


class Absent(nn.Parameter):
    """A parameter that another stage holds: of its shape and precision, in no memory, and not a number."""


@dataclass(frozen=True)
class Line:
    """The processes that are the stages of one pipeline, this one among them."""

    stage: int
    """Its own, from 0, which embeds."""
    stages: int
    pipeline: int = 0
    """Number of the pipeline, of several that share the rows of a step."""
    others: dist.ProcessGroup | None = None
    """The processes of the same stage in all pipelines; None where there is one pipeline."""
    _precisions: dict[bool, torch.dtype] = field(default_factory=dict)
    """Precision of the hidden states that arrive (False) or leave (True), once the first have."""

    @property
    def last(self) -> bool:
        """Whether this stage has the head and the loss."""
        return self.stage == self.stages - 1

    def rank(self, stage: int) -> int:
        """The process of a stage."""
        return (self.pipeline + 1) * self.stages - 1 - stage

    def swap(self, sent: Tensor | None, target: int, received: Tensor | None, source: int) -> Tensor | None:
        """Send a tensor to a stage, and fill another with that of a stage, at once; returns the one received."""
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), self.rank(target)))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, self.rank(source)))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return received

    def tell(self, hidden: Tensor) -> None:
        """Tell the next stage, once, of what precision hidden states are: blocks decide that, and no setting."""
        if True not in self._precisions:
            self._precisions[True] = hidden.dtype
            dist.send(torch.tensor(PRECISIONS.index(hidden.dtype)), self.rank(self.stage + 1))

    def room(self, *shape: int) -> Tensor:
        """Room for the hidden states that arrive, which the stage before this one has told of."""
        if False not in self._precisions:
            number = torch.zeros((), dtype=torch.int64)
            dist.recv(number, self.rank(self.stage - 1))
            self._precisions[False] = PRECISIONS[int(number)]
        return torch.empty(shape, dtype=self._precisions[False], device=backbones.device())


class PlannedLine(Line):
    """A stage without neighbours: what it sends is nobody's, what it receives has no values."""

    def swap(self, sent: Tensor | None, target: int, received: Tensor | None, source: int) -> Tensor | None:
        """Room for what a stage would send."""
        return received

    def tell(self, hidden: Tensor) -> None:
        """Do nothing: nobody listens."""


@contextmanager
def planning(stage: int) -> Iterator[None]:
    """Inside, a process that is alone plans this stage (from 0) of a pipeline."""
    token = _PLANNED.set(stage)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def line(section: DistributedConfig, ranks: Ranks, compute: torch.dtype = torch.float32) -> Line:
    """The pipeline of this process; neighbours are in one, as their links are the fastest.

    Args:
        compute: Precision of hidden states in a pipeline that is planned, by a process that is alone.
    """
    size = section.pipeline
    if ranks.alone:
        return PlannedLine(_PLANNED.get(), size, _precisions={False: compute})
    dist.all_reduce(torch.zeros(1, device=backbones.device()))  # NCCL connects processes when all of them call it
    others = _mesh(ranks.world, size).get_group("data") if ranks.world > size else None
    return Line(size - 1 - ranks.rank % size, size, ranks.rank // size, others)


def require(config: TrainingSections, model: PreTrainedModel, modules: Sequence[str]) -> None:
    """Raise ConfigError where the blocks of a backbone cannot be dealt to devices.

    Args:
        modules: Names of the modules that get an adapter, or their ends.
    """
    size, kind = config.distributed.pipeline, model.config.model_type
    if size == 1:
        return
    place = f"distributed.pipeline={size}"
    if kind not in FAMILIES:
        raise ConfigError(
            f"{place}: {kind} is none of the architectures that are known to be computed in stages "
            f"({', '.join(FAMILIES)}). Write distributed.pipeline=1, and zero=3 where the backbone is too large."
        )
    (blocks,) = anatomy.blocks(model)
    if len(blocks) < size:
        raise ConfigError(
            f"{place}: model.id={config.model.id} has {len(blocks)} blocks, and each device needs one. "
            f"Write distributed.pipeline={len(blocks)} or less."
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


class Stage:
    """A model of which this process computes a stretch of blocks, brought to its device; the rest lets go of memory.

    Args:
        model: A waiting model, with or without an adapter.
    """

    def __init__(self, model: nn.Module, line: Line) -> None:
        self.line = line
        backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
        (paths,) = anatomy.blocks(backbone)
        self._blocks = [backbone.get_submodule(path) for path in paths]
        stages = stretches(len(paths), line.stages)
        self._own = stages[line.stage]
        self._embedding, self._head = backbone.get_input_embeddings(), backbone.get_output_embeddings()
        self.width = anatomy.hidden_size(backbone.config)
        in_block = {
            id(parameter): stage
            for stage, numbers in enumerate(stages)
            for number in numbers
            for parameter in self._blocks[number].parameters()
        }
        self.stage_of: dict[str, int] = {}
        """The stage that answers for a parameter, by its name: what comes before the blocks is the first one's."""
        before = 0
        for name, parameter in model.named_parameters():
            before = line.stages - 1 if id(parameter) in in_block else before
            self.stage_of[name] = in_block.get(id(parameter), before)
        ends = {id(each): {0} for each in self._embedding.parameters()}
        for each in self._head.parameters():
            ends.setdefault(id(each), set()).add(line.stages - 1)
        self.shared = {name for name, each in model.named_parameters() if ends.get(id(each)) == {0, line.stages - 1}}
        """Names of what the first and the last stage both hold: embeddings that are the head's weight, too."""
        self._cut(model, {**{key: {stage} for key, stage in in_block.items()}, **ends})

    def _cut(self, model: nn.Module, holders: dict[int, set[int]]) -> None:
        """Bring to the device what this stage holds; the stages of a parameter that is not listed are all of them."""
        own, absent = self.line.stage, dict[int, Absent]()
        trains = {id(each) for name, each in model.named_parameters() if self.holds(name)}
        whole = []  # so that no other object gets the id of one that is gone
        for module in model.modules():
            parameters = [(name, each) for name, each in module._parameters.items() if each is not None]
            if all(own in holders.get(id(parameter), {own}) for _, parameter in parameters):
                backbones.bring(module)
                for _, parameter in parameters:
                    parameter.requires_grad_(parameter.requires_grad and id(parameter) in trains)
                continue
            quantisation.let_go(module)
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
        stages = {0, self.line.stages - 1} if name in self.shared else {self.stage_of[name]}
        return self.line.stage in stages

    @contextmanager
    def routed(self, arriving: Callable[[Tensor], Tensor], leaving: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside, a call of the model computes this stage, between those before and after it.

        Args:
            arriving: From hidden states (B, L, D) without values to those of the stage before this one.
            leaving: Is given those for the next stage.
        """
        line, blocks, own = self.line, self._blocks, self._own

        def enter(*arguments: Any, **named: Any) -> Tensor:
            return arriving(rerouting.hidden_of(arguments, named))

        def leave(*arguments: Any, **named: Any) -> Tensor:
            hidden_BLD = rerouting.hidden_of(arguments, named)
            leaving(hidden_BLD)
            return hidden_BLD.detach()

        routes: list[tuple[nn.Module, Callable[..., Tensor]]] = [
            (block, _passed_on) for number, block in enumerate(blocks) if number not in own
        ]
        if line.stage > 0:
            routes += [(blocks[own.start - 1], enter), (self._embedding, self._unembedded)]
        if not line.last:
            routes += [(blocks[own.stop], leave), (self._head, self._unprojected)]
        with ExitStack() as stack:
            for module, forward in routes:
                rerouting.reroute(module, forward)
                stack.callback(rerouting.restore, module)
            yield

    def read(self, work: Callable[[], T]) -> T:
        """Result of `work`, which reads the model: the true one in the last stage."""
        line = self.line

        def arrive(like_BLD: Tensor) -> Tensor:
            received = line.swap(None, line.stage, line.room(*like_BLD.shape), line.stage - 1)
            assert received is not None
            return received

        def leave(hidden_BLD: Tensor) -> None:
            line.tell(hidden_BLD)
            line.swap(hidden_BLD, line.stage + 1, None, line.stage)

        with self.routed(arrive, leave):
            return work()

    def _unembedded(self, ids_BL: Tensor) -> Tensor:
        """Hidden states of the shape of embedded tokens, of which nothing is read."""
        (weight, *_) = self._embedding.parameters()
        return torch.zeros(*ids_BL.shape, self.width, dtype=weight.dtype, device=ids_BL.device)

    def _unprojected(self, hidden: Tensor) -> Tensor:
        """Logits of the shape of true ones, of which nothing is read, in no memory."""
        (weight, *_) = self._head.parameters()
        return hidden[..., :1].expand(*hidden.shape[:-1], weight.shape[0])


def _passed_on(*arguments: Any, **named: Any) -> Tensor:
    return rerouting.hidden_of(arguments, named)


def _absent(parameter: nn.Parameter) -> Absent:
    one = torch.zeros(1, dtype=parameter.dtype, device=backbones.device())
    return Absent((one / 0 if one.is_floating_point() else one).expand(parameter.shape), requires_grad=False)
