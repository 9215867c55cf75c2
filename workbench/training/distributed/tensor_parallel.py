"""Tensor parallelism: processes compute the same rows, each a part of the heads and of the MLP's features.

transformers cuts the layers (`base_model_tp_plan`) into DTensors, and PEFT its LoRA with them. Embeddings, norms and
the head are whole in each process. Groups share the rows of a step.

Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.model import add_lora_tp_hooks_dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from workbench.adapters import anatomy
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.runs.ranks import Ranks
from workbench.training.distributed.sharding import Grouped, Trainable, local, mesh, place_model

_ENDS = {"colwise": (0, "lora_B"), "rowwise": (1, "lora_A")}
"""By a layer's style: the dimension of its weight that is cut, and LoRA's matrix that is cut with it."""


def plan(backbone: PretrainedConfig) -> dict[str, str]:
    """How transformers cuts each layer of a block, by its path in the block."""
    of_body = (backbone.get_text_config(decoder=True).base_model_tp_plan or {}).items()
    return {path.removeprefix("layers.*."): style for path, style in of_body if path.startswith("layers.*.")}


class AddedUp(NamedTuple):
    """Elements of each token that processes of a group add up, so that each has the sum."""

    forward: int
    """In a forward pass: outputs of layers that are cut by their inputs."""
    backward: int
    """In a backward pass: gradients of the inputs of layers that are cut by their outputs."""


def added_up(model: nn.Module) -> AddedUp | None:
    """What a group of processes would add up for each token; None where transformers cuts no block, or sends more.

    Each layer sends for itself, also those that read the same inputs, and so does the first or the second matrix of
    its LoRA. Gradients of inputs before which nothing trains are not asked for; an MLP is taken to read what attention
    gives, also in the first block of those that read the same.
    """
    backbone = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
    styles, forward, backward = plan(backbone.config), 0, 0
    if not styles or set(styles.values()) - {*_ENDS, "replicated_with_grad_allreduce"}:
        return None
    asked = trains = any(each.requires_grad for each in backbone.get_input_embeddings().parameters())
    for block in anatomy.decoder_layers(model):
        layers = dict(block.named_modules())
        for path, style in styles.items():
            layer: Any = layers.get(path)
            ranks = sum(layer.r.values()) if isinstance(layer, LoraLayer) else 0
            base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
            trains = trains or any(each.requires_grad for each in block.parameters())
            if style not in _ENDS:
                continue
            if not isinstance(base, nn.Linear):
                return None
            if style == "rowwise":
                forward, asked = forward + base.out_features + ranks, trains
            else:
                backward += ranks + (base.in_features if asked else 0)
    return AddedUp(forward, backward)


def cut(model: nn.Module, section: DistributedConfig, ranks: Ranks) -> None:
    """Bring a waiting model to this process's device block by block, and leave its own part there.

    A process that is alone plans the first part, without the others.
    """
    group = None if ranks.alone else mesh(ranks.world, section.tensor)["group"]
    styles = plan(next(each for each in model.modules() if isinstance(each, PreTrainedModel)).config)
    blocks = set(anatomy.decoder_layers(model))
    for part in place_model(model, ranks):
        for path, style in styles.items() if part in blocks else ():
            layer: Any = part.get_submodule(path)
            lora = isinstance(layer, LoraLayer) and style in _ENDS  # of other styles inputs and outputs are whole
            base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
            matrices = list(getattr(layer, _ENDS[style][1]).values()) if lora else []
            if group is None:
                for each in (base, *matrices) if style in _ENDS else ():
                    _leave_first(each, _ENDS[style][0], section.tensor)
                continue
            for parameter in list(base._parameters):
                ALL_PARALLEL_STYLES[style].shard_param(base, parameter, group)
            ALL_PARALLEL_STYLES[style].install_forward(base, group)
            for matrix in matrices:
                add_lora_tp_hooks_dtensor(matrix, style, group, base_layer=base, module_name=path)


def _leave_first(layer: Any, dimension: int, size: int) -> None:
    """Leave the first of so many parts of a linear layer, as plain tensors."""
    for parameter in layer.parameters(recurse=False):
        if parameter.ndim > dimension:
            parameter.data = parameter.data.chunk(size, dimension)[0].clone()
    layer.out_features, layer.in_features = layer.weight.shape


class TensorParallel(Grouped):
    """The trainable parameters of a model that a group of processes has cut.

    The float32 masters are DTensors, replicated where a parameter is whole: torch's optimizers take no plain tensors
    beside these.
    """

    def __init__(self, whole: Trainable) -> None:
        cut(whole.model, whole.config.distributed, whole.ranks)
        super().__init__(whole)
        trained = self._named
        # A DTensor does not change with `data`: what computes in half precision is another parameter.
        self._computing = {name: nn.Parameter(each.detach().to(whole.compute)) for name, each in trained.items()}
        self._named = {name: nn.Parameter(self._on_mesh(each.detach()).float()) for name, each in trained.items()}
        self._put(self._computing)
        self._connected = False

    def _on_mesh(self, tensor: Tensor) -> Tensor:
        if self._mesh is None or isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter, or its part, that the model multiplies with, by its name in the model."""
        return self._computing

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute, where these do not share their memory."""
        for name, master in self._named.items():
            if (own := self._computing[name]).dtype != master.dtype:
                local(own).copy_(local(master))

    def backward(self, loss: Tensor) -> None:
        """Add to the masters' gradients as they come."""
        for name, parameter in self._computing.items() if not self._connected else ():

            def add_to_master(computed: Tensor, master: nn.Parameter = self._named[name]) -> None:
                assert computed.grad is not None
                gradient = self._on_mesh(computed.grad).float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                computed.grad = None

            # After transformers' own hooks, of the first forward pass: these add up gradients of norms over the group.
            parameter.register_post_accumulate_grad_hook(add_to_master)
        self._connected = True
        loss.backward()

    def _counts(self, name: str) -> bool:
        return isinstance(self._computing[name], DTensor) or self._ranks.rank % self.counted == 0
