"""What a prefix needs of its backbone, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import DeepPrompt, Method, Prefix
from workbench.adapters.prompts import virtual_tokens
from workbench.errors import ConfigError

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 8, "q_lora_rank": 8}
BOTH: list[Method] = [DeepPrompt(virtual_tokens=4), Prefix(virtual_tokens=4, encoder_width=8)]
EACH = pytest.mark.parametrize("config", BOTH, ids=lambda config: config.method)


def test_what_is_cached_is_what_a_forward_pass_caches(family: PreTrainedModel) -> None:
    with torch.no_grad():
        cache: Any = family(input_ids=IDS, use_cache=True).past_key_values
    shapes = {tuple(each.shape) for layer in cache.layers for each in (layer.keys, layer.values)}
    found = virtual_tokens.cache_sizes(family)
    assert found is not None
    assert {(shape[1], shape[3]) for shape in shapes} == {(found.heads, found.width)}
    assert len(cache.layers) == found.layers
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(family.config)
    assert virtual_tokens.cache_sizes(skeleton) == found


@EACH
def test_a_backbone_without_such_a_cache_is_refused(config: Method) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    latent = tiny("DeepseekV3", n_routed_experts=4, moe_intermediate_size=16, num_key_value_heads=4, **LATENT)
    for model in (AutoModelForCausalLM.from_config(MambaConfig(**sizes)), latent):
        with pytest.raises(ConfigError, match="no key-value cache of one size in every layer"):
            adapters.attach(model, config, seed=0)


@EACH
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_virtual_tokens_that_no_text_would_see_are_refused(config: Method, name: str) -> None:
    text = r"looks back 4 tokens.* the first of 4 virtual tokens. Write adapter.virtual_tokens=3"
    with pytest.raises(ConfigError, match=text):
        adapters.attach(tiny(name), config, seed=0)
    adapters.attach(tiny(name), config.model_copy(update={"virtual_tokens": 3}), seed=0)
    adapters.attach(tiny("Gemma2"), config, seed=0)  # every other layer sees everything


@EACH
def test_keys_and_values_are_saved_and_no_network(llama: PreTrainedModel, config: Method, tmp_path: Path) -> None:
    bare = copy.deepcopy(llama)
    model = adapters.attach(llama, config, seed=0).eval()
    adapters.save(model, tmp_path)
    (saved,) = load_file(tmp_path / "adapter_model.safetensors").values()
    assert saved.shape == (4, 2 * 2 * 2 * 8)  # 2 layers of keys and values of 2 heads, each 8 wide
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        torch.testing.assert_close(adapters.load(bare, tmp_path)(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-5)


def test_the_modules_that_see_it_are_the_attention(family: PreTrainedModel) -> None:
    (name,) = DeepPrompt().modules(family)
    assert "attn" in name or "attention" in name
    assert sum(path.endswith("." + name) for path, _ in family.named_modules()) == 2
