"""Layers of backbones, and the parts in each."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tests.conftest import T5_SIZES, tiny
from tests.sound_backbones import WHISPER
from workbench import adapters
from workbench.adapters import Lora, anatomy
from workbench.config import RunConfig
from workbench.errors import BackboneError
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.layer_map import ORDER, kind, survey, survey_parts

BEFORE = {
    "Llama": {"model.embed_tokens.weight"},
    "GPT2": {"transformer.wte.weight", "transformer.wpe.weight"},  # whose head is the embedding
    "OPT": {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
}
AFTER = {
    "Llama": {"model.norm.weight", "lm_head.weight"},
    "GPT2": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    "OPT": {"model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias"},
}


@pytest.mark.parametrize("family", BEFORE)
def test_what_comes_before_and_after_the_blocks(family: str) -> None:
    model = tiny(family)
    layers = survey(model)
    found = {name: layers.of(name) for name, _ in model.named_parameters()}
    assert {name for name, layer in found.items() if layer == 0} == BEFORE[family]
    assert {name for name, layer in found.items() if layer == 3} == AFTER[family]
    assert all(f".{layer - 1}." in name for name, layer in found.items() if layer in (1, 2))


def test_tables_that_blocks_look_into_freeze_with_the_first_blocks() -> None:
    model = tiny("DebertaV2", head="SequenceClassification", relative_attention=True, position_buckets=4)
    layers = survey(model)
    found = {name: layers.of(name) for name, _ in model.named_parameters()}
    assert found["deberta.encoder.rel_embeddings.weight"] == 0
    assert {found["pooler.dense.weight"], found["classifier.weight"]} == {3}


def test_adapters_and_copies_of_heads_follow_their_module() -> None:
    model = tiny("Bert", head="SequenceClassification")
    layers = survey(model)
    adapted = adapters.attach(model, Lora(rank=2), seed=0)
    found = {name: layers.of(name) for name, each in adapted.named_parameters() if each.requires_grad}
    assert {layer for name, layer in found.items() if "lora" in name and ".layer.0." in name} == {1}
    assert {layer for name, layer in found.items() if "classifier" in name} == {3}
    assert set(found.values()) == {1, 2, 3}


def test_two_stacks_are_refused() -> None:
    with pytest.raises(BackboneError, match="has 2 stacks of blocks"):
        survey(tiny("T5", head="Seq2SeqLM", **T5_SIZES))


KINDS = {
    "self_attn.q_proj.lora_A.default.weight": "q",
    "self_attn.q_norm.weight": "norm",
    "mlp.experts.gate_up_proj": "gate, up",
    "mlp.gate.weight": "router",
    "attn.c_attn.weight": "qkv",
    "attn.c_proj.weight": "o",
    "mlp.c_proj.weight": "down",
    "attention.self.query.weight": "q",
    "attention.output.dense.weight": "o",
    "attention.output.LayerNorm.weight": "norm",
    "intermediate.dense.weight": "up",
    "output.dense.base_layer.weight": "down",
    "layer.0.SelfAttention.v.weight": "v",
    "layer.1.DenseReluDense.wi_0.weight": "gate",
    "ln_1.weight": "norm",
    "model.embed_tokens.weight": "embedding",
    "prompt_encoder.default.embedding.weight": "virtual tokens",
    "lm_head.weight": "head",
    "something.new": "other",
}


@pytest.mark.parametrize(("path", "expected"), KINDS.items())
def test_kinds(path: str, expected: str) -> None:
    assert kind(path) == expected and expected in ORDER


def _freezer(family: str, **sections: object) -> freezing.Freezer:
    values = {"recipe": "sft", "model": {"id": "m"}, "data": {"train": "t.jsonl"}, **sections}
    config = RunConfig.model_validate(values)
    return freezing.attach(tiny(family), config, seed=0)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "GPTNeoX", "Mixtral", "OPT", "Falcon"])
@pytest.mark.parametrize("adapter", [{"method": "lora", "rank": 2}, {"method": "full"}])
def test_every_value_that_trains_counts_once(family: str, adapter: dict[str, object]) -> None:
    freezer = _freezer(family, adapter=adapter, train={"learning_rate": 1e-3})
    assert sum(sum(each.parts.values()) for each in freezer.parts) == _trainable(freezer.model)
    blocks = [each for each in freezer.parts if each.name.startswith("block")]
    assert [each.layer for each in blocks] == list(range(1, len(freezer.blocks) + 1))
    for block, each in zip(freezer.blocks, blocks, strict=True):
        assert sum(each.parts.values()) == _trainable(block)
        assert "other" not in each.parts and list(each.parts) == [name for name in ORDER if name in each.parts]


@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_the_stacks_of_an_encoder_decoder_have_names_of_their_own(family: str) -> None:
    whisper = WhisperForConditionalGeneration(WhisperConfig(**WHISPER))
    model = whisper if family == "Whisper" else tiny("T5", head="Seq2SeqLM", **T5_SIZES)
    found = survey_parts(model, model, survey(model, needed=False))
    assert len({each.name for each in found}) == len(found)
    stacks = {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
    for each in found:
        if " block " in each.name:
            name, _, number = each.name.split()
            layers = next(module for module in stacks[name].children() if isinstance(module, nn.ModuleList))
            assert sum(each.parts.values()) == sum(own.numel() for own in layers[int(number) - 1].parameters())
    assert sum(" block " in each.name for each in found) == sum(map(len, anatomy.blocks(model)))


def test_parts_that_the_method_leaves_frozen_are_there_as_zeros() -> None:
    freezer = _freezer("Llama", adapter={"method": "lora", "rank": 2, "targets": ["q_proj", "v_proj"]})
    found = {each.name: each.parts for each in freezer.parts}
    assert {name for name, values in found["block 1"].items() if values} == {"q", "v"}
    assert {name for name, values in found["block 1"].items() if not values} == {"k", "o", "gate", "up", "down", "norm"}
    assert found["before the blocks"] == {"embedding": 0}


def _trainable(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)
