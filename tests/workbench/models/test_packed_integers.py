"""GPTQ and AWQ: what their packed integers stand for, written out a second time."""

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
from workbench.models import backbones

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
    format: str | None = None
    family: str = "Llama"

    @property
    def settings(self) -> dict[str, Any]:
        """Section quantization_config of config.json."""
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


def quantised(weight_OI: Tensor, how: Integers, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and the weight that they stand for."""
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


def repository(folder: Path, how: Integers) -> dict[str, Tensor]:
    """A repository of packed integers in `folder`, and one of plain numbers beside it, in `folder`/plain; returns those
    numbers, by the name in the files."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "dtype": torch.bfloat16}
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
}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(pytest.param(name, "float32", marks=[pytest.mark.slow] * (name == "gptq of experts")) for name in WAYS),
        *(("awq", "nf4"), ("gptq of GPT-2", "nf4")),
    ]
    + [pytest.param(name, "nf4", marks=pytest.mark.nightly) for name in WAYS if name not in ("awq", "gptq of GPT-2")],
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
    ],
)
def test_other_layouts_are_refused_by_name(how: Integers, words: str, tmp_path: Path) -> None:
    config = tiny("Llama").config
    config.quantization_config = how.settings
    config.save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match=words):
        backbones.blueprint(ModelConfig(id=str(tmp_path)), vocabulary=64)
