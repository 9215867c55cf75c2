"""Roles name the same kind of layer in every family, and PEFT adapts exactly what they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.conftest import GROUPED, tiny
from workbench.adapters import Full, Lora, attach, target_modules
from workbench.adapters.target_modules import about_experts, resolve
from workbench.errors import ConfigError

LLAMA = (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"])
NEOX = (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"])
ROLES: dict[str, tuple[list[str], list[str]]] = {
    "CohereForCausalLM": LLAMA,
    "FalconForCausalLM": NEOX,
    "GPT2LMHeadModel": (["attn.c_attn", "attn.c_proj"], ["mlp.c_fc", "mlp.c_proj"]),
    "GPTNeoXForCausalLM": NEOX,
    "Gemma2ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": (LLAMA[0], []),  # its experts are single tensors, not linear layers
    "OPTForCausalLM": (["q_proj", "k_proj", "v_proj", "out_proj"], ["fc1", "fc2"]),
    "PhiForCausalLM": (["q_proj", "k_proj", "v_proj", "dense"], ["fc1", "fc2"]),
    "Qwen3ForCausalLM": LLAMA,
}
"""Layers of attention and of mlp, in each of the two blocks."""


def _adapted(model: PreTrainedModel, wanted: Any) -> set[str]:
    """Paths of the modules that got an adapter."""
    peft_model = attach(model, Lora(rank=2, targets=wanted), seed=0, new_token_ids=[])
    paths = (name for name, module in peft_model.named_modules() if isinstance(module, LoraLayer))
    return {path.removeprefix("base_model.model.") for path in paths}


@pytest.mark.parametrize("role", ["attention", "mlp", "all-linear"])
def test_a_role_adapts_its_layers_in_every_block_and_no_others(family: PreTrainedModel, role: str) -> None:
    attention, mlp = ROLES[type(family).__name__]
    names = {"attention": attention, "mlp": mlp, "all-linear": attention + mlp}[role]
    if not names:
        with pytest.raises(ConfigError, match="the MLPs of MixtralForCausalLM are experts"):
            target_modules.resolve(family, role)
        return
    found = _adapted(family, role)
    assert len(found) == 2 * len(names)
    for name in names:
        assert sum(path.endswith("." + name) for path in found) == 2, f"{name} is not adapted in both blocks"
    assert not any("lm_head" in path or "embed" in path for path in found)


def test_gpt2_needs_full_paths_because_c_proj_stands_in_both_roles(family: PreTrainedModel) -> None:
    resolved = target_modules.resolve(family, "attention")
    is_gpt2 = type(family).__name__ == "GPT2LMHeadModel"
    assert all(("." in name) == is_gpt2 for name in resolved)
    if is_gpt2:
        assert isinstance(family.get_submodule(resolved[0]), Conv1D)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (("q_proj",), {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (("layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        (("model.layers.0.mlp.up_proj", "o_proj"), None),
    ],
)
def test_names_are_leaves_or_ends_of_paths(llama: PreTrainedModel, wanted: tuple[str, ...], names: set[str]) -> None:
    expected = names or {
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    }
    assert _adapted(llama, wanted) == expected


def test_names_that_match_nothing_list_the_nearest(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError) as caught:
        target_modules.resolve(llama, ["q_porj", "v_proj", "roj"])
    text = str(caught.value)
    assert text.startswith("adapter.targets: no linear layer of LlamaForCausalLM is called q_porj, roj.")
    assert "q_proj" in text.split("Nearest: ")[1]
    assert "Roles: attention, mlp, all-linear." in text
    with pytest.raises(ConfigError, match="Nearest: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        target_modules.resolve(llama, ["zzz"])


def test_the_head_is_no_target_of_a_role_but_linear_layers_are_all_found(llama: PreTrainedModel) -> None:
    paths = target_modules.linear_modules(llama)
    every = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear)]
    assert [name for name in every if name not in paths] == ["lm_head"]


@pytest.fixture(scope="module", params=["Mixtral", "Qwen3Moe"])
def mixture(request: pytest.FixtureRequest) -> PreTrainedModel:
    experts = {} if request.param == "Mixtral" else {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16}
    return tiny(request.param, **experts)


def test_experts_that_no_adapter_reaches_are_told(mixture: PreTrainedModel) -> None:
    said = about_experts(mixture, Lora())
    assert said is not None and "Mixture of experts" in said and "stay frozen" in said and "gate_up_proj" in said
    assert about_experts(mixture, Full()) is None


def test_the_mlp_of_a_mixture_is_refused_with_the_reason(mixture: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"adapter.targets: .* experts, .* Write adapter.experts=true"):
        resolve(mixture, "mlp")


def test_a_model_without_experts_is_told_nothing(llama: PreTrainedModel) -> None:
    assert about_experts(llama, Lora()) is None
