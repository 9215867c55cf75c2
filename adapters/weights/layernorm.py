"""LayerNorm tuning: copies of the norms train, on HF PEFT's LN tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, Method, MethodInfo, register
from workbench.adapters.target_modules import short_names
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


@register
class LayerNorm(Method):
    """Every LayerNorm and RMSNorm of the backbone trains, with its bias where it has one.

    Of batch normalisation the factors and biases train; its statistics stay those of pretraining.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "layernorm": MethodInfo("every norm's weight and bias", "Zhao et al. 2023, arXiv:2312.11420"),
    }
    method: Literal["layernorm"] = "layernorm"

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the norms."""
        return short_names(model, _norms(model))

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's LNTuningConfig for this backbone."""
        from peft import LNTuningConfig

        return LNTuningConfig(
            task_type=anatomy.task(model),
            target_modules=self.modules(model),
            modules_to_save=beside.heads or None,
        )


def _norms(model: PreTrainedModel) -> list[str]:
    """Paths of the modules that are called a norm by their class and have a vector of weights."""
    norm_paths, unread = [], anatomy.unread(model)
    for name, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        named = type(module).__name__.endswith(("Norm", "BatchNorm2d"))
        if named and name not in unread and "weight" in weights and weights["weight"].ndim == 1:
            norm_paths.append(name)
    if not norm_paths:
        raise ConfigError(
            f"adapter.method=layernorm: {type(model).__name__} has no norms with weights. Take adapter.method=lora."
        )
    return norm_paths
