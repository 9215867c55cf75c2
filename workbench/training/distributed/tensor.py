"""Steps of a model that processes cut inside of its blocks: each of a group computes the same rows, with its part.

Embeddings, norms and the head are whole in each process. Groups share the rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.errors import ConfigError
from workbench.models import tensor_parallel
from workbench.models.tensor_parallel import Shares, TensorGroup
from workbench.runs.ranks import Ranks
from workbench.training.distributed import sequence
from workbench.training.distributed.sharding import Sharded, Trainable, place_model
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.optimizer_states import LocalStep


def group(section: DistributedConfig, ranks: Ranks) -> TensorGroup:
    """The processes that hold the parts of the same blocks as this one; one that is alone plans the first part."""
    size = section.tensor
    if ranks.alone:
        return TensorGroup(0, size)
    return TensorGroup(ranks.rank % size, size, sequence.mesh(ranks.world, size).get_group("group"))


def cut(model: nn.Module, own: TensorGroup) -> Shares:
    """Bring a waiting model to this process's device block by block, and leave its own part there; returns how."""
    dimensions = tensor_parallel.shares(model)
    waiting = {parameter: dimensions.get(name) for name, parameter in model.named_parameters()}
    for part in place_model(model):
        for parameter in part.parameters():
            if (dimension := waiting.pop(parameter, None)) is not None:
                parameter.data = own.part(parameter.data, dimension)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    tensor_parallel.connect(model, own)
    return dimensions


def require(config: TrainingSections, backbone: PretrainedConfig) -> None:
    """Raise ConfigError where the blocks of a backbone cannot be cut."""
    size, body = config.distributed.tensor, backbone.get_text_config(decoder=True)
    if size == 1:
        return
    place = f"distributed.tensor={size}"
    if backbone.model_type not in tensor_parallel.FAMILIES:
        raise ConfigError(
            f"{place}: {backbone.model_type} is none of the architectures whose blocks are known to be cut right "
            f"({', '.join(tensor_parallel.FAMILIES)}). Write distributed={{zero: 3}}."
        )
    biases = [key for key in ("attention_bias", "mlp_bias") if getattr(body, key, False)]
    if biases:
        raise ConfigError(
            f"{place}: each device would add the bias that model.id={config.model.id} has after attention or MLP "
            f"({', '.join(biases)}). Write distributed={{zero: 3}}."
        )
    heads: int = body.num_attention_heads
    keys: int = getattr(body, "num_key_value_heads", None) or heads
    features: int = body.intermediate_size
    if any(count % size for count in (heads, keys, features)):
        able = [n for n in range(2, keys + 1) if not any(count % n for count in (heads, keys, features))]
        cure = f"distributed.tensor={'|'.join(map(str, able))}" if able else "distributed={zero: 3}"
        raise ConfigError(
            f"{place} gives each device an even part of the heads of attention and of the MLP's features, and "
            f"model.id={config.model.id} has {heads} heads, {keys} of keys and values, and {features} features. "
            f"Write {cure}."
        )


class TensorParallel(Sharded):
    """The trainable parameters of a model that a group of processes has cut; whole ones are the same in each."""

    def __init__(self, whole: Trainable) -> None:
        section, ranks = whole.config.distributed, whole.ranks
        self._group = group(section, ranks)
        self._dimensions = cut(whole.model, self._group)
        self._masters = MasterWeights(whole.model, whole.compute, auxiliary=whole.auxiliary)
        super().__init__(whole)
        self._named = self._masters.named()
        self._loss, self._bucket_bytes = whole.loss, section.bucket_bytes
        self._groups = sequence.dealt(section, ranks).world
        self._others = sequence.mesh(ranks.world, section.tensor).get_group("data") if self._groups > 1 else None
        self._local: LocalStep

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter, or its part, that the model multiplies with, by its name in the model."""
        return self._masters.computing()

    def refresh(self) -> None:
        """Copy the masters into the parameters that compute."""
        self._masters.refresh()

    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> TensorParallel:
        """From now on the steps of `optimizer` are taken here."""
        self._local = LocalStep(optimizer, self._named)
        return self

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The loss, with a graph, times the number of groups: its mean over processes is the sum over groups."""
        return self._loss(batch, scale * self._groups)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which are added up over processes once in a step."""
        self._masters.backward(loss / self._groups)

    def clip(self, max_norm: float) -> Tensor:
        """Add up the gradients over processes, and clip them by the norm of the whole model's."""
        self._add_up()
        cut_ones, whole_ones = list[Tensor](), list[Tensor]()
        for name, gradient in self._gradients().items():
            (whole_ones if self._dimensions.get(name) is None else cut_ones).append(gradient)
        cut_square = self._group.summed(nn.utils.get_total_norm(cut_ones).square())
        norm = (cut_square + nn.utils.get_total_norm(whole_ones).square()).sqrt()
        nn.utils.clip_grads_with_norm_(list(self), max_norm, norm)
        return norm

    def take(self) -> None:
        """Take the step."""
        self._local.take()

    def clear(self) -> None:
        """Free the gradients."""
        self._local.clear()

    def values(self) -> Mapping[str, Tensor]:
        """The float32 masters, whole, on the host of the first process; empty tensors elsewhere."""
        return {name: self._whole(name, master) for name, master in self._named.items()}

    def states(self) -> Mapping[str, Tensor]:
        """Optimizer states as if one process held all."""
        return {key: self._whole(key.rpartition("|")[0], state) for key, state in self._local.states().items()}

    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor] | None = None) -> None:
        """Set the masters and the optimizer's states to this process's parts."""
        own = {key: self._part(key.rpartition("|")[0], state) for key, state in (states or {}).items()}
        self._local.load({name: self._part(name, value) for name, value in values.items()}, own if states else None)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The first process' model holds whole float32 masters inside the block, so that these are what is saved."""
        whole, computing = self.values(), self.computing()
        computed = {name: parameter.data for name, parameter in computing.items()}
        for name, parameter in computing.items():
            parameter.data = whole[name]
        try:
            yield
        finally:
            for name, parameter in computing.items():
                parameter.data = computed[name]

    def _gradients(self) -> dict[str, Tensor]:
        return {name: master.grad for name, master in self._named.items() if master.grad is not None}

    def _add_up(self) -> None:
        """Add up over all processes what each has an addend of, and everything else over groups."""
        addends, others = list[Tensor](), list[Tensor]()
        for name, gradient in self._gradients().items():
            (addends if self._dimensions.get(name, 0) is None else others).append(gradient)
        self._ranks.add_up(addends, bucket_bytes=self._bucket_bytes)
        if self._others is not None:
            self._ranks.add_up(others, bucket_bytes=self._bucket_bytes, group=self._others)

    def _is_cut(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of a parameter is cut with it: a count of steps is not."""
        return self._dimensions.get(name) is not None and tensor.ndim == self._named[name].ndim

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        dimension: Any = self._dimensions.get(name)
        return self._kept(self._group.joined(tensor.detach(), dimension) if self._is_cut(name, tensor) else tensor)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        dimension: Any = self._dimensions.get(name)
        return self._group.part(tensor, dimension) if self._is_cut(name, tensor) else tensor
