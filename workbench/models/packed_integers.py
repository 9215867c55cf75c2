"""GPTQ and AWQ: integers of a few bits, packed in words of 32, and the numbers that they stand for.

A weight is `scale * (integer - zero)`, with one scale and one zero for each output and each group of inputs (Frantar et
al. 2023, arXiv:2210.17323; Lin et al. 2024, arXiv:2306.00978). How many bits an integer has follows from the sizes of
the tensors. The formats' own packages compute with packed weights on some accelerators; here nothing does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, _IdentityOp
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
METHOD: Any = "packed_integers"
"""`quant_method` by which transformers finds the reader of this file."""


class PackedLayout(NamedTuple):
    """How a format packs."""

    inputs_packed: bool
    """Whether a word of the weights holds integers of neighbouring inputs; else of neighbouring outputs."""
    order: tuple[int, ...] = (0,)
    """Of as many neighbouring outputs as it has entries, where in a word each one's integer is."""
    offset: int = 0
    """What is added to a zero that was read."""
    bits: tuple[int, ...] = (2, 3, 4, 8)
    """How many an integer may have."""


LAYOUTS = {
    ("gptq", "gptq"): PackedLayout(True, offset=1),
    ("gptq", "gptq_v2"): PackedLayout(True),
    ("awq", "gemm"): PackedLayout(False, order=(0, 4, 1, 5, 2, 6, 3, 7), bits=(4,)),
}
"""By `quant_method` and the name of the layout, in config.json; the first of a method where it names none."""


def layout_of(method: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Key of a layout; `settings`: section quantization_config of config.json. Raises ValueError: not in LAYOUTS."""
    known = {name: layout for (each, name), layout in LAYOUTS.items() if each == method}
    named = (settings.get(key) for key in ("checkpoint_format", "format", "version"))
    name = str(next(filter(None, named), next(iter(known)))).lower()
    if name not in known:
        raise ValueError(f"in the layout {name}, which nothing reads here (only {', '.join(known)})")
    if (bits := settings.get("bits", 4)) not in known[name].bits:
        raise ValueError(f"to {bits} bits, which nothing reads here (only {', '.join(map(str, known[name].bits))})")
    return method, name


def integers(words: Tensor, bits: int) -> Tensor:
    """Unpack integers without sign that stand one after the other in words, the lowest bits first.

    Args:
        words: (N, M) int32; each column is a stream of N words.
        bits: Of an integer, 1 to 31; one may begin in a word and end in the next.

    Returns:
        (32 N / bits, M) int32.
    """
    first = torch.arange(len(words) * 32 // bits, device=words.device) * bits
    word, shift = first // 32, (first % 32).int()[:, None]
    mask = 2**bits - 1
    found: Tensor = (words[word] >> shift) & mask
    cut = (shift[:, 0] + bits > 32).nonzero()[:, 0]
    here = 32 - shift[cut]
    found[cut] = (found[cut] & ((1 << here) - 1)) | ((words[word[cut] + 1] << here) & mask)
    return found


def numbers(
    layout: PackedLayout, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """What the tensors of one layer stand for. I: inputs, O: outputs, G: groups of inputs, B: bits of an integer.

    Args:
        layout: Of the format.
        qweight: (I B / 32, O) int32 where inputs are packed, else (I, O B / 32).
        qzeros: (G, O B / 32) int32.
        scales: (G, O), of any float dtype.
        g_idx: (I,) the group of each input; None: groups are of neighbours.

    Returns:
        (O, I) float32.
    """
    outputs = scales.shape[1]
    bits = qzeros.shape[1] * 32 // outputs

    def along_outputs(words: Tensor) -> Tensor:
        parts = integers(words.T, bits).unflatten(0, (-1, len(layout.order)))
        ordered: Tensor = parts[:, list(layout.order)].flatten(0, 1)
        return ordered

    weights_OI = integers(qweight, bits).T if layout.inputs_packed else along_outputs(qweight)
    zeros_OG = (along_outputs(qzeros) + layout.offset) & (2**bits - 1)
    inputs = weights_OI.shape[1]
    if g_idx is None:
        g_idx = torch.arange(inputs, device=qweight.device) // (inputs // len(scales))
    group = g_idx.long()
    dense_OI: Tensor = (weights_OI - zeros_OG[:, group]).float() * scales.T.float()[:, group]
    return dense_OI


@register_quantization_config(METHOD)
class _Settings(QuantizationConfigMixin):
    """What the reader has to know of config.json."""

    def __init__(self, layout: tuple[str, str], **_: Any) -> None:
        self.quant_method, self.layout, self.dequantize = METHOD, layout, True


@register_quantizer(METHOD)
class _PackedReader(HfQuantizer):
    """Dequantises while transformers reads."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self.serialized_names = {"weight": ["weight", *_PARTS]}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantising}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Dequantising(ConversionOps):
    """Dequantises one layer, or the layers that a converter of the model joins, such as experts."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Any, full_layer_name: Any = None, model: Any = None, **_: Any) -> Any:  # type: ignore[override]
        layout = LAYOUTS[self.hf_quantizer.quantization_config.layout]
        module, _name = get_module_from_name(model, full_layer_name)
        dtype = model.get_parameter(full_layer_name).dtype
        turned = Conv1D in (
            type(module),
            getattr(module, "source_cls", None),
        )  # bitsandbytes' layers say what they were
        found = {}
        for key, plain in input_dict.items():
            if key.endswith("weight") and not key.endswith("qweight"):
                found[key] = [each.to(dtype) for each in plain]
        for key in [key for key in input_dict if key.endswith("qweight")]:
            stem = key.removesuffix("qweight")
            parts = [input_dict[stem + name] for name in _PARTS if stem + name in input_dict]
            dense = (numbers(layout, *each).to(dtype) for each in zip(*parts, strict=True))
            found[f"{stem}weight"] = [each.T.contiguous() if turned else each.contiguous() for each in dense]
        return {full_layer_name: found["weight"][0]} if "weight" in found else found

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()
