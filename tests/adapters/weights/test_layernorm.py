"""LayerNorm tuning trains every norm of a backbone, and nothing else."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import LayerNorm
from workbench.errors import ConfigError


def _norms(model: nn.Module) -> int:
    """Parameters of all norms, by the names that their authors gave to the parameters' paths."""
    return sum(
        each.numel()
        for name, each in model.named_parameters()
        if "norm" in name.lower() or name.split(".")[-2].startswith("ln_")
    )


def test_all_norms_of_every_family_train(family: PreTrainedModel) -> None:
    wanted = _norms(family)
    model = adapters.attach(family, LayerNorm(), seed=0)
    assert adapters.count(model).trainable == wanted > 0
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all("ln_tuning_layers" in name for name in trained)


def test_norms_inside_attention_and_of_embeddings_are_found() -> None:
    assert LayerNorm().modules(tiny("Qwen3")) == [
        "input_layernorm",
        "k_norm",
        "norm",
        "post_attention_layernorm",
        "q_norm",
    ]
    bert = tiny("Bert", head="MaskedLM")
    assert adapters.count(adapters.attach(bert, LayerNorm(), seed=0)).trainable == 2 * 32 * (1 + 2 * 2 + 1)


def test_a_backbone_without_norms_is_refused(llama: PreTrainedModel) -> None:
    for name, module in list(llama.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            llama.set_submodule(name, nn.Identity())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no norms with weights\. Take adapter\.method=lora"):
        adapters.attach(llama, LayerNorm(), seed=0)
