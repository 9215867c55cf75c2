"""Every parameter has its layer, whatever the family and the adapter."""

from __future__ import annotations

import pytest

from tests.conftest import T5_SIZES, tiny
from workbench import adapters
from workbench.adapters import Lora
from workbench.errors import BackboneError
from workbench.training.freezing.layer_map import survey

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
