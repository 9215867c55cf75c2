"""What methods of PEFT add to a layer, written a second time from their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import METHODS

Update = Callable[[Any, Tensor], Tensor]


def _loha(layer: Any, _: Tensor) -> Tensor:
    """Hyeon-Woo et al. 2021, eq. 2; scale alpha / rank = 3."""
    a1, b1, a2, b2 = (layer.get_parameter(f"hada_{name}.default") for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    return 3 * (a1 @ b1) * (a2 @ b2)


def _lokr(layer: Any, _: Tensor) -> Tensor:
    """Yeh et al. 2023, section 3.2, where a factor of a layer this small needs no decomposition."""
    return 3 * torch.kron(layer.lokr_w1["default"], layer.lokr_w2["default"])


def _miss(layer: Any, weight_OI: Tensor) -> Tensor:
    """Kang and Yin 2024, eq. 4: the shards of the inputs share one matrix."""
    shards = weight_OI.shape[1] // 4
    return torch.cat([layer.miss_block["default"].T] * shards, dim=1)


def _c3a(layer: Any, weight_OI: Tensor) -> Tensor:
    """Chen et al. 2024, section 3.2: each block is the circulant matrix whose rows are shifts of its kernel."""
    kernel = layer.c3a_kernel["default"]
    outputs, inputs, block = kernel.shape
    rows = [
        torch.cat([torch.stack([kernel[o, i].roll(n) for n in range(block)]) for i in range(inputs)], dim=1)
        for o in range(outputs)
    ]
    found = torch.cat(rows)
    assert found.shape == weight_OI.shape
    return found / weight_OI.shape[1]


def _gralora(layer: Any, weight_OI: Tensor) -> Tensor:
    """Jung et al. 2025, eq. 3: block (o, i) of the grid has its own product, with scale alpha / rank = 3."""
    A_NIR, B_NRO = layer.gralora_A["default"], layer.gralora_B["default"]
    blocks = [
        torch.cat([(A_NIR[i, :, 2 * o : 2 * o + 2] @ B_NRO[o, 2 * i : 2 * i + 2]).T for i in range(2)], dim=1)
        for o in range(2)
    ]
    return 3 * torch.cat(blocks)


def _delora(layer: Any, weight_OI: Tensor) -> Tensor:
    """Bini et al. 2025, eq. 7: each part of rank one has length one, times the norms of the weight's columns."""
    A, B = layer.delora_A["default"], layer.delora_B["default"]
    parts = sum(torch.outer(B[:, r] / B[:, r].norm(), A[r] / A[r].norm()) for r in range(4))
    found: Tensor = layer.delora_lambda["default"] / 4 * parts * weight_OI.norm(dim=0)
    return found


def _hira(layer: Any, weight_OI: Tensor) -> Tensor:
    """Huang et al. 2025, eq. 3."""
    found: Tensor = weight_OI * (layer.hira_B["default"] @ layer.hira_A["default"])
    return found


def _hra(layer: Any, weight_OI: Tensor) -> Tensor:
    """Yuan et al. 2024, eq. 5: a chain of Householder reflections."""
    turned = weight_OI
    for normal in (layer.hra_u["default"] / layer.hra_u["default"].norm(dim=0)).T:
        turned = turned @ (torch.eye(len(normal)) - 2 * torch.outer(normal, normal))
    return turned - weight_OI


def _road(layer: Any, weight_OI: Tensor) -> Tensor:
    """Liao and Monz 2024, eq. 3: output i of a group turns with output i + half a group."""
    half = 4
    angles, scales = (layer.get_parameter(f"road_{name}.default").view(-1, half) for name in ("theta", "alpha"))
    turn = torch.zeros(len(weight_OI), len(weight_OI))
    for group in range(len(angles)):
        for i in range(half):
            first, second = 8 * group + i, 8 * group + i + half
            cos, sin = (scales[group, i] * f(angles[group, i]) for f in (torch.cos, torch.sin))
            turn[first, first], turn[first, second] = cos, -sin
            turn[second, first], turn[second, second] = sin, cos
    return turn @ weight_OI - weight_OI


def _deft(layer: Any, weight_OI: Tensor) -> Tensor:
    """Kumar et al. 2025: (I - P relu(P)^T) W + P R."""
    P, R = layer.deft_P["default"], layer.deft_R["default"]
    return P @ R - P @ P.relu().T @ weight_OI


CASES: dict[str, tuple[dict[str, Any], Update]] = {
    "loha": ({"rank": 4, "alpha": 12}, _loha),
    "lokr": ({"rank": 4, "alpha": 12}, _lokr),
    "miss": ({"rank": 4}, _miss),
    "c3a": ({"block": 8}, _c3a),
    "gralora": ({"rank": 4, "alpha": 12}, _gralora),
    "delora": ({"rank": 4}, _delora),
    "hira": ({"rank": 4}, _hira),
    "hra": ({"rank": 4}, _hra),
    "road": ({"group": 8}, _road),
    "deft": ({"rank": 4}, _deft),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_adds_what_the_paper_says(name: str, llama: PreTrainedModel) -> None:
    settings, update = CASES[name]
    layer = _trained(llama, name, settings)
    weight_OI = layer.get_base_layer().weight
    x = torch.randn(5, weight_OI.shape[1])
    torch.testing.assert_close(layer(x), x @ (weight_OI + update(layer, weight_OI)).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["shira", "super"])
def test_single_weights_change_where_they_are_said_to(name: str, llama: PreTrainedModel) -> None:
    layer = _trained(llama, name, {"rank": 4} if name == "shira" else {"share": 0.25})
    weight_OI = layer.get_base_layer().weight
    changed_OI = layer(torch.eye(weight_OI.shape[1])).T - weight_OI
    touched_OI = changed_OI.abs() > 1e-6
    if name == "shira":
        assert int(touched_OI.sum()) == 4 * sum(weight_OI.shape)
    else:
        smallest = weight_OI.abs()[touched_OI].min()
        assert int(touched_OI.sum()) == weight_OI.numel() // 4
        assert bool((weight_OI.abs()[~touched_OI] <= smallest).all())


def _trained(model: PreTrainedModel, name: str, settings: dict[str, Any]) -> Any:
    """The first query projection with parameters that are random, as if they had trained."""
    config = METHODS[name].model_validate({"method": name, **settings})
    attached: Any = adapters.attach(model, config, seed=0)
    layer = attached.base_model.model.model.layers[0].self_attn.q_proj
    torch.manual_seed(0)
    for key, each in layer.named_parameters():
        if each.requires_grad and "lambda" not in key:
            nn.init.normal_(each, std=0.3)
    return layer.eval()
