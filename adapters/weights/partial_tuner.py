"""A PEFT tuner that trains copies of a module's own parameters, and leaves the parameters as they are.

The module stays in place: its class gets a property for each of these parameters, which reads the active copy. So
`module.weight` is what computes, in a forward pass, when activations are recomputed, and when a parent reads a child's
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workbench.adapters import anatomy
from workbench.adapters.peft_tuners import TunerConfig, register_tuner


@dataclass
class PartialConfig(TunerConfig):
    """The parameters that train, and the modules that own them."""

    target_modules: list[str] | str | None = None
    """Paths of the modules, or ends of their paths, that own the parameters."""
    parameter_names: list[str] | None = None
    """Names of the parameters inside their module; a module may lack some."""
    exclude_modules: list[str] | None = None
    """Modules to skip; PEFT reads this field of every configuration."""
    trainable_token_indices: dict[str, list[int]] | None = None
    """Rows of embeddings that train beside."""


class PartialLayer(nn.Module, BaseTunerLayer):
    """The copies of one module's parameters; it is the module's child `partial`.

    Args:
        owner: The module; its class is replaced by a subclass.
        computed: The precision in which the backbone computes; it may store less.
    """

    adapter_layer_names = ("partial_copies",)

    def __init__(self, owner: nn.Module, computed: torch.dtype) -> None:
        super().__init__()
        self.partial_copies = nn.ModuleDict()
        self.original_class = type(owner)
        self.computed = computed
        # In a tuple, because a module that is an attribute becomes a child.
        self._owner = (owner,)
        self.merged_adapters = []

    @property
    def base_layer(self) -> nn.Module:
        """The module whose parameters are copied."""
        return self._owner[0]

    def add(self, adapter: str, names: list[str], *, inference_mode: bool) -> None:
        """Copy the parameters `names` for one more adapter."""
        owned = self.base_layer._parameters
        originals = {name: own for name in names if (own := owned.get(name)) is not None}
        copies = {name: nn.Parameter(own.detach().to(self._dtype(own), copy=True)) for name, own in originals.items()}
        self.partial_copies[adapter] = nn.ParameterDict(copies)
        every = {name for held in self.partial_copies.values() for name, _ in held.named_parameters()}
        self.base_layer.__class__ = _reading_copies(self.original_class, tuple(sorted(every)))
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Make one adapter active; a weight cannot have two values."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if len([name for name in names if name in self.partial_copies]) > 1:
            raise ValueError(f"{', '.join(names)} replace the same weights. Activate one of them at a time.")
        super().set_adapter(names, inference_mode=inference_mode)

    def value(self, name: str) -> Tensor | None:
        """The tensor that the module computes with: the active copy of a parameter, or its own."""
        own = self.base_layer._parameters[name]
        # FSDP2 reads its shards (DTensor); when the module computes, whole weights are in their place.
        if own is None or self.disable_adapters or isinstance(own, DTensor):
            return own
        for adapter in self.active_adapters:
            if adapter in self.partial_copies:
                copies: Any = self.partial_copies[adapter]
                if name in copies:
                    copy: Tensor = copies[name]
                    return copy.to(self._dtype(own))
        return own

    def _dtype(self, own: Tensor) -> torch.dtype:
        """The precision of a copy: float32 where the backbone stores this parameter so, else `computed`."""
        return torch.float32 if own.dtype == torch.float32 else self.computed

    def remove(self, *, merge: bool) -> None:
        """Remove the copies; with `merge` the module keeps the values of the active ones."""
        owner = self.base_layer
        values = {name: self.value(name) for name in owner._parameters} if merge else {}
        owner.__class__ = self.original_class
        del owner.partial
        for name, value in values.items():
            if value is not None and value is not owner._parameters[name]:
                # A new parameter, so that tied weights are not overwritten.
                owner.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))


class PartialModel(BaseTuner):
    """Tuner that trains copies of modules' own parameters."""

    prefix = "partial_"
    tuner_layer_cls = PartialLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  # PEFT declares it so

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        assert isinstance(peft_config, PartialConfig)
        layer = target._modules.get("partial")
        if not isinstance(layer, PartialLayer):
            layer = PartialLayer(target, computed(self.model))
            layer.set_adapter(self.active_adapters)
            target.partial = layer
        layer.add(adapter_name, peft_config.parameter_names or [], inference_mode=peft_config.inference_mode)

    def _check_tied_modules(self, model: nn.Module, peft_config: PeftConfig) -> None:
        """Skip PEFT's warning about tied heads: a copy is untied, also when it is merged."""

    def _check_merge_allowed(self) -> None:
        """Allow merging under tied weights, for the same reason."""

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Replace a child and nothing else: PEFT also moves its weight, and a head of several layers has none."""
        setattr(parent, child_name, new_module)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Leave copies in the precision of the computation: a float32 head would be cast at every token."""

    def _unload_and_optionally_merge(  # type: ignore[override]  # PEFT's annotation is wrong
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if adapter_names is not None:
            self.set_adapter(adapter_names)
        ties = _ties(self.model)
        for layer in [module for module in self.model.modules() if isinstance(module, PartialLayer)]:
            layer.remove(merge=merge)
        if _ties(self.model) < ties:
            self.model.config.tie_word_embeddings = False
        super()._unload_and_optionally_merge(merge=merge, progressbar=progressbar, safe_merge=safe_merge)
        unloaded: nn.Module = self.model
        return unloaded


_READING: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
"""One subclass for all modules of a class: torch.compile guards on the class, and would recompile each block."""


def _reading_copies(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the same name whose parameters `names` read what its `PartialLayer` says."""

    def reader(name: str) -> property:
        return property(lambda module: module.partial.value(name))

    if (cls, names) not in _READING:
        _READING[cls, names] = type(cls.__name__, (cls,), {name: reader(name) for name in names})
    return _READING[cls, names]


def computed(model: nn.Module) -> torch.dtype:
    """The precision in which the backbone computes; for pictures and sound the one in which it is stored."""
    if not anatomy.reads_tokens(model):
        return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    embedded: Tensor = embedding(torch.zeros(1, dtype=torch.int64, device=embedding.weight.device))
    return embedded.dtype


def _ties(model: nn.Module) -> int:
    """Number of tied weights: further names of the same parameter."""
    named = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return len(named) - len(set(named))


register_tuner("partial", PartialConfig, PartialModel)
