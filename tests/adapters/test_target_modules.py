"""Roles name the same kind of layer in every family, and PEFT adapts exactly what they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.conftest import GROUPED, tiny
from tests.text_families import build
from workbench.adapters import Full, Lora, attach, target_modules
from workbench.adapters.anatomy import is_linear
from workbench.adapters.target_modules import about_experts, about_targets, resolve
from workbench.errors import ConfigError
from workbench.models.fused_lora import fuse

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


STATE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Mamba": ({}, {"out_proj", "dt_proj"}),
    "FalconMamba": ({}, {"out_proj", "dt_proj"}),
    "Mamba2": ({"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, {"out_proj"}),
    "FalconH1": ({**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, {"out_proj"}),
    "NemotronH": ({**GROUPED, "layers_block_type": ["mamba", "attention"]}, {"out_proj"}),
    "Jamba": ({**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1}, {"dt_proj"}),
    "Bamba": ({**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}, set()),
    "Llama4Text": ({**GROUPED, "intermediate_size_mlp": 32, "head_dim": 8, "num_local_experts": 2}, {"router"}),
}
"""Settings of a tiny backbone, and its linear layers that no adapter can change."""


@pytest.mark.parametrize("name", STATE)
def test_all_linear_leaves_out_what_no_adapter_can_change_and_says_so(name: str) -> None:
    """Every layer that gets an adapter learns: its weight is not read past the adapter."""
    settings, left = STATE[name]
    model = tiny(name, **settings)
    sentence = about_targets(model, Lora())
    assert all(layer in str(sentence) for layer in left) and (sentence is None) == (not left)
    attached = attach(model, Lora(rank=2), seed=0).train()
    fuse(attached)
    logits = attached(input_ids=torch.arange(3, 15)[None], use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    trained = {path: each.grad for path, each in attached.named_parameters() if each.requires_grad}
    assert trained and not [path for path, gradient in trained.items() if gradient is None]
    assert not left & {path.split(".")[-4] for path in trained}


def test_a_layer_that_no_adapter_can_change_is_refused_by_name() -> None:
    model = tiny("Mamba")
    with pytest.raises(ConfigError, match=r"does not change out_proj of Mamba.*adapter.targets=\[in_proj\]"):
        resolve(model, ["in_proj", "out_proj"])
    assert resolve(model, ["in_proj"]) == ["in_proj"]


@pytest.mark.parametrize(
    "forward", [lambda x: (x, x), lambda x: x[..., :3], lambda x: x.view(-1, 2, 7), lambda x: x.nope, lambda x: 1]
)
def test_a_linear_layer_that_computes_something_else_is_none(forward: Any) -> None:
    class Other(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(x)

    class Same(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.weight.T

    assert not is_linear(Other(8, 8)) and is_linear(Same(8, 4))


@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_names_and_roles_mean_the_language_model_beside_a_tower(name: str) -> None:
    model = build(name)
    for targets in ("all-linear", "attention", ("q_proj", "v_proj")):
        attached = attach(build(name), Lora(rank=2, targets=targets))
        changed = [path for path, each in attached.named_parameters() if each.requires_grad]
        assert changed and all(".language_model." in path for path in changed)
    tower = next(path for path, each in model.named_modules() if "vis" in path and isinstance(each, torch.nn.Linear))
    with pytest.raises(ConfigError, match="Rows of text do not run the towers"):
        resolve(model, (tower,))
