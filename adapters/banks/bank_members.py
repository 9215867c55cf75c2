"""Members of a bank that are more than a low-rank product: each has layers of its own over the shared weights.

PEFT attaches such an adapter to a copy of the backbone's modules that shares the weights' tensors. So it starts,
computes and is saved as if it were alone. Only the changed layers of the copy are used: a layer of the backbone sends
the rows of the member through the member's layer (`bank_layers.Routed`), and bottleneck networks beside layers read and
change the rows of their member.

Shapes: B rows of all members, L tokens of each, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.banks.bank_layers import Routed, Routing, joined
from workbench.adapters.inserted.bottleneck_tuner import CHILD, KINDS, BottleneckLayer, hidden_of, with_hidden
from workbench.adapters.precision.quantised_weights import share_latest

ALONE = "default"
"""PEFT's name of the only adapter of a copy."""
_SHARED = ("base_layer", "original_module")
"""Children of PEFT's layers that belong to the backbone."""


class RoutedLayer(Routed, nn.Module, BaseTunerLayer):
    """A module of the backbone in which some members have layers of their own; rows of others go through the module."""

    def __init__(self, module: nn.Module, routing: Routing) -> None:
        super().__init__()
        self.base_layer = module
        self.routing = routing
        self.own = {}
        self.merged_adapters = []

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module that a backbone reads, such as the strides of a convolution."""
        modules = self.__dict__.get("_modules", {})
        if name in modules or "base_layer" not in modules:
            return super().__getattr__(name)
        return getattr(modules["base_layer"], name)

    def shared(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        output: Tensor = self.base_layer(x, *more, **named)
        return output


class RoutedHead(Routed, ModulesToSaveWrapper):
    """A module that trains whole, such as a classification head: each row goes through its member's own."""

    def shared(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.routing.is_packed and x.ndim > 2 and len(x) == 1:  # a sequence (1, T, ...) that a head of tokens reads
            parts = [self.modules_to_save[member](x[:, where]) for member, where in self.routing.token_slices(x)]
            return joined(parts, dim=1)
        parts = [self.modules_to_save[member](x[where]) for member, where in self.routing.slices(x)]
        return joined(parts, dim=0)


class BareBackbone(nn.Module):
    """A backbone whose modules have the paths that they have in PEFT's models, for a bank without plain LoRA."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str) -> Any:
        """Attributes of the backbone, such as its configuration."""
        modules = self.__dict__.get("_modules", {})
        return super().__getattr__(name) if name in modules else getattr(modules["base_model"].model, name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        model: Any = self.base_model.model
        return model(*inputs, **named)


class MemberParts(nn.ModuleDict):
    """The parts of a module that belong to one member: the module's child of the member's name."""


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a backbone's modules that shares its parameters and buffers."""
    kept: list[Any] = list(chain(model.parameters(), model.buffers()))
    for module in model.modules():  # scales of quantised weights, which stand beside them
        kept += [each for name in ("state", "quant_state") if (each := vars(module).get(name)) is not None]
    return copy.deepcopy(model, {id(each): each for each in kept})


class BankMembers:
    """Puts the changed layers of members into the backbone that all members share.

    Args:
        backbone: The backbone that computes.
        bare: A copy of it, made before anything was attached.
    """

    def __init__(self, backbone: PreTrainedModel, bare: PreTrainedModel, routing: Routing) -> None:
        self.backbone, self.bare, self._routing = backbone, bare, routing
        self.models: dict[str, PeftModel] = {}
        """Copies with their adapters, by member."""
        self._beside: dict[tuple[str, str], RoutedBottlenecks] = {}
        """Networks beside modules, by path and kind."""

    def add(self, member: str, attached: PeftModel) -> None:
        """Add a member: an adapter over a copy of the backbone."""
        self.models[member] = attached
        parts: list[nn.Module] = []
        for path, own in list(_changed(attached.get_base_model(), self.bare)):
            networks = {name: each for name, each in own._modules.items() if isinstance(each, BottleneckLayer)}
            if networks:
                held = MemberParts(networks)
                self.backbone.get_submodule(path).add_module(member, held)
                for name, layer in networks.items():
                    kind = name.removesuffix(CHILD)
                    layer.remove()
                    config: Any = attached.peft_config[ALONE]
                    key = (path, kind)
                    if key not in self._beside:
                        self._beside[key] = RoutedBottlenecks(
                            path, kind, self._routing, read=config.beside.get(path, path)
                        )
                    self._beside[key].layers[member] = layer
            else:
                held = self._layer(member, path, own)
            parts.append(held)
        for each in self._beside.values():
            each.put(self.backbone)
        reached = {id(each) for part in parts for each in part.parameters()}
        lost = [name for name, each in attached.named_parameters() if each.requires_grad and id(each) not in reached]
        assert not lost, f"no layer of the bank holds {', '.join(lost[:4])}"

    def leave(self, member: str) -> None:
        """Forget a member."""
        del self.models[member]
        for module in list(self.backbone.modules()):
            module._modules.pop(member, None)
            if isinstance(module, Routed):
                module.own.pop(member, None)
        for each in self._beside.values():
            each.layers.pop(member, None)

    def train(self) -> None:
        """Switch the members' layers to training mode, without norms and heads."""
        routed = (each for each in self.backbone.modules() if isinstance(each, Routed))
        own = (each for layer in routed for each in layer.own.values() if not isinstance(each, ModulesToSaveWrapper))
        networks = (layer for each in self._beside.values() for layer in each.layers.values())
        for module in (module for each in chain(own, networks) for module in each.modules()):
            module.training = not anatomy.is_norm(module)

    def _layer(self, member: str, path: str, own: Any) -> MemberParts:
        """Send the member's rows at `path` through its layer; returns the parts of it that belong to the member."""
        layer: Any = self.backbone.get_submodule(path)
        if not isinstance(layer, Routed):
            beside = {name: each for name, each in layer._modules.items() if isinstance(each, MemberParts)}
            for name in beside:
                del layer._modules[name]
            layer = RoutedLayer(layer, self._routing)
            layer._modules.update(beside)  # as if they had come later
            self.backbone.set_submodule(path, layer)
        original = self.bare.get_submodule(path)
        names = [name for name in own._modules if name not in _SHARED and name not in original._modules]
        held = MemberParts({name: own._modules[name] for name in names})
        for name in _SHARED:
            if name in own._modules:
                own._modules[name] = getattr(layer, name) if name in layer._modules else layer.base_layer
        layer.own[member] = own
        share_latest(own, self._routing.latest)
        layer.add_module(member, held)
        return held


def _changed(own: nn.Module, bare: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in which a model with an adapter differs from the same without one, by path."""
    if type(own) is not type(bare):
        yield path, own
        return
    if own._modules.keys() != bare._modules.keys():
        yield path, own
    for name, child in bare._modules.items():
        other = own._modules[name]
        if child is not None and other is not None:
            yield from _changed(other, child, f"{path}.{name}" if path else name)


class RoutedBottlenecks:
    """The bottleneck networks of one kind at one module: each changes the rows of its member.

    Args:
        read: Path of the module whose input is read by networks `beside`.
    """

    def __init__(self, path: str, kind: str, routing: Routing, *, read: str) -> None:
        self.path, self.kind, self.read = path, kind, read
        self.layers: dict[str, BottleneckLayer] = {}
        """By member."""
        self._routing = routing
        self._handles: list[RemovableHandle] = []
        self._input: Tensor | None = None

    def put(self, backbone: PreTrainedModel) -> None:
        """Hook the modules that are at the paths now."""
        for handle in self._handles:
            handle.remove()
        changed = backbone.get_submodule(self.path)
        self._handles = [changed.register_forward_hook(self._add)]
        if issubclass(KINDS[self.kind], KINDS["beside"]):
            self._handles.append(backbone.get_submodule(self.read).register_forward_pre_hook(self._keep))

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._input = inputs[0]

    def _add(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        y_BLD, (kept, self._input) = hidden_of(output), (self._input, None)  # held no longer than needed
        read = {"after": y_BLD, "within": inputs[0] if inputs else None, "beside": kept}[self.kind]
        dimension, runs = self._routing.runs(y_BLD, self.layers)
        if read is None or all(run.member is None for run in runs):
            return output
        parts: Sequence[Tensor] = y_BLD.split([run.where.stop - run.where.start for run in runs], dim=dimension)
        others, more = self._routing.runs(read, self.layers)
        norm = module.get_base_layer() if isinstance(module, RoutedLayer) else module
        added = []
        for run, part, place in zip(runs, parts, more, strict=True):
            if run.member is not None:
                layer = self.layers[run.member]
                x = read.narrow(others, place.where.start, place.where.stop - place.where.start)
                with self._routing.within(run):
                    if self.kind == "within":
                        part = norm.forward(x + layer.update(ALONE, part))
                    else:
                        part = part + layer.update(ALONE, x)
            added.append(part)
        return with_hidden(output, torch.cat(added, dim=dimension))
