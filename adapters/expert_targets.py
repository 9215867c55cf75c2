"""Targets beside the experts of a mixture that PEFT takes for the experts themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def taken_for_experts(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of the names of linear layers that PEFT gives to the experts instead, so that LoRA cannot have the layers.

    transformers 5 puts the experts' matrices into one parameter. So that older adapters load, PEFT translates the names
    that they had (gate_proj, up_proj, down_proj), also where dense MLPs or shared experts have them, as in DeepSeek-V3.
    It does so whenever such an adapter is loaded, and so everywhere.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def translated(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one half of what stands in one parameter
            return True
        return bool(config.target_parameters)

    return [name for name in names if translated(name)]
