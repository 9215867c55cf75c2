"""A model of whose weights, gradients or optimizer states each process holds a share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.data.batching import MicroBatch
from workbench.models import backbones
from workbench.runs.ranks import Ranks
from workbench.training.master_weights import AUXILIARY
from workbench.training.optim.optimizer_states import OptimizerStep

Loss = Callable[[MicroBatch, float], Tensor]
T = TypeVar("T")


def place_model(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model, brought here one by one when the one before is cut: its blocks, then the rest.

    A block that shares a weight with the rest, such as BERT's embeddings with its head, is no part.
    """
    here: set[nn.Module] = set()
    for part in (*blocks_apart(model), model):
        for module in part.modules():
            if module not in here:
                backbones.bring(module)
                here.add(module)
        yield part


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


def homes(model: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Where a parameter is: in several modules where these share it."""
    return [
        (module, own)
        for module in model.modules()
        for own, candidate in module._parameters.items()
        if candidate is parameter
    ]


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

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By their names in the model."""
        yield from self.model.named_parameters()
        if self.auxiliary is not None:
            yield from self.auxiliary.named_parameters(prefix=AUXILIARY)


class Sharded(OptimizerStep, ABC):
    """The trainable parameters of a model that processes share, and the steps of their optimizer.

    `values` and `states` gather tensors one by one on the host of the first process, and give empty ones elsewhere.
    """

    _optimizer: torch.optim.Optimizer | None = None

    def __init__(self, whole: Trainable) -> None:
        self._ranks, named = whole.ranks, whole.parameters()
        self._named = {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def counted(self) -> int:
        """How often the losses that all processes get from `forward` count a row, in sum: engines take their mean."""
        return self._ranks.world

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._named.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter, by its name in the model; this process may hold a part of it, or nothing now."""
        return dict(self._named)

    computing = named

    def refresh(self) -> None:
        """Do nothing: DeepSpeed and FSDP2 copy masters themselves."""
        return

    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> Sharded:
        """From now on the steps of `optimizer` are taken here."""
        self._optimizer = optimizer
        return self

    def take(self) -> None:
        """Take the step, of what this process holds."""
        assert self._optimizer is not None
        self._optimizer.step()

    def clear(self) -> None:
        """Free the gradients."""
        assert self._optimizer is not None
        self._optimizer.zero_grad(set_to_none=True)

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
        """The first process' model holds whole float32 masters inside the block, so that these are what is saved."""

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone() if self._ranks.first else tensor.new_empty(0, device="cpu")
