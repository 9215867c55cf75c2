"""GPTQ, AWQ, HQQ and AQLM: integers of a few bits, and the numbers that they stand for.

Of the first three a weight is `scale * (integer - zero)`. GPTQ and AWQ have one scale and one zero for each output and
each group of inputs (Frantar et al. 2023, arXiv:2210.17323; Lin et al. 2024, arXiv:2306.00978); HQQ has them for groups
of neighbours in the flat weight, and zeros between integers (Badri and Shaji 2023, mobiusml.github.io/hqq_blog). Of
AQLM a block of weights is a sum of vectors, one of each codebook, and the integers are their places there (Egiazarian
et al. 2024, arXiv:2401.06118). How many bits an integer has follows from the tensors. The formats' own packages compute
with packed weights on some accelerators; here nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, _IdentityOp
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD: Any = "packed_integers"
"""`quant_method` by which transformers finds the reader of this file."""


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


def grouped_numbers(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    inputs_packed: bool,
    order: tuple[int, ...] = (0,),
    offset: int = 0,
) -> Tensor:
    """What the tensors of a layer of GPTQ or AWQ stand for. I: inputs, O: outputs, G: groups of inputs, B: bits.

    Args:
        qweight: (I B / 32, O) int32 where inputs are packed, else (I, O B / 32).
        qzeros: (G, O B / 32) int32.
        scales: (G, O), of any float dtype.
        g_idx: (I,) the group of each input; None: groups are of neighbours.
        inputs_packed: Whether a word of `qweight` holds integers of neighbouring inputs; else of neighbouring outputs.
        order: Of as many neighbouring outputs as it has entries, where in a word each one's integer is.
        offset: What is added to a zero that was read.

    Returns:
        (O, I) float32.
    """
    outputs = scales.shape[1]
    bits = qzeros.shape[1] * 32 // outputs

    def along_outputs(words: Tensor) -> Tensor:
        parts = integers(words.T, bits).unflatten(0, (-1, len(order)))
        ordered: Tensor = parts[:, list(order)].flatten(0, 1)
        return ordered

    weights_OI = integers(qweight, bits).T if inputs_packed else along_outputs(qweight)
    zeros_OG = (along_outputs(qzeros) + offset) & (2**bits - 1)
    inputs = weights_OI.shape[1]
    if g_idx is None:
        g_idx = torch.arange(inputs, device=qweight.device) // (inputs // len(scales))
    group = g_idx.long()
    dense_OI: Tensor = (weights_OI - zeros_OG[:, group]).float() * scales.T.float()[:, group]
    return dense_OI


def flat_numbers(words: Tensor, scale: Tensor, zero: Tensor, shape: Tensor, packing: Tensor) -> Tensor:
    """What the tensors of a layer of HQQ stand for. R, C: rows and columns of the flat weight, cut into groups.

    Args:
        words: (R / integers in a word, rounded up; C) uint8 or int32, or any dtype that these bytes are viewed in. The
            highest bits are of the first rows.
        scale: (R, 1) where groups are rows, (1, C) where they are columns, of any float dtype.
        zero: Like `scale`.
        shape: The numbers of outputs and of inputs.
        packing: Letters, such as 4bit_u8: bits of an integer, and the word that holds it.

    Returns:
        (outputs, inputs) float32.
    """
    bits, _, word = bytes(packing.tolist()).decode().partition("bit_")
    words = words.view({"u8": torch.uint8, "32": torch.int32}[word])
    each = int(bits)
    places = range(words.itemsize * 8 // each)
    rows_RC = torch.cat([(words >> each * place) & (2**each - 1) for place in reversed(places)])
    outputs, inputs = shape.tolist()
    rows_RC = rows_RC[: outputs * inputs // words.shape[1]]
    return ((rows_RC.float() - zero.float()) * scale.float()).reshape(outputs, inputs)


def codebook_numbers(codes: Tensor, codebooks: Tensor, scales: Tensor) -> Tensor:
    """What the tensors of a layer of AQLM stand for. O, I: blocks of outputs and inputs, K: codebooks, V: vectors.

    Args:
        codes: (O, I, K) places in the codebooks, of an integer dtype with sign, in which the upper half is negative.
        codebooks: (K, V, outputs of a block, inputs of a block), of any float dtype. V is a power of 2.
        scales: (O, 1, 1, 1) or (O, I, 1, 1), of any float dtype.

    Returns:
        (outputs, inputs) float32.
    """
    places = codes.long() & (codebooks.shape[1] - 1)
    blocks: Tensor = sum(book.float()[places[..., index]] for index, book in enumerate(codebooks)) * scales.float()
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


class PackedLayout(NamedTuple):
    """How a format packs."""

    parts: tuple[str, ...]
    """The tensors of a layer, in the order in which `numbers` takes them; the first is only where a layer is packed."""
    numbers: Callable[..., Tensor]
    """What they stand for: (outputs, inputs) float32."""
    bits: tuple[int, ...] = ()
    """How many an integer may have, by config.json; of a format without any, the tensors say it."""
    section: str = "quant_method"
    """What quantization_config has where its tensors are these."""
    unread: tuple[str, ...] = ()
    """Further tensors of a layer, which say what `parts` say or how these were found."""


_GROUPED = ("qweight", "qzeros", "scales", "g_idx")
LAYOUTS = {
    ("gptq", "gptq"): PackedLayout(_GROUPED, partial(grouped_numbers, inputs_packed=True, offset=1), (2, 3, 4, 8)),
    ("gptq", "gptq_v2"): PackedLayout(_GROUPED, partial(grouped_numbers, inputs_packed=True), (2, 3, 4, 8)),
    ("awq", "gemm"): PackedLayout(
        _GROUPED, partial(grouped_numbers, inputs_packed=False, order=(0, 4, 1, 5, 2, 6, 3, 7)), (4,)
    ),
    ("hqq", "transformers"): PackedLayout(
        ("W_q", "scale", "zero", "shape", "packing"),
        flat_numbers,
        section="quant_config",
        unread=(
            *("nbits", "group_size", "axis", "channel_wise", "optimize", "round_zero", "quant_scale", "quant_zero"),
            *("view_as_float", "unpack_view_dtype", "compute_dtype", "offload_meta"),
            *("encoded_state_dict", "stores_quant_config"),
        ),
    ),
    ("aqlm", "aqlm"): PackedLayout(("codes", "codebooks", "scales"), codebook_numbers),
}
"""By `quant_method` and the name of the layout, in config.json; the first of a method where it names none."""


def layout_of(method: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Key of a layout; `settings`: section quantization_config of config.json. Raises ValueError: not in LAYOUTS."""
    known = {name: layout for (each, name), layout in LAYOUTS.items() if each == method}
    named = (settings.get(key) for key in ("checkpoint_format", "format", "version"))
    name = str(next(filter(None, named), next(iter(known)))).lower()
    if name not in known:
        raise ValueError(f"in the layout {name}, which nothing reads here (only {', '.join(known)})")
    layout = known[name]
    if layout.bits and (bits := settings.get("bits", 4)) not in layout.bits:
        raise ValueError(f"to {bits} bits, which nothing reads here (only {', '.join(map(str, layout.bits))})")
    if layout.section not in settings:
        raise ValueError(f"without `{layout.section}` in its quantization_config, which nothing reads here")
    return method, name


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
        layout = LAYOUTS[quantization_config.layout]
        self.serialized_names = {"weight": ["weight", *layout.parts, *layout.unread]}

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
            if key.endswith("weight") and not key.endswith(layout.parts[0]):
                found[key] = [each.to(dtype) for each in plain]
        for key in [key for key in input_dict if key.endswith(layout.parts[0])]:
            stem = key.removesuffix(layout.parts[0])
            parts = [input_dict[stem + name] for name in layout.parts if stem + name in input_dict]
            dense = (layout.numbers(*each).to(dtype) for each in zip(*parts, strict=True))
            found[f"{stem}weight"] = [each.T.contiguous() if turned else each.contiguous() for each in dense]
        return {full_layer_name: found["weight"][0]} if "weight" in found else found

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()
