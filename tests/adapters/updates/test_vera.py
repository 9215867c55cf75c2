"""VeRA: random matrices that all layers share, and vectors of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.vera import VeraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Vera
from workbench.training.master_weights import MasterWeights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])


def _shared(model: Any) -> tuple[Tensor, Tensor]:
    return model.base_model.vera_A["default"], model.base_model.vera_B["default"]


def test_two_vectors_a_layer_train_around_shared_matrices(llama: PreTrainedModel) -> None:
    model = adapters.attach(llama, Vera(rank=5), seed=0)
    layers = [module for module in model.modules() if isinstance(module, VeraLayer)]
    assert adapters.count(model).trainable == sum(5 + layer.out_features for layer in layers)
    down, up = _shared(model)
    assert all(layer.vera_A["default"] is down and layer.vera_B["default"] is up for layer in layers)
    assert (down.shape, up.shape) == ((5, 48), (48, 5))  # of the widest layers


def test_the_update_is_as_the_paper_writes_it(llama: PreTrainedModel) -> None:
    model: Any = adapters.attach(llama, Vera(rank=5, initial=0.3), seed=0)
    layer = model.base_model.model.model.layers[1].self_attn.k_proj
    torch.nn.init.normal_(layer.vera_lambda_b["default"])
    down, up = _shared(model)
    b, d = layer.vera_lambda_b["default"], layer.vera_lambda_d["default"]
    assert d.unique().tolist() == pytest.approx([0.3])
    x = torch.randn(4, 32)
    update = torch.diag(b) @ up[:16] @ torch.diag(d) @ down[:, :32]
    torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + update).T)


def test_the_seed_decides_the_matrices_and_they_are_shipped(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Another machine's generator may draw others from the same seed."""
    bare = copy.deepcopy(llama)
    first, second, third = (adapters.attach(tiny("Llama"), Vera(rank=5), seed=seed) for seed in (0, 0, 1))
    assert _shared(first)[0].equal(_shared(second)[0]) and not _shared(first)[0].equal(_shared(third)[0])
    model: Any = adapters.attach(llama, Vera(rank=5), seed=0)
    for layer in (module for module in model.modules() if isinstance(module, VeraLayer)):
        torch.nn.init.normal_(layer.vera_lambda_b["default"])
    adapters.save(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved["base_model.vera_A"].equal(_shared(model)[0]) and saved["base_model.vera_B"].equal(_shared(model)[1])
    stock = PeftModel.from_pretrained(bare, str(tmp_path)).eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_half_precision_vectors_meet_float32_matrices(llama: PreTrainedModel) -> None:
    model = adapters.attach(llama.requires_grad_(False).bfloat16(), Vera(rank=5), seed=0)
    masters = MasterWeights(model, torch.bfloat16)
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [each.grad for name, each in masters.named().items() if "lambda_b" in name]
    assert gradients and all(each is not None and each.any() for each in gradients)
