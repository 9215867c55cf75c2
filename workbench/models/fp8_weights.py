"""`model.weights=fp8`: linear layers in FP8, rounded one tensor at a time as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from workbench.adapters.precision import fp8_layers
from workbench.adapters.precision.fp8_layers import Fp8Linear

_METHOD: Any = "fp8_rows"


class Fp8Settings(QuantizationConfigMixin):
    """Which layers keep their precision."""

    def __init__(self, left: Sequence[str]) -> None:
        self.quant_method, self.left = _METHOD, list(left)


@register_quantizer(_METHOD)
class Fp8Quantizer(HfQuantizer):
    """Rounds the linear layers of the blocks while transformers reads them."""

    quantization_config: Any

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        replace(model, self.quantization_config)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, Fp8Linear) and name == "weight"

    def get_quantize_ops(self) -> Any:
        return _Rounding()

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        fp8_layers.unpack(model, dtype or torch.float32)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Rounding(ConversionOps):
    """Rounds one tensor, on the device that it was read to."""

    def convert(self, input_dict: Any, model: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        ((path, values),) = input_dict.items()
        layer, _ = get_module_from_name(model, path)
        value = values[0] if isinstance(values, list) else values
        rows, scale = fp8_layers.rounded(value.T if layer.transposed else value)
        return {path: rows.view(torch.uint8), f"{path}_scale": scale[:, 0].contiguous()}


def replace(model: nn.Module, settings: Fp8Settings) -> None:
    """Replace the linear layers that are rounded, on the meta device."""
    for path, layer in list(model.named_modules()):
        if path not in settings.left and fp8_layers.takes(layer):
            model.set_submodule(path, fp8_layers.pack(layer))
