"""Bases of our PEFT tuners, and how they become PEFT methods."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method
from torch import nn

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor


class OwnForm:
    """Mixed into a PEFT tuner whose saved adapter differs from the live one: PiSSA and AdaLoRA ship plain LoRA."""

    @abstractmethod
    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Configuration and tensors that stock PEFT loads onto the original backbone.

        Args:
            name: Name of the adapter.
            tensors: Those of the whole model, by name; may be changed and returned. The live configuration may not.
        """


@contextmanager
def as_shipped(model: PeftModel) -> Iterator[dict[str, Tensor] | None]:
    """Yields the tensors that PEFT is to save inside the block, None for its own; sets the configuration to match."""
    tuner = model.base_model
    if not isinstance(tuner, OwnForm):
        yield None
        return
    live = dict(model.peft_config)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    try:
        for name in live:
            model.peft_config[name], tensors = tuner.shipped(name, tensors)
        yield tensors
    finally:
        model.peft_config.update(live)


class ModuleTuner(BaseTuner):
    """Base of tuners that put layers beside modules; `target_modules` are whole paths."""

    @abstractmethod
    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        """Add the adapter `name` to the layer beside `target`, the module at `path`; make the layer if needed."""

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
        self.put(peft_config, adapter_name, target, current_key)

    @abstractmethod
    def take_off(self, *, merge: bool) -> None:
        """Remove our layers from the backbone.

        Args:
            merge: Make what the active ones do a part of the backbone.
        """

    @staticmethod
    def _check_target_module_exists(peft_config: PeftConfig, key: str) -> bool:
        """Compare whole paths; PEFT would also match their ends."""
        return key in peft_config.target_modules  # type: ignore[attr-defined]

    def _check_merge_allowed(self) -> None:
        """Allow merging under tied weights, too, which layers beside modules do not change."""

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:  # PEFT returns the model, and says None
        if merge:
            self._check_merge_allowed()
        if adapter_names is not None:
            self.set_adapter(adapter_names)
        self.take_off(merge=merge)
        return super()._unload_and_optionally_merge(merge=False, progressbar=progressbar)


class UnmergeableTuner(ModuleTuner):
    """A tuner whose layers are no update of weights: children of the modules beside which they work."""

    why: str
    """Why it cannot be merged, and what to do instead."""

    def _check_merge_allowed(self) -> None:
        raise ConfigError(self.why)

    def take_off(self, *, merge: bool) -> None:
        kind: Any = self.tuner_layer_cls
        for module in list(self.model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, kind):
                    layer.remove()
                    delattr(module, name)


OURS = (
    "workbench.adapters.inserted.block_expansion_tuner",
    "workbench.adapters.inserted.bottleneck_tuner",
    "workbench.adapters.multiplicative.boft_kernels",
    "workbench.adapters.weights.partial_tuner",
    "workbench.adapters.prompts.prefix_tuner",
    "workbench.adapters.prompts.visual_prompt_tuner",
)
"""Modules that register a tuner, or patch one of PEFT's, when they are imported."""


def register_ours() -> None:
    """Register all our tuners, before PEFT reads a configuration that names one."""
    for name in OURS:
        importlib.import_module(name)


@dataclass
class TunerConfig(PeftConfig):
    """Base of our tuners' configurations, whose type `register_tuner` sets."""

    kind: ClassVar[PeftType]
    modules_to_save: list[str] | None = None
    """Modules that train whole, such as a fresh classification head."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = self.kind


def register_tuner(name: str, config: type[TunerConfig], tuner: type[BaseTuner]) -> None:
    """Register `tuner` under `name` (lower case), its PeftType; its parameters' prefix is `name` + "_".

    PEFT only registers members of its enumeration PeftType, which has no public way to be extended: the member is added
    through enum's own maps. PEFT's minor version is pinned for that.
    """
    key = name.upper()
    if key in PeftType.__members__:
        config.kind = PeftType[key]
        return
    member = str.__new__(PeftType, key)
    member._name_, member._value_ = key, key
    PeftType._member_map_[key] = member
    PeftType._value2member_map_[key] = member
    PeftType._member_names_.append(key)
    type.__setattr__(PeftType, key, member)  # Enum refuses to set a member's name
    config.kind = member
    register_peft_method(name=name, config_cls=config, model_cls=tuner)
