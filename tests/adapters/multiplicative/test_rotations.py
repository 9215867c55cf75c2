"""OFT and BOFT rotate: what they multiply weights with keeps lengths and angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Boft, Method, Oft
from workbench.adapters.multiplicative.boft_kernels import BlockDiagonal
from workbench.config import ModelConfig
from workbench.errors import ConfigError
from workbench.models import backbones


def _rotation(model: PreTrainedModel, config: Method, size: float) -> Tensor:
    """What the first layer multiplies its weight with, (inputs, inputs), with parameters of about `size`."""
    attached: Any = adapters.attach(model, config, seed=0)
    layer = attached.base_model.model.model.layers[0].self_attn.q_proj
    torch.manual_seed(0)
    for name, each in layer.named_parameters():
        if "oft_R" in name:
            nn.init.normal_(each, std=size)
    nn.init.eye_(layer.base_layer.weight)
    rotation: Tensor = layer(torch.eye(32)).detach()
    return rotation


def _orthogonal(rotation: Tensor, tolerance: float) -> bool:
    return torch.allclose(rotation @ rotation.T, torch.eye(32), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shared", [False, True])
def test_oft_turns_each_block_of_inputs(llama: PreTrainedModel, shared: bool) -> None:
    rotation = _rotation(llama, Oft(block=8, terms=12, shared=shared), 0.05)
    assert _orthogonal(rotation, 1e-4)
    blocks = rotation.view(4, 8, 4, 8).transpose(1, 2)
    assert not blocks[~torch.eye(4, dtype=torch.bool)].any()
    assert torch.equal(blocks[0, 0], blocks[1, 1]) == shared
    assert (blocks[0, 0] - torch.eye(8)).abs().max() > 0.05


def test_more_terms_come_closer_to_a_rotation() -> None:
    errors = []
    for terms in (2, 5, 12):
        rotation = _rotation(tiny("Llama"), Oft(block=8, terms=terms), 0.08)
        errors.append(float((rotation @ rotation.T - torch.eye(32)).abs().max()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(("factors", "reach"), [(1, 4), (2, 8), (3, 16)])
def test_boft_mixes_twice_as_many_inputs_with_each_factor(factors: int, reach: int) -> None:
    """On a device for which PEFT compiles nothing, where its own would silently have a single factor."""
    rotation = _rotation(tiny("Llama"), Boft(block=4, factors=factors), 0.5)
    assert _orthogonal(rotation, 1e-5)
    assert int((rotation.abs() > 1e-7).sum(dim=1).max()) == reach


def test_blocks_on_a_diagonal_and_their_gradient() -> None:
    blocks = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    kernel = BlockDiagonal()
    (found,) = kernel.forward(blocks)
    wanted = torch.stack([torch.block_diag(*each) for each in blocks])
    assert torch.equal(found, wanted)
    (back,) = kernel.backward(found + 1, blocks)
    assert torch.equal(back, blocks + 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Oft(block=32),
            r"down_proj has 48 inputs, which 32 does not divide\. Write adapter\.block as one of \[2, 4,",
        ),
        (Boft(block=8, factors=3), r"which 32 does not divide\. Write adapter\.block as one of \[2, 4\]"),
        (Boft(block=3), r"adapter\.block=3 is odd, and inputs are shuffled by half blocks\. Write an even one"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(llama: PreTrainedModel, config: Method, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        adapters.attach(llama, config, seed=0)


@pytest.mark.parametrize(("weights", "fits"), [("float32", False), ("bfloat16", False), ("int8", True), ("nf4", True)])
def test_quantising_makes_gpt2_fit_and_its_skeleton_knows(weights: str, fits: bool, tmp_path: Path) -> None:
    """Without the second, a run that works would be refused before it begins."""
    tiny("GPT2", n_embd=64, n_inner=128).save_pretrained(tmp_path)
    model = ModelConfig.model_validate({"id": str(tmp_path), "weights": weights})
    for base in (backbones.skeleton(model), backbones.load(model, None).model):
        assert (Oft().refusal(base) is None) == fits
        assert (Boft().refusal(base) is None) == fits


def test_layers_that_peft_cannot_rotate_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"c_attn is a Conv1D, which PEFT's oft does not change\. Take adapter\.method=lora"
    ):
        adapters.attach(tiny("GPT2"), Oft(block=4), seed=0)
