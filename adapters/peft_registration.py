"""Makes a tuner of ours a PEFT method, so that get_peft_model, save_pretrained and from_pretrained know it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import ClassVar

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method

OURS = (
    "workbench.adapters.inserted.block_expansion_tuner",
    "workbench.adapters.inserted.bottleneck_tuner",
    "workbench.adapters.multiplicative.boft_kernels",
    "workbench.adapters.weights.partial_tuner",
    "workbench.adapters.prompts.prefix_tuner",
    "workbench.adapters.prompts.visual_prompt_tuner",
)
"""Modules that register a tuner, or complete one of PEFT's, when they are imported."""


def register_ours() -> None:
    """Register every tuner of ours, before PEFT reads a configuration that names one."""
    for name in OURS:
        importlib.import_module(name)


@dataclass
class TunerConfig(PeftConfig):
    """Base of the settings of our tuners, each of the type that it is registered as."""

    kind: ClassVar[PeftType]
    modules_to_save: list[str] | None = None
    """Modules that train whole, such as a fresh classification head."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = self.kind


def register_tuner(name: str, config: type[TunerConfig], tuner: type[BaseTuner]) -> None:
    """Register `tuner` under `name` (lower case), its PeftType; its parameters' prefix is `name` + "_".

    PEFT only registers what its enumeration PeftType names, and an enumeration cannot be extended in public:
    the member is added through enum's own maps. PEFT's minor version is pinned for that.
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
    type.__setattr__(PeftType, key, member)  # Enum's own refuses the name of a member
    config.kind = member
    register_peft_method(name=name, config_cls=config, model_cls=tuner)
