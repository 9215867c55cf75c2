"""GPTQ, AWQ, HQQ and AQLM: what their packed integers stand for, written out a second time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import tiny
from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.models import backbones, packed_integers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbouring outputs stands in each half byte of a word, by AutoAWQ's `WQLinear_GEMM`."""


@dataclass(frozen=True)
class Integers:
    """How a repository is quantised."""

    method: str = "gptq"
    bits: int = 4
    group: int = 16
    symmetric: bool = False
    shuffled: bool = False
    """Whether inputs of a group stand apart (`desc_act`)."""
    grouped: bool = True
    """Whether the files say the group of each input."""
    axis: int = 1
    """HQQ: 1, rows of the flat weight are groups; 0, columns are."""
    books: int = 1
    """AQLM: codebooks; `bits` are those of a place in one, `group` the inputs of a block."""
    outputs: int = 1
    """AQLM: outputs of a block."""
    format: str | None = None
    family: str = "Llama"

    @property
    def settings(self) -> dict[str, Any]:
        """Section quantization_config of config.json."""
        if self.method == "hqq":
            how = {"nbits": self.bits, "group_size": self.group, "axis": self.axis, "view_as_float": False}
            flat = {**how, "channel_wise": True, "optimize": True, "round_zero": self.bits == 4}
            quantised = {"weight_quant_params": flat, "scale_quant_params": None, "zero_quant_params": None}
            return {"quant_method": "hqq", "quant_config": {**quantised, "offload_meta": False}, "skip_modules": []}
        if self.method == "aqlm":
            sizes = {"in_group_size": self.group, "out_group_size": self.outputs, "num_codebooks": self.books}
            return {"quant_method": "aqlm", "nbits_per_codebook": self.bits, **sizes}
        known = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**known, "zero_point": True, "version": self.format or "gemm"}
        named = {} if self.format is None else {"checkpoint_format": self.format}
        return {**known, "desc_act": self.shuffled, "sym": self.symmetric, **named}


def stream(numbers: Tensor, bits: int) -> Tensor:
    """(N, M) integers, each column as one number of N * bits bits, cut into words of 32."""
    columns = []
    for column in numbers.T.tolist():
        whole = sum(value << bits * place for place, value in enumerate(column))
        columns.append(numpy.frombuffer(whole.to_bytes(len(column) * bits // 8, "little"), dtype="<i4"))
    return torch.from_numpy(numpy.stack(columns, 1))


def awq_words(numbers_NO: Tensor) -> Tensor:
    """(N, O / 8) words of 8 outputs in AWQ's order."""
    rows = [
        [sum(row[at + output] << 4 * place for place, output in enumerate(AWQ_ORDER)) for at in range(0, len(row), 8)]
        for row in numbers_NO.tolist()
    ]
    return torch.tensor(rows).to(torch.int32)  # the highest bit becomes the sign


def by_hqq(weight_OI: Tensor, how: Integers) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer as `HQQLinear.state_dict` has them, and the weight that they stand for."""
    flat = weight_OI.float().reshape((-1, how.group) if how.axis == 1 else (how.group, -1))
    most = 2**how.bits - 1
    low, high = flat.amin(how.axis, keepdim=True), flat.amax(how.axis, keepdim=True)
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).half()
    values = (flat / scale.float() + zero.float()).round().clamp(0, most)
    word, each = (torch.int32, 10) if how.bits == 3 else (torch.uint8, 8 // how.bits)
    padded = torch.zeros(-(-len(values) // each) * each, values.shape[1], dtype=torch.int64)
    padded[: len(values)] = values.long()
    parts = padded.chunk(each)
    words = sum(part << how.bits * (each - 1 - place) for place, part in enumerate(parts))
    packing = f"{how.bits}bit_{'32' if how.bits == 3 else 'u8'}"
    found = {
        "W_q": words.to(word),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(weight_OI.shape),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        "nbits": torch.tensor(how.bits, dtype=torch.int32),
        "compute_dtype": torch.tensor(list(b"torch.float16"), dtype=torch.uint8),
    }
    return found, ((values - zero.float()) * scale.float()).reshape(weight_OI.shape)


def by_aqlm(weight_OI: Tensor, how: Integers, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer as AQLM's `QuantizedLinear` has them, of codes that are drawn, and the weight that they
    stand for."""
    rows, columns = weight_OI.shape[0] // how.outputs, weight_OI.shape[1] // how.group
    size, kind = (how.books, 2**how.bits, how.outputs, how.group), torch.int8 if how.bits == 8 else torch.int16
    books = (torch.randn(size, generator=draw) * weight_OI.float().std()).half()
    codes = torch.randint(2**how.bits, (rows, columns, how.books), generator=draw)
    scales = (torch.rand(rows, 1, 1, 1, generator=draw) + 0.5).half()
    wanted = torch.zeros(weight_OI.shape)
    for row in range(rows):
        for column in range(columns):
            block = sum(book[code].float() for book, code in zip(books, codes[row, column].tolist(), strict=True))
            across = slice(column * how.group, (column + 1) * how.group)
            wanted[row * how.outputs : (row + 1) * how.outputs, across] = block * scales[row].float().item()
    return {"codes": codes.to(kind), "codebooks": books, "scales": scales}, wanted


def quantised(weight_OI: Tensor, how: Integers, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and the weight that they stand for."""
    if how.method == "hqq":
        return by_hqq(weight_OI, how)
    if how.method == "aqlm":
        return by_aqlm(weight_OI, how, draw)
    inputs, most = weight_OI.shape[1], 2**how.bits - 1
    group = torch.arange(inputs) // how.group
    if how.shuffled:
        group = group[torch.randperm(inputs, generator=draw)]
    sums = range(int(group.max()) + 1)
    low = torch.stack([weight_OI[:, group == each].amin(1).clamp(max=0) for each in sums])
    high = torch.stack([weight_OI[:, group == each].amax(1).clamp(min=0) for each in sums])
    scales = ((high - low) / most).half()
    zeros = torch.full_like(low, (most + 1) // 2) if how.symmetric else (-low / scales.float()).round()
    values = ((weight_OI / scales.float().T[:, group]).round() + zeros.T[:, group]).clamp(0, most)
    wanted = (values - zeros.T[:, group]) * scales.float().T[:, group]
    q_IO, z_GO = values.T.long(), zeros.long()
    if how.method == "awq":
        return {"qweight": awq_words(q_IO), "qzeros": awq_words(z_GO), "scales": scales}, wanted
    stored = z_GO if how.format == "gptq_v2" else (z_GO - 1) % (most + 1)  # the first version subtracts one
    found = {"qweight": stream(q_IO, how.bits), "qzeros": stream(stored.T, how.bits).T.contiguous(), "scales": scales}
    return found | ({"g_idx": group.int()} if how.grouped else {}), wanted


def repository(folder: Path, how: Integers, model: Any = None) -> dict[str, Tensor]:
    """A repository of packed integers in `folder`, and one of plain numbers beside it, in `folder`/plain; returns those
    numbers, by the name in the files. `model`: of which; None: of a tiny one."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "dtype": torch.bfloat16}
    if model is None:
        model = tiny(how.family, **(sizes if how.family != "GPT2" else {"dtype": torch.bfloat16}))
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    draw, stored, wanted = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for name, value in plain.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or value.ndim != 2 or not stem.endswith(("proj", "c_attn", "c_fc")):
            stored[name] = value.contiguous()
            continue
        turned = how.family == "GPT2"
        tensors, number = quantised(value.T if turned else value, how, draw)
        stored |= {f"{stem}.{key}": tensor for key, tensor in tensors.items()}
        wanted[name] = (number.T if turned else number).contiguous()
    save_file(plain | wanted, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = how.settings
    model.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return wanted


WAYS = {
    "gptq": Integers(),
    "gptq without groups": Integers(grouped=False, symmetric=True),
    "gptq in any order": Integers(shuffled=True),
    "gptq v2 in 8 bits": Integers(bits=8, format="gptq_v2"),
    "gptq in 3 bits": Integers(bits=3, symmetric=True),
    "gptq in 2 bits, one group": Integers(bits=2, group=64),
    "gptq of GPT-2": Integers(family="GPT2"),
    "gptq of experts": Integers(family="Qwen3Moe"),
    "awq": Integers(method="awq"),
    "awq of experts": Integers(method="awq", family="Mixtral"),
    "hqq": Integers(method="hqq"),
    "hqq in columns, 3 bits": Integers(method="hqq", bits=3, axis=0),
    "hqq in 2 bits": Integers(method="hqq", bits=2),
    "hqq in 8 bits": Integers(method="hqq", bits=8),
    "hqq of experts": Integers(method="hqq", bits=3, family="Mixtral"),
    "aqlm of one codebook": Integers(method="aqlm", bits=16, group=8),
    "aqlm of two codebooks": Integers(method="aqlm", bits=8, group=8, books=2),
    "aqlm in blocks of outputs": Integers(method="aqlm", bits=8, group=8, outputs=2),
    "aqlm of experts": Integers(method="aqlm", bits=8, group=8, books=2, family="Mixtral"),
}
PACKED_AGAIN = ("awq", "gptq of GPT-2", "hqq", "aqlm of two codebooks")
"""Those that a first line packs again, too."""


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(pytest.param(name, "float32", marks=[pytest.mark.slow] * (name == "gptq of experts")) for name in WAYS),
        *((name, "nf4") for name in PACKED_AGAIN),
    ]
    + [pytest.param(name, "nf4", marks=pytest.mark.nightly) for name in WAYS if name not in PACKED_AGAIN],
)
def test_it_computes_what_a_repository_of_its_numbers_computes(name: str, weights: Any, tmp_path: Path) -> None:
    assert repository(tmp_path, WAYS[name])
    arrived, plain = (
        backbones.load(ModelConfig(id=str(each), weights=weights, compute="float32"), None).model
        for each in (tmp_path, tmp_path / "plain")
    )
    rows = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    assert arrived(rows).logits.std() > 0
    assert torch.equal(arrived(rows).logits, plain(rows).logits)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Integers(format="marlin"), r"by gptq in the layout marlin, which nothing reads here \(only gptq, gptq_v2\)"),
        (Integers(method="awq", format="gemv"), r"by awq in the layout gemv, .* model.weights=nf4"),
        (Integers(method="awq", bits=8), r"by awq to 8 bits, which nothing reads here \(only 4\)"),
        (
            {"quant_method": "hqq", "nbits": 4, "group_size": 64},
            "by hqq without `quant_config` in its quantization_config, .* Take",
        ),
    ],
)
def test_other_layouts_are_refused_by_name(how: Integers | dict[str, Any], words: str, tmp_path: Path) -> None:
    config = tiny("Llama").config
    config.quantization_config = how.settings if isinstance(how, Integers) else how
    config.save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match=words):
        backbones.blueprint(ModelConfig(id=str(tmp_path)), vocabulary=64)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("bits", "viewed"), [(8, False), (4, False), (4, True), (3, True), (2, False), (1, False)])
def test_hqq_is_what_its_package_dequantises(bits: int, viewed: bool, axis: int) -> None:
    """In float32; the package itself rounds each of its steps to the precision that it computes in."""
    hqq: Any = pytest.importorskip("hqq.core.quantize", reason="a package of its own: pip install hqq")
    torch.manual_seed(0)
    wanted = hqq.BaseQuantizeConfig(nbits=bits, group_size=16, axis=axis, view_as_float=viewed)
    layer = hqq.HQQLinear(torch.nn.Linear(80, 24), wanted, compute_dtype=torch.float32, device="cpu")
    stored, layout = layer.state_dict(), packed_integers.LAYOUTS["hqq", "transformers"]
    assert stored.keys() == {*layout.parts, *layout.unread, "bias"}
    assert torch.equal(layout.numbers(*(stored[name] for name in layout.parts)), layer.dequantize())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize(("bits", "books", "outputs"), [(16, 1, 1), (8, 2, 1), (8, 8, 1), (8, 1, 4)])
def test_aqlm_is_what_its_package_dequantises(bits: int, books: int, outputs: int) -> None:
    aqlm: Any = pytest.importorskip("aqlm.utils", reason="a package of its own: pip install aqlm")
    how = Integers(method="aqlm", bits=bits, books=books, outputs=outputs, group=8)
    stored, _ = by_aqlm(torch.randn(24, 80), how, torch.Generator().manual_seed(0))
    codes = aqlm.unpack_int_data(stored["codes"], bits)
    wanted = aqlm._dequantize_weight(codes, stored["codebooks"].float(), stored["scales"].float())
    assert torch.equal(packed_integers.codebook_numbers(**stored), wanted)
