"""Stages one after another are the model; each holds its own blocks alone, and one answers for each parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from workbench.training.distributed.pipeline_stage import FAMILIES, Line, Stage

SIZES: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 5, "num_attention_heads": 2, "pad_token_id": 0}
BACKBONES: dict[str, Any] = {
    kind.model_type: kind
    for kind in (GemmaConfig, GPT2Config, GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
}


def backbone(family: str, *, tied: bool) -> nn.Module:
    wide = {"n_embd": 16} if family == "gpt2" else {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    torch.manual_seed(0)
    config = BACKBONES[family](**SIZES, **wide, num_key_value_heads=2, tie_word_embeddings=tied)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


def in_memory(model: nn.Module) -> int:
    """Bytes of all parameters, each storage once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())


def test_all_families_are_known() -> None:
    assert set(BACKBONES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_another_are_the_model(family: str) -> None:
    whole, ids_BL = backbone(family, tied=family == "gemma"), torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        wanted = whole(input_ids=ids_BL, use_cache=False).logits
        hidden: list[Tensor] = []
        for number in range(3):
            model = copy.deepcopy(whole)
            stage, left = Stage(model, Line(number, 3)), list[Tensor]()
            with stage.routed(lambda like, given=tuple(hidden): given[0].view_as(like), left.append):
                logits = model(input_ids=ids_BL, use_cache=False).logits
            hidden = left
            assert logits.shape == wanted.shape
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_own_blocks_alone(tied: bool) -> None:
    whole = backbone("llama", tied=tied)
    one_block = sum(each.nbytes for each in whole.get_submodule("model.layers.0").parameters())
    ends = whole.get_submodule("lm_head").weight.nbytes  # type: ignore[union-attr,operator]
    norm = whole.get_submodule("model.norm").weight.nbytes  # type: ignore[union-attr,operator]
    for number, blocks in enumerate((2, 2, 1)):
        model = copy.deepcopy(whole)
        Stage(model, Line(number, 3))
        held = blocks * one_block + norm + (0 if number == 1 else ends)
        assert (
            held <= in_memory(model) <= held + 4 * len(list(model.parameters()))
        )  # an element for each that is not here


@pytest.mark.parametrize("tied", [False, True])
def test_one_stage_answers_for_each_parameter(tied: bool) -> None:
    whole = backbone("llama", tied=tied)
    names = [name for name, _ in whole.named_parameters()]
    holders: dict[str, list[int]] = {name: [] for name in names}
    for number in range(3):
        model = copy.deepcopy(whole)
        stage = Stage(model, Line(number, 3))
        trains = {name for name, each in model.named_parameters() if each.requires_grad}
        assert trains == {name for name in names if stage.holds(name)}
        for name in trains:
            holders[name].append(number)
        assert all(stage.stage_of[name] in (0, 1, 2) for name in names)
    for name, found in holders.items():
        assert found == ([0, 2] if tied and name == "model.embed_tokens.weight" else found[:1])
        assert found[0] == stage.stage_of[name]
