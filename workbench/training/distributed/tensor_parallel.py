"""Tensor parallelism: processes compute the same rows, each a part of the heads and of the MLP's features.

transformers cuts the layers (`base_model_tp_plan`) into DTensors, and PEFT its LoRA with them. Embeddings, norms and
the head are whole in each process. Groups share the rows of a step.

Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.model import add_lora_tp_hooks_dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from workbench.adapters import Full, anatomy
from workbench.adapters.method import ExtraParameters, Method
from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.errors import ConfigError
from workbench.models.weight_formats import HALVES
from workbench.runs.ranks import Ranks
from workbench.training.distributed import sequence
from workbench.training.distributed.sharding import Sharded, Trainable, homes, place_model
from workbench.training.optim.optimizer_states import LocalStep

_ENDS = {"colwise": (0, "lora_B"), "rowwise": (1, "lora_A")}
"""By a layer's style: the dimension of its weight that is cut, and LoRA's matrix that is cut with it."""


def plan(backbone: PretrainedConfig) -> dict[str, str]:
    """How transformers cuts each layer of a block, by its path in the block."""
    body = backbone.get_text_config(decoder=True)
    return {path.removeprefix("layers.*."): style for path, style in (body.base_model_tp_plan or {}).items()}


def cut(model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
    """Bring a waiting model to this process's device block by block, and leave its own part there.

    A process that is alone plans the first part, without the others.
    """
    mesh = None if ranks.alone else sequence.mesh(ranks.world, section.tensor)["group"]
    backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
    styles = plan(backbone.config)
    blocks, names = set(anatomy.decoder_layers(model)), {module: name for name, module in model.named_modules()}
    for part in place_model(model):
        for path, style in styles.items() if part in blocks else ():
            owner, _, last = path.rpartition(".")
            parent = part.get_submodule(owner)
            if last in parent._parameters:  # such as the experts of a mixture, which stand in one
                assert mesh is not None, "a mixture is not planned"
                ALL_PARALLEL_STYLES[style].shard_param(parent, last, mesh)
                continue
            layer = part.get_submodule(path)
            if mesh is None:
                _plan_part(layer, style, section.tensor)
            else:
                _cut_layer(layer, style, mesh, name=names[layer])


def _cut_layer(layer: nn.Module, style: str, mesh: DeviceMesh, *, name: str) -> None:
    base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
    for parameter in list(base._parameters):
        ALL_PARALLEL_STYLES[style].shard_param(base, parameter, mesh)
    ALL_PARALLEL_STYLES[style].install_forward(base, mesh)
    if isinstance(layer, LoraLayer) and style in _ENDS:  # of other styles inputs and outputs are whole
        for matrix in getattr(layer, _ENDS[style][1]).values():
            add_lora_tp_hooks_dtensor(matrix, style, mesh, base_layer=base, module_name=name)


def _plan_part(layer: nn.Module, style: str, size: int) -> None:
    """Leave the first of so many parts, as plain tensors."""
    if style not in _ENDS:
        return
    dimension, cut_with = _ENDS[style]
    for name, parameter in layer.named_parameters():
        if "lora_" not in name or cut_with in name:
            along = min(dimension, parameter.ndim - 1)
            if parameter.ndim > dimension:
                parameter.data = parameter.data.chunk(size, along)[0].clone()
    for each in layer.modules():
        if isinstance(each, nn.Linear):
            each.out_features, each.in_features = each.weight.shape


def require(config: TrainingSections, model: PreTrainedModel) -> None:
    """Raise ConfigError where the blocks of a backbone, or what trains in them, cannot be cut."""
    size, body = config.distributed.tensor, model.config.get_text_config(decoder=True)
    if size == 1:
        return
    place = f"distributed.tensor={size}"
    if not plan(model.config):
        raise ConfigError(
            f"{place}: transformers has no plan by which to cut {model.config.model_type} (base_model_tp_plan). "
            "Write distributed={zero: 3}."
        )
    if any(style.startswith(("moe", "packed", "mla")) for style in plan(model.config).values()):
        raise ConfigError(f"{place} was not tried with mixtures of experts. Write distributed={{zero: 3}}.")
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
    if isinstance(config.adapter, Full):
        return
    adapter, starts = config.adapter.to_peft(model, ExtraParameters()), type(config.adapter).initialise
    plain = type(adapter) is LoraConfig and not (adapter.use_dora or adapter.alora_invocation_tokens)
    if not plain or starts is not Method.initialise:
        raise ConfigError(
            f"{place}: PEFT cuts the two matrices of plain LoRA (peft.tuners.lora), and adapter.method="
            f"{config.adapter.method} is more than these. Write adapter.method=lora, or distributed={{zero: 3}}."
        )


class TensorParallel(Sharded):
    """The trainable parameters of a model that a group of processes has cut; whole ones are the same in each.

    The float32 masters are plain tensors, each the part of this process, so that any optimizer can step them.
    """

    def __init__(self, whole: Trainable) -> None:
        section, ranks = whole.config.distributed, whole.ranks
        cut(whole.model, section, ranks)
        super().__init__(whole)
        self._loss, self._bucket_bytes, self._halves = whole.loss, section.bucket_bytes, whole.compute in HALVES
        self._homes = {name: homes(whole.model, parameter) for name, parameter in self._named.items()}
        self._computing, self._like = self._named, {}
        self._named = {name: self._master(parameter) for name, parameter in self._computing.items()}
        if self._halves:
            self._computing = {name: _halved(each, whole.compute) for name, each in self._computing.items()}
            self._put(self._computing)
        self._connected = False
        self._like = {name: each for name, each in self._computing.items() if isinstance(each, DTensor)}
        self._groups = sequence.dealt(section, ranks).world
        mesh = None if ranks.alone else sequence.mesh(ranks.world, section.tensor)
        self._group = None if mesh is None else mesh.get_group("group")
        self._others = mesh.get_group("data") if mesh is not None and self._groups > 1 else None
        self._local: LocalStep

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        """The float32 part of this process; it shares its memory with a parameter that computes in float32."""
        own = _local(parameter.detach())
        return nn.Parameter(own.float().clone() if self._halves else own)

    def _connect(self) -> None:
        """Let gradients be added to the masters as they come, after transformers' own hooks of the first forward pass.

        These add up the gradients of norms inside of attention, each time what came since the last.
        """
        for name, parameter in self._computing.items() if not self._connected else ():

            def add_to_master(computed: Tensor, master: nn.Parameter = self._named[name]) -> None:
                assert computed.grad is not None
                gradient = _local(computed.grad).float() if self._halves else _local(computed.grad)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                computed.grad = None

            parameter.register_post_accumulate_grad_hook(add_to_master)
        self._connected = True

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter, or its part, that the model multiplies with, by its name in the model."""
        return self._computing

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute, where these are others."""
        for name, master in self._named.items() if self._halves else ():
            _local(self._computing[name]).copy_(master)

    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> TensorParallel:
        """From now on the steps of `optimizer` are taken here."""
        self._local = LocalStep(optimizer, self._named)
        return self

    @property
    def counted(self) -> int:
        """Each process of a group computes the rows of the group."""
        return self._ranks.world // self._groups

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The loss, with a graph."""
        return self._loss(batch, scale)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which are added up over groups once in a step."""
        self._connect()
        loss.backward()

    def clip(self, max_norm: float) -> Tensor:
        """Add up the gradients over groups, and clip them by the norm of the whole model's."""
        gradients = {name: master.grad for name, master in self._named.items() if master.grad is not None}
        if self._others is not None:
            self._ranks.add_up(list(gradients.values()), bucket_bytes=self._bucket_bytes, group=self._others)
        cut_square, whole_square = (
            nn.utils.get_total_norm([each for name, each in gradients.items() if (name in self._like) == cut]).square()
            for cut in (True, False)
        )
        if self._group is not None:
            dist.all_reduce(cut_square, group=self._group)
        norm = (cut_square + whole_square).sqrt()
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
        return {name: self._whole(name, master.detach()) for name, master in self._named.items()}

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
        self._put({name: nn.Parameter(value) for name, value in self.values().items()})
        try:
            yield
        finally:
            self._put(self._computing)

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            for module, own in self._homes[name]:
                module._parameters[own] = parameter

    def _whole(self, name: str, own: Tensor) -> Tensor:
        like = self._like.get(name)
        if like is not None and own.ndim == like.ndim:  # a count of steps is not cut
            mesh, placements = like.device_mesh, like.placements
            own = DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
            own = own.full_tensor()
        return self._kept(own)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        like = self._like.get(name)
        if like is None or whole.ndim != like.ndim:
            return whole
        on_device = whole.to(like.device_mesh.device_type)
        return _local(distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None))


def _halved(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    """A parameter in the precision that computes: of a DTensor another one, which `data` does not change."""
    if isinstance(parameter, DTensor):
        return nn.Parameter(parameter.detach().to(compute))
    parameter.data = parameter.data.to(compute)
    return parameter


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
