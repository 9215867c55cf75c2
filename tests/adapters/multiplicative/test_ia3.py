"""(IA)^3 finds keys, values and the ends of MLPs in every family, by structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.ia3 import IA3Layer
from torch import nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Ia3
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import optimizers

LLAMA = (["self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"])
TOGETHER = "query_key_value"
SCALED: dict[str, tuple[list[str], list[str]]] = {
    "Cohere": LLAMA,
    "Falcon": ([f"self_attention.{TOGETHER}"], ["mlp.dense_4h_to_h"]),
    "GPT2": (["attn.c_attn"], ["mlp.c_proj"]),
    "GPTNeoX": ([f"attention.{TOGETHER}"], ["mlp.dense_4h_to_h"]),
    "Gemma2": LLAMA,
    "Gemma3Text": LLAMA,
    "Granite": LLAMA,
    "Llama": LLAMA,
    "Mistral": LLAMA,
    "Mixtral": (LLAMA[0], []),  # its experts are single tensors, not linear layers
    "OPT": (LLAMA[0], ["fc2"]),
    "Phi": (LLAMA[0], ["mlp.fc2"]),
    "Qwen3": LLAMA,
    "Bert": (["attention.self.key", "attention.self.value"], ["output.dense"]),
}
"""In each block: layers whose outputs are scaled, layers whose inputs are."""


def _scaled(model: PreTrainedModel, **settings: Any) -> tuple[set[str], set[str]]:
    """Paths of the layers whose outputs, and whose inputs, are scaled."""
    attached = adapters.attach(model, Ia3.model_validate(settings), seed=0)
    layers = {name: module for name, module in attached.named_modules() if isinstance(module, IA3Layer)}
    paths = {name.removeprefix("base_model.model."): module.is_feedforward for name, module in layers.items()}
    for name, module in layers.items():
        size = module.in_features if module.is_feedforward else module.out_features
        assert module.ia3_l["default"].numel() == size, name
    return {path for path, inputs in paths.items() if not inputs}, {path for path, inputs in paths.items() if inputs}


@pytest.mark.parametrize("family", sorted(SCALED))
def test_keys_values_and_the_inside_of_mlps_are_scaled_in_every_family(family: str) -> None:
    model = tiny(family, head="MaskedLM") if family == "Bert" else tiny(family)
    blocks = [block for stack in adapters.anatomy.blocks(model) for block in stack]
    wanted = tuple({f"{block}.{name}" for block in blocks for name in names} for names in SCALED[family])
    assert _scaled(model) == wanted


def test_t5_scales_its_cross_attention_too() -> None:
    model = tiny("T5", head="Seq2SeqLM", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    outputs, inputs = _scaled(model)
    assert len(outputs) == 2 * (2 + 4) and {path.rsplit(".", 1)[-1] for path in outputs} == {"k", "v"}
    assert len(inputs) == 4 and all(path.endswith("DenseReluDense.wo") for path in inputs)


def test_an_mlp_as_wide_as_the_model_ends_with_its_last_layer() -> None:
    _, inputs = _scaled(tiny("OPT", ffn_dim=32))
    assert {path.rsplit(".", 1)[-1] for path in inputs} == {"fc2"}


def test_roles_and_names(llama: PreTrainedModel) -> None:
    assert [bool(paths) for paths in _scaled(tiny("Llama"), targets="attention")] == [True, False]
    assert [bool(paths) for paths in _scaled(tiny("Llama"), targets="mlp")] == [False, True]
    outputs, inputs = _scaled(tiny("Llama"), targets=["layers.1.self_attn.q_proj", "up_proj"])
    assert outputs == {"model.layers.1.self_attn.q_proj"}
    assert inputs == {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}
    with pytest.raises(ConfigError, match=r"found no layer to scale in MixtralForCausalLM for adapter\.targets=mlp"):
        Ia3(targets="mlp").modules(tiny("Mixtral"))


def test_weight_decay_leaves_factors_alone(llama: PreTrainedModel) -> None:
    """They are stored as matrices of one row or column, and zero would silence a layer."""
    model = adapters.attach(llama, Ia3(), seed=0)
    values: dict[str, Any] = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "train": {"weight_decay": 0.5}}
    for method, decay in (("ia3", 0.0), ("lora", 0.5)):
        config = RunConfig.model_validate({**values, "adapter": {"method": method}})
        named = MasterWeights(model, torch.float32).named()
        (group,) = optimizers.groups(named, config, layers={}, blocks=2, fresh=())
        assert group["weight_decay"] == decay and len(group["params"]) == 6


def test_factors_are_what_the_paper_says(tmp_path: Path) -> None:
    """Keys and values are multiplied after their layer, the MLP's hidden units before its last one."""
    model: Any = adapters.attach(tiny("Llama"), Ia3(), seed=0)
    block = model.base_model.model.model.layers[0]
    key, down = block.self_attn.k_proj, block.mlp.down_proj
    for layer in (key, down):
        nn.init.uniform_(layer.ia3_l["default"], 0.5, 1.5)
    x, hidden = torch.randn(3, 32), torch.randn(3, 48)
    torch.testing.assert_close(key(x), key.base_layer(x) * key.ia3_l["default"].flatten())
    torch.testing.assert_close(down(hidden), down.base_layer(hidden * down.ia3_l["default"].flatten()))
