"""Experts in 4 bits against dequantised ones, and LoRA on experts against one expert after the other.

Legend: N tokens, E experts, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from tests.adapters.test_experts import FAMILIES, IDS, backbone, logits, moved
from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Lora
from workbench.adapters.anatomy import fused_experts
from workbench.adapters.precision.expert_layers import GroupedExperts, GroupedLora, expert_layers, group, unpack
from workbench.config import ModelConfig
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.models.weight_formats import weight_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
ON_EXPERTS = Lora(rank=2, alpha=4, experts=True)


def packed(folder: Path, family: str, weights: Any = "nf4") -> Backbone:
    if not folder.exists():
        backbone(family).save_pretrained(folder)
    return backbones.load(ModelConfig(id=str(folder), weights=weights, compute="float32"), None)


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    dense: PreTrainedModel = model.dequantize(torch.float32)
    unpack(dense, torch.float32)
    return dense


@pytest.mark.parametrize("family", FAMILIES)
def test_without_updates_it_is_transformers_grouped_product_bit_for_bit(family: str) -> None:
    model: Any = backbone(family)
    model.set_experts_implementation("grouped_mm")
    wanted = logits(model)
    for experts in expert_layers(model).values():
        group(experts)
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_are_read_and_multiply_with_the_dequantised_ones(family: str, tmp_path: Path) -> None:
    found = packed(tmp_path / "model", family)
    experts = fused_experts(found.model)
    plain = fused_experts(backbone(family))
    assert experts.keys() == plain.keys()
    for name, each in experts.items():
        assert each.dtype == torch.uint8
        assert each.numel() == -(-plain[name].numel() // 2)
    assert adapters.count(found.model).total == adapters.count(backbone(family)).total
    before = logits(found.model)
    assert torch.equal(logits(dequantised(found.model)), before)
    for name, each in fused_experts(found.model).items():
        rows = plain[name].detach().view(-1, 64)
        wanted = dequantize_4bit(*quantize_4bit(rows, compress_statistics=True, quant_type="nf4"))
        assert torch.equal(each.view(-1, 64), wanted)
        assert float(((wanted - rows).abs().amax(1) / rows.abs().amax(1)).max()) < 0.2, "the widest gap is 0.3 wide"


@pytest.mark.parametrize("weights", ["nf4", "fp4"])
def test_packed_experts_take_4_127_bits_a_weight(weights: str, tmp_path: Path) -> None:
    """4 bits, a byte of scale for 64, four bytes for 256 scales."""
    tiny("Mixtral", hidden_size=256, intermediate_size=512, num_local_experts=8).save_pretrained(tmp_path / "large")
    held = packed(tmp_path / "large", "", weights)
    for weight in fused_experts(held.model).values():
        state: Any = weight.quant_state  # type: ignore[attr-defined]
        size = weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
        assert 8 * size / state.shape.numel() == pytest.approx(4.127, abs=0.001)
    assert held.weight_bytes == weight_bytes(held.model) < 0.2 * weight_bytes(dequantised(held.model))


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_two_steps_over_packed_experts_are_those_over_dequantised_ones(
    family: str, experts: bool, tmp_path: Path
) -> None:
    def steps(model: PreTrainedModel) -> list[Tensor]:
        attached = adapters.attach(model, Lora(rank=2, alpha=4, targets="attention", experts=experts), seed=0)
        moved(attached)
        trained = [each for each in attached.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        gradients = []
        for _ in range(2):
            optimizer.zero_grad()
            attached.train()(input_ids=IDS, labels=IDS).loss.backward()
            gradients.append(torch.cat([each.grad.flatten() for each in trained if each.grad is not None]))
            optimizer.step()
        return gradients

    found = steps(packed(tmp_path / "model", family).model)
    wanted = steps(dequantised(packed(tmp_path / "model", family).model))
    for one, other in zip(found, wanted, strict=True):
        assert len(one) and float((one - other).norm() / other.norm()) < 1e-5


def one_by_one(experts: Any, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """The sum over a token's experts, each with its own W + scale B A."""
    matrices, outputs = {}, []
    for name, weight in experts.get_base_layer().named_parameters(recurse=False):
        matrices[name] = weight
    layer: Any = experts
    base = experts.get_base_layer()
    while isinstance(layer, ParamWrapper):
        name, down, up = layer.parameter_name, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        down_ERI = down.view(layer.num_experts, -1, down.shape[1])
        up_ORE = up.view(len(up), -1, layer.num_experts)
        deltas = [up_ORE[:, :, each] @ down_ERI[each] * layer.scaling["default"] for each in range(layer.num_experts)]
        delta = torch.stack(deltas)
        matrices[name] = matrices[name] + (delta.transpose(1, 2) if base.is_transposed else delta)
        layer = layer.base_layer

    def product(x: Tensor, name: str, expert: int) -> Tensor:
        weight = matrices[name][expert]
        bias = matrices[f"{name}_bias"][expert] if base.has_bias else None
        return F.linear(x, weight.T if base.is_transposed else weight, bias)

    for token, chosen, weights in zip(hidden_ND, expert_NK.tolist(), weight_NK, strict=True):
        parts = []
        for expert, weight in zip(chosen, weights, strict=True):
            inner = base._apply_gate(product(token[None], "gate_up_proj", expert))
            parts.append(product(inner, "down_proj", expert) * weight)
        outputs.append(torch.cat(parts).sum(0))
    return torch.stack(outputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [2, 3])
def test_grouped_updates_have_the_gradients_of_one_expert_after_the_other(family: str, rank: int) -> None:
    model: Any = moved(adapters.attach(backbone(family), Lora(rank=rank, alpha=4, experts=True), seed=0))
    outer = next(each for each in model.modules() if isinstance(each, GroupedLora))
    torch.manual_seed(2)
    hidden_ND, expert_NK = torch.randn(11, 32), torch.stack([torch.randperm(3)[:2] for _ in range(11)])
    weight_NK = torch.rand(11, 2)  # the fourth expert gets no token
    trained = [each for each in outer.parameters() if each.requires_grad]

    def gradients(output_ND: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(output_ND.square().sum(), [hidden_ND, *trained]))

    hidden_ND.requires_grad_()
    found = outer(hidden_ND, expert_NK, weight_NK)
    wanted = one_by_one(outer, hidden_ND, expert_NK, weight_NK)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(found), gradients(wanted), strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


def launches(model: nn.Module) -> dict[str, int]:
    """Kernels of a forward and backward pass by name, as an accelerator launches them: a grouped product is one."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(input_ids=IDS).logits.square().sum().backward()

    def within(event: Any) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name == "aten::_grouped_mm" or within(parent))

    return Counter(each.name for each in profiler.events() if each.name in KERNELS and not within(each))


KERNELS = {f"aten::{name}" for name in ("_grouped_mm", "mm", "bmm", "baddbmm", "addmm", "index")}


@pytest.mark.parametrize("weights", ["float32", "nf4"])
def test_launches_do_not_grow_with_the_experts_and_no_update_of_all_is_made(weights: str, tmp_path: Path) -> None:
    found = {}
    for count in (4, 16):
        tiny("Mixtral", num_local_experts=count).save_pretrained(tmp_path / str(count))
        found[count] = launches(moved(adapters.attach(packed(tmp_path / str(count), "", weights).model, ON_EXPERTS)))
    assert found[4] == found[16]
    # Of each block: two products, and two of each update; in the backward pass of A and B both factors.
    assert found[4]["aten::_grouped_mm"] == 2 * (2 + 4 + 2 + 8)
    assert not found[4].keys() & {"aten::bmm", "aten::baddbmm"}, "PEFT's own adds up the updates of all experts"


def test_stock_peft_reads_what_trained_over_packed_experts(tmp_path: Path) -> None:
    model: Any = moved(adapters.attach(packed(tmp_path / "model", "Mixtral").model, ON_EXPERTS, seed=0))
    wanted = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    stock = PeftModel.from_pretrained(
        dequantised(packed(tmp_path / "model", "Mixtral").model), str(tmp_path / "adapter")
    )
    torch.testing.assert_close(logits(stock), wanted, rtol=1e-5, atol=1e-5)
    ours = adapters.load(packed(tmp_path / "model", "Mixtral").model, tmp_path / "adapter")
    assert torch.equal(logits(ours), wanted)
    merged = adapters.merge(
        adapters.load(dequantised(packed(tmp_path / "model", "Mixtral").model), tmp_path / "adapter"), ON_EXPERTS
    )
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
