"""Steps of a pipeline: each process holds a stretch of blocks, computes it, and takes the steps of what trains in it.

Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473 (1F1B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.models import backbones
from workbench.runs.ranks import Ranks
from workbench.training.distributed import sequence
from workbench.training.distributed.pipeline_stage import Stage, line
from workbench.training.distributed.sharding import Sharded, Trainable, homes
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import optimizer_states

T = TypeVar("T")


class PipelineReader:
    """A model in evaluation mode whose stages processes read together, all pipelines the same rows."""

    def __init__(self, model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
        self._stage, self._ranks = Stage(model, line(section, ranks)), ranks

    def __call__(self, work: Callable[[], T]) -> T:
        """Result of `work` where the head is; all processes call it together."""
        return self._ranks.agreed(self._stage.read(work))


class Pipelined(Sharded):
    """The trainable parameters of a model whose blocks are dealt to processes: each has masters and states of its own.

    Those of others have no elements here, so that names, groups and their order are those of one process.
    """

    def __init__(self, whole: Trainable) -> None:
        super().__init__(whole)
        self._homes = {name: homes(whole.model, parameter) for name, parameter in self._named.items()}
        dimensions = {name: parameter.ndim for name, parameter in self._named.items()}
        own = line(whole.config.distributed, whole.ranks, whole.compute)
        self._whole, self.stage = whole, Stage(whole.model, own)
        self.pipelines = sequence.dealt(whole.config.distributed, whole.ranks)
        """The pipelines as they share the rows of a step."""
        self._masters = MasterWeights(whole.model, whole.compute)
        self._own, device = self._masters.named(), backbones.device()
        others = {name: nn.Parameter(torch.empty((0,) * ndim, device=device)) for name, ndim in dimensions.items()}
        self._named = {name: self._own.get(name, other) for name, other in others.items()}

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter that this stage multiplies with; those of others have no elements."""
        return self._named | self._masters.computing()

    def refresh(self) -> None:
        """Copy this stage's masters into the parameters that compute."""
        self._masters.refresh()

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """Raise AssertionError: a stage has no loss of one micro-batch; `PipelineSteps` computes those of a step."""
        raise AssertionError("a pipeline computes whole steps")

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients of this stage."""
        loss.backward()

    def loss(self, batch: MicroBatch, scale: float, received: Tensor | None) -> Tensor:
        """Hidden states that this stage gives for a micro-batch, with a graph; of the last stage, the loss.

        Args:
            received: Those of the stage before this one.
        """
        left: list[Tensor] = []
        with self.stage.routed(lambda like: like if received is None else received, left.append):
            loss = self._whole.loss(batch if self.stage.line.last else _unlabelled(batch), scale)
        return loss if self.stage.line.last else left[0]

    def add_up(self) -> None:
        """Sum the gradients over pipelines, and those of embeddings that are the head over the two stages."""
        line = self.stage.line
        gradients = {name: _gradient(master) for name, master in self._own.items()}
        if line.others is not None:
            bucket = self._whole.config.distributed.bucket_bytes
            self._ranks.add_up(list(gradients.values()), bucket_bytes=bucket, group=line.others)
        for name in sorted(self.stage.shared & gradients.keys()):
            other, own = 0 if line.last else line.stages - 1, gradients[name]
            received = line.swap(own, other, torch.empty_like(own), other)
            assert received is not None
            own += received

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm of the gradients of all stages."""
        stage, stages = self.stage.line.stage, self.stage.line.stages
        counted = [self._own[name] for name in self._own if self.stage.stage_of[name] == stage]
        norm = nn.utils.get_total_norm([each.grad for each in counted if each.grad is not None])
        # The first pipeline's, summed in one order: the same bits everywhere.
        squares = [each**2 for each in self._ranks.gathered(float(norm))[:stages]]
        total = torch.tensor(math.sqrt(math.fsum(squares)), device=norm.device)
        nn.utils.clip_grads_with_norm_(list(self._own.values()), max_norm, total)
        return total

    def reading(self, work: Callable[[], T]) -> T:
        """Result of `work` where the head is."""
        return self._ranks.agreed(self.stage.read(work))

    def values(self) -> Mapping[str, Tensor]:
        """The masters of all stages on the host of the first process; elsewhere this stage's."""
        return self._gathered({name: master.detach() for name, master in self._own.items()})

    def states(self) -> Mapping[str, Tensor]:
        """Optimizer states of all stages on the host of the first process."""
        assert self._optimizer is not None
        return self._gathered(optimizer_states.state_tensors(self._optimizer, self._named))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor] | None = None) -> None:
        """Set this stage's masters and optimizer states."""
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
        stage_of, line = self.stage.stage_of, self.stage.line
        answered = {key: each for key, each in own.items() if stage_of.get(_name(key), line.stage) == line.stage}
        listed = [(key, each.shape, each.dtype, each.device.type) for key, each in answered.items()]
        by_rank = self._ranks.gathered(listed)[: line.stages]
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


def _unlabelled(batch: MicroBatch) -> MicroBatch:
    """The same rows, of which nothing is predicted."""
    weights = None if batch.weights_N is None else batch.weights_N[:0]
    return replace(batch, positions_N=batch.positions_N[:0], labels_N=batch.labels_N[:0], weights_N=weights)


def _gradient(master: nn.Parameter) -> Tensor:
    """Gradient of a master; zeros where no row came to it here."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _name(key: str) -> str:
    """The parameter of a key of optimizer states, or of values."""
    return key.rpartition("|")[0] or key
