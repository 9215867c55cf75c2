"""BEFT: what is added to the outputs of layers with a bias, on HF PEFT's BEFT tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from workbench.adapters.method import ExtraParameters, MethodInfo, register
from workbench.adapters.target_modules import OnLayers, linear_layers

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


@register
class Beft(OnLayers):
    """b + a vector for the biases of the chosen layers; zero at the start. The paper takes those of the values."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "beft": MethodInfo("biases of the chosen layers", "Huang et al. 2025, arXiv:2509.15974"),
    }
    changes_transposed: ClassVar[bool] = False
    method: Literal["beft"] = "beft"

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse layers without biases, whose adapter could not be merged."""
        if reason := super().refusal(model):
            return reason
        layers = linear_layers(model, self.targets).items()
        without = next((path for path, layer in layers if layer._parameters.get("bias") is None), None)
        if without is None:
            return None
        return (
            f"{without} of {type(model).__name__} has no bias. Write adapter.targets as a list of layers with one, "
            "or take adapter.method=ia3."
        )

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's BeftConfig for this backbone."""
        from peft import BeftConfig

        return BeftConfig(**self.common(model, beside))
