"""A model of whose weights, gradients or optimizer states each process holds a share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.models import backbones, weight_formats
from workbench.runs.ranks import Ranks
from workbench.training.checkpoint_parts import Held, SavedTensors
from workbench.training.master_weights import AUXILIARY
from workbench.training.optim import optimizer_states
from workbench.training.optim.optimizer_states import OptimizerStep

Loss = Callable[[MicroBatch, float], Tensor]
T = TypeVar("T")


def place_model(model: nn.Module, ranks: Ranks) -> Iterator[nn.Module]:
    """The parts of a model, brought here one by one when the one before is cut: its blocks, then the rest.

    One process of each machine reads and packs them, and sends them to the others of that machine, so that a file is
    read, and a weight packed, once a machine. A block that shares a weight with the rest, such as BERT's embeddings
    with its head, is no part.
    """
    here: set[nn.Module] = set()
    node, homes = _node(ranks), Counter(id(each) for module in model.modules() for each in _own(module))
    tied = {id(each): False for module in model.modules() for each in _own(module) if homes[id(each)] > 1}
    for part in (*blocks_apart(model), model):
        for module in part.modules():
            if module not in here:
                _bring(module, ranks, node, tied)
                here.add(module)
        yield part


class _Node(NamedTuple):
    """The processes of this machine."""

    group: dist.ProcessGroup | None
    """None: all there are."""
    reader: int
    """The rank of the one that reads files."""


@lru_cache
def _node(ranks: Ranks) -> _Node | None:
    """The machine of this process; None where no other process is on it. All processes ask together."""
    if ranks.alone:
        return None
    if ranks.here == ranks.world:
        return _Node(None, 0)
    machines = sorted(set(ranks.gathered((ranks.rank - ranks.local, ranks.here))))
    groups = {first: dist.new_group(range(first, first + many)) for first, many in machines}
    first = ranks.rank - ranks.local
    return None if ranks.here == 1 else _Node(groups[first], first)


def _own(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _bring(module: nn.Module, ranks: Ranks, node: _Node | None, tied: dict[int, bool]) -> None:
    """Bring a module, without its children, to this process's device: from its files, or from the machine's reader.

    Args:
        tied: By identity, tensors that several modules have, and whether they are here.
    """
    if node is None:
        backbones.bring(module)
        return
    if all(tied.get(id(each)) for each in _own(module)):
        return
    if ranks.rank != node.reader:
        weight_formats.stand_in(module, backbones.device())
    backbones.bring(module)
    for tensor in chain(weight_formats.held(module, recurse=False), module.buffers(recurse=False)):
        numbers = tensor.data.contiguous()
        dist.broadcast(numbers.view(-1).view(torch.uint8), node.reader, group=node.group)
        if numbers.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(numbers)
        if id(tensor) in tied:
            tied[id(tensor)] = True


def blocks_apart(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a model that share no weight with the rest."""
    return filter(_apart(model), anatomy.decoder_layers(model))


def _apart(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a block of a model has its weights for itself."""
    homes = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))

    def apart(block: nn.Module) -> bool:
        own = Counter(id(each) for module in block.modules() for each in module.parameters(recurse=False))
        return all(homes[key] == count for key, count in own.items())

    return apart


@dataclass(frozen=True)
class Trainable:
    """A model that trains, and how."""

    model: nn.Module
    loss: Loss
    """The summed loss of a micro-batch times a factor, by the model."""
    config: TrainingSections
    compute: torch.dtype
    """Precision of matrix products."""
    ranks: Ranks
    auxiliary: nn.Module | None = None
    """A module that trains with the model and is not shipped."""
    stored: Mapping[str, torch.dtype] = field(init=False)
    """Precision in which each trainable parameter came, and is saved."""

    def __post_init__(self) -> None:
        stored = {name: each.dtype for name, each in self.parameters() if each.requires_grad}
        object.__setattr__(self, "stored", stored)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By their names in the model."""
        yield from self.model.named_parameters()
        if self.auxiliary is not None:
            yield from self.auxiliary.named_parameters(prefix=AUXILIARY)


class Sharded(OptimizerStep, ABC):
    """The trainable parameters of a model that processes share, and the steps of their optimizer."""

    def __init__(self, whole: Trainable) -> None:
        self._ranks, self._stored, named = whole.ranks, whole.stored, whole.parameters()
        self._named = {name: parameter for name, parameter in named if parameter.requires_grad}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._named.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter, by its name in the model; this process may hold a part of it, or nothing now."""
        return dict(self._named)

    computing = named

    @property
    def counted(self) -> int:
        """How often each row counts in the sum of what `forward` gives in all processes: engines take its mean."""
        return self._ranks.world

    def refresh(self) -> None:
        """Do nothing: DeepSpeed and FSDP2 copy masters themselves."""
        return

    @abstractmethod
    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> Sharded:
        """From now on the steps of `optimizer` are taken here."""

    @abstractmethod
    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The summed loss of a micro-batch times a factor, with a graph; gradients are added up over processes."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, and send them to where they belong."""

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work`, which calls the model otherwise than `forward` does; all processes call it together."""
        return work()

    @abstractmethod
    def exposed(self) -> AbstractContextManager[None]:
        """The first process' model holds whole masters inside the block, each in the precision in which it came."""

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone() if self._ranks.first else tensor.new_empty(0, device="cpu")


class TorchSharded(Sharded):
    """Parameters whose parts torch's optimizers step, each process its own.

    What is exposed is gathered tensor by tensor on the host of the first process.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in (*whole.model.modules(), *(whole.auxiliary.modules() if whole.auxiliary is not None else ())):
            for own, parameter in module._parameters.items():
                homes.setdefault(id(parameter), []).append((module, own))
        self._homes = {name: homes[id(parameter)] for name, parameter in self._named.items()}
        """Modules, and their attributes, that have each parameter: several where they share it."""

    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> TorchSharded:
        """From now on the steps of `optimizer` are taken here."""
        self._optimizer = optimizer
        return self

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        loss.backward()

    def take(self) -> None:
        """Take the step, of what this process holds."""
        self._optimizer.step()

    def clear(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def values(self) -> Mapping[str, Held]:
        """The float32 masters."""
        return self._answered({name: master.detach() for name, master in self._named.items()})

    def states(self) -> Mapping[str, Held]:
        """Optimizer states."""
        return self._answered(optimizer_states.state_tensors(self._optimizer, self._named))

    def read(self, saved: SavedTensors) -> None:
        """Read the masters, and the optimizer's states of this process."""
        saved.fill("trainable", {name: self._named[name] for name in filter(self._holds, self._named)})
        kept = saved.stored("optimizer").items()
        states = {key: self._room(key, each) for key, each in kept if self._holds(parameter_of(key))}
        saved.fill("optimizer", states)
        optimizer_states.load_state(self._optimizer, self._named, states)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The first process' model holds whole masters inside the block, each in the precision in which it came."""
        before = [(module, own, module._parameters[own]) for homes in self._homes.values() for module, own in homes]
        masters = {name: master.detach().to(self._stored[name]) for name, master in self._named.items()}
        self._put({name: nn.Parameter(value) for name, value in self._gathered(masters).items()})
        try:
            yield
        finally:
            for module, own, parameter in before:
                module._parameters[own] = parameter

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            for module, own in self._homes[name]:
                module._parameters[own] = parameter

    def _gathered(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors on the host of the first process, of this process's by name or by key of an optimizer state."""
        return {key: self._kept(each.full_tensor() if isinstance(each, DTensor) else each) for key, each in own.items()}

    def _answered(self, own: Mapping[str, Tensor]) -> Mapping[str, Held]:
        """What this process writes of tensors by name, or by key of an optimizer state: all that it has a part of."""
        return own

    def _holds(self, name: str) -> bool:
        """Whether this process trains a parameter, or a part of it."""
        return True

    def _room(self, key: str, saved: TensorStorageMetadata) -> Tensor:
        """Memory for this process's part of an optimizer state; a count of steps is not cut."""
        like, dtype = self._named.get(parameter_of(key)), saved.properties.dtype
        if isinstance(like, DTensor) and saved.size == like.shape:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(saved.size, dtype=dtype)


class Grouped(TorchSharded):
    """Parameters of which the processes of a group hold parts; groups share the rows of a step."""

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        self._loss, section, ranks = whole.loss, whole.config.distributed, whole.ranks
        self.groups, self._bucket_bytes = dealt(section, ranks), section.bucket_bytes
        both = None if ranks.alone else mesh(ranks.world, section.rows_together)
        self._mesh = None if both is None else both["group"]
        self._others = None if both is None or self.groups.world == 1 else both.get_group("data")

    @property
    def counted(self) -> int:
        """The processes of a group compute the same rows."""
        return self._ranks.world // self.groups.world

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The loss, with a graph."""
        return self._loss(batch, scale)

    def clip(self, max_norm: float) -> Tensor:
        """Add up the gradients over groups, and clip them by the norm of the whole model's."""
        gradients = {name: local(each.grad) for name, each in self._named.items() if each.grad is not None}
        if self._others is not None:
            self._ranks.add_up(list(gradients.values()), bucket_bytes=self._bucket_bytes, group=self._others)
        norm = nn.utils.get_total_norm([each for name, each in gradients.items() if self._counts(name)])
        square = norm.square().to(backbones.device())  # of nothing it is on the host
        if self._mesh is not None:
            dist.all_reduce(square, group=self._mesh.get_group())
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(list(self), max_norm, norm)
        return norm

    @abstractmethod
    def _counts(self, name: str) -> bool:
        """Whether this process counts its part of a parameter: of those that hold the same one does."""


def dealt(section: DistributedConfig, ranks: Ranks) -> Ranks:
    """The groups as they share the rows of a step: number of this process's, and how many there are."""
    return Ranks(ranks.rank // section.rows_together, max(1, ranks.world // section.rows_together))


@lru_cache
def mesh(world: int, size: int) -> DeviceMesh:
    """Groups of so many processes that compute the same rows, neighbours: their links are the fastest."""
    return init_device_mesh(backbones.device().type, (world // size, size), mesh_dim_names=("data", "group"))


def is_here(tensor: Tensor) -> bool:
    """Whether it has memory for its values: what other stages of a pipeline hold has none."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether this process alone has all of it."""
    return not (isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")) and is_here(parameter)


def parameter_of(key: str) -> str:
    """Name of the parameter that an optimizer state belongs to, or a name as it is."""
    return key.rpartition("|")[0] or key


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own
