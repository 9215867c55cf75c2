"""Prefixes that stand in the attention: of encoders, encoder-decoders and classifiers.

Legend: B batch, L sequence, P virtual tokens, H heads, W width of a head.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.conftest import T5_SIZES, tiny
from workbench import adapters
from workbench.adapters import DeepPrompt, Method, Prefix
from workbench.adapters.prompts import prefix_tuner
from workbench.config import RunConfig
from workbench.errors import BackboneError, ConfigError
from workbench.schema import parse
from workbench.training import activation_checkpointing

KINDS: dict[str, dict[str, Any]] = {
    "Bert": {"head": "SequenceClassification", "num_labels": 3},
    "Roberta": {"head": "MaskedLM"},
    "Llama": {"head": "SequenceClassification", "num_labels": 3, "pad_token_id": 0},
    "T5": {"head": "Seq2SeqLM", **T5_SIZES},
}
EACH_KIND = pytest.mark.parametrize("kind", list(KINDS))
BOTH: list[Method] = [DeepPrompt(virtual_tokens=3), Prefix(virtual_tokens=3, encoder_width=8)]
EACH = pytest.mark.parametrize("config", BOTH, ids=lambda config: config.method)
ROWS = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 0, 0, 0, 0]])
MASK = (ROWS != 0).long()


def build(kind: str, **settings: Any) -> PreTrainedModel:
    return tiny(kind, **{**KINDS[kind], **settings}).requires_grad_(False)


def attach(model: PreTrainedModel, config: Method = BOTH[0]) -> Any:
    return adapters.attach(model, config, seed=0).eval()


def logits(model: Any, rows: Tensor = ROWS, mask: Tensor = MASK) -> Tensor:
    decoder = {"decoder_input_ids": ROWS[: len(rows)]} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=rows, attention_mask=mask, **decoder).logits
    return found


def heads_of(projected_BLD: Tensor, heads: int) -> Tensor:
    return projected_BLD.unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bert_attends_to_prefix_and_text_as_the_papers_write_it(implementation: str) -> None:
    """head = softmax(Q [P_k; K]^T / sqrt(W)) [P_v; V] (Li & Liang 2021, He et al. 2022, eq. 4)."""
    model = attach(build("Bert", attn_implementation=implementation))
    module: Any = model.get_base_model().bert.encoder.layer[1].attention.self
    hidden_BLD = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    Q, K, V = (heads_of(each(hidden_BLD), 4) for each in (module.query, module.key, module.value))
    prefix_K, prefix_V = (each.expand(2, -1, -1, -1) for each in module.prefix.keys_and_values())
    scores = Q @ torch.cat((prefix_K, K), dim=2).transpose(2, 3) / Q.shape[-1] ** 0.5
    scores[1, :, :, 3 + 3 :] = -torch.inf  # three virtual tokens, three words, then padding
    wanted = (scores.softmax(-1) @ torch.cat((prefix_V, V), dim=2)).transpose(1, 2).flatten(2)

    seen: Tensor = MASK[:, None, None, :].bool().expand(-1, -1, 7, -1)
    mask = seen if implementation == "sdpa" else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
    torch.testing.assert_close(module(hidden_BLD, mask)[0], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(hidden_BLD[:1], None)[0], wanted[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5s_decoder_sees_the_prefix_without_a_bias_and_no_later_word(implementation: str) -> None:
    model = attach(build("T5", attn_implementation=implementation))
    module: Any = model.get_base_model().decoder.block[0].layer[0].SelfAttention
    hidden_BLD = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    Q, K, V = (heads_of(each(hidden_BLD), 4) for each in (module.q, module.k, module.v))
    prefix_K, prefix_V = (each[None] for each in module.prefix.keys_and_values())
    bias = F.pad(module.compute_bias(5, 5), (3, 0))
    causal = F.pad(torch.ones(5, 5).tril(), (3, 0), value=1.0).bool()
    scores = (Q @ torch.cat((prefix_K, K), dim=2).transpose(2, 3) + bias).masked_fill(~causal, -torch.inf)
    wanted = module.o((scores.softmax(-1) @ torch.cat((prefix_V, V), dim=2)).transpose(1, 2).flatten(2))

    lower = torch.ones(5, 5).tril().bool()[None, None]
    mask = lower if implementation == "sdpa" else torch.zeros(lower.shape).masked_fill(~lower, -1e30)
    for given in (mask, *([None] if implementation == "sdpa" else [])):
        torch.testing.assert_close(module(hidden_BLD, mask=given)[0], wanted, rtol=1e-5, atol=1e-5)


@EACH_KIND
def test_every_attention_of_every_stack_has_a_prefix(kind: str) -> None:
    base = build(kind)
    found = prefix_tuner.attention_sizes(base)
    assert len(found) == {"T5": 6}.get(kind, 2), "T5's decoder has two in each block"
    with torch.device("meta"):
        skeleton = type(base)(base.config)
    assert prefix_tuner.attention_sizes(skeleton) == found
    assert all(base.get_submodule(path).config is not None for path in found)
    model = attach(base)
    assert adapters.count(model).trainable == sum(
        3 * heads * (keys + values) for heads, keys, values in found.values()
    ) + sum(each.numel() for name, each in model.named_parameters() if "modules_to_save" in name)


@EACH_KIND
@EACH
def test_a_row_is_the_same_alone_and_padded(kind: str, config: Method) -> None:
    model = attach(build(kind), config)
    together = logits(model)
    if kind == "T5":
        wanted = model(input_ids=ROWS[1:, :3], decoder_input_ids=ROWS[1:]).logits
        torch.testing.assert_close(together[1:], wanted, rtol=1e-4, atol=1e-5)
        return
    alone = logits(model, ROWS[1:, :3], MASK[1:, :3])
    found = together[1:, :3] if alone.ndim == 3 else together[1:]
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["T5", "Llama"])
def test_no_position_sees_later_words(kind: str) -> None:
    settings = {"head": "Seq2SeqLM"} if kind == "T5" else {}
    model = attach(build(kind, **settings))
    hidden = []
    for last in (7, 11):
        words = torch.tensor([[3, 60, 5, 61, last]])
        given = {"decoder_input_ids": words} if kind == "T5" else {}
        states = model(input_ids=ROWS[:1] if kind == "T5" else words, **given, output_hidden_states=True)
        hidden.append((states.decoder_hidden_states if kind == "T5" else states.hidden_states)[-1])
    torch.testing.assert_close(hidden[0][:, :4], hidden[1][:, :4], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hidden[0][:, 4], hidden[1][:, 4])


def test_t5_writes_the_same_with_a_cache_and_without() -> None:
    model = attach(build("T5"))
    said = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": MASK}
    with_cache, without = (model.generate(input_ids=ROWS, use_cache=cache, **said) for cache in (True, False))
    assert torch.equal(with_cache, without)
    with model.disable_adapter():
        assert not torch.equal(with_cache, model.generate(input_ids=ROWS, **said))


@EACH_KIND
@EACH
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_recomputed_activations_give_the_same_gradients(kind: str, config: Method) -> None:
    found = []
    for recompute in (False, True):
        model = attach(build(kind), config).train()
        if recompute:
            activation_checkpointing.keep(model, True)
        torch.manual_seed(0)
        logits(model).square().sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    assert found[0] and all(each is not None and each.any() for each in found[0].values())
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-5, atol=1e-6)


@EACH
def test_recomputing_is_refused_only_where_the_prefix_stands_in_the_cache(config: Method) -> None:
    sections = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "train": {"checkpointing": True}}
    run = parse(RunConfig, {**sections, "adapter": config.model_dump()}, source="here")
    for kind in KINDS:
        activation_checkpointing.require(run, build(kind))
        activation_checkpointing.require(run, attach(build(kind), config))
    text = f"train.checkpointing does not go with adapter.method={config.method}: transformers leaves out the key-value"
    bare = tiny("Llama")
    for model in (bare, adapters.attach(bare, config, seed=0)):
        with pytest.raises(ConfigError, match=text):
            activation_checkpointing.require(run, model)


@EACH_KIND
@EACH
def test_keys_and_values_are_shipped_and_no_network(kind: str, config: Method, tmp_path: Path) -> None:
    base = build(kind)
    bare = copy.deepcopy(base)
    model = attach(base, config)
    wanted = logits(model)
    adapters.save(model, tmp_path)
    saved = {name: each for name, each in load_file(tmp_path / "adapter_model.safetensors").items() if "prefix" in name}
    assert {name.rsplit(".", 1)[-1] for name in saved} == {"keys", "values"}
    assert len(saved) == 2 * len(prefix_tuner.attention_sizes(bare))
    torch.testing.assert_close(logits(adapters.load(bare, tmp_path)), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)


def test_several_named_adapters_switch(tmp_path: Path) -> None:
    base = build("Roberta")
    before = logits(base)
    model = attach(base)
    first = logits(model)
    torch.manual_seed(3)
    model.add_adapter("second", BOTH[0].to_peft(base, adapters.ExtraParameters()))
    model.set_adapter("second")
    assert not torch.allclose(first, logits(model), atol=1e-2)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    detached = adapters.detach(model)
    assert detached is not None
    assert torch.equal(logits(detached), before) and not hasattr(detached.get_submodule(_first(detached)), "prefix")


def _first(model: PreTrainedModel) -> str:
    return next(iter(prefix_tuner.attention_sizes(model)))


def test_an_adapter_of_another_backbone_is_refused_before_it_is_used(tmp_path: Path) -> None:
    adapters.save(attach(build("Bert")), tmp_path)
    for other in (build("Bert", hidden_size=64), build("Bert", num_hidden_layers=3)):
        with pytest.raises(BackboneError, match="does not fit the backbone"):
            adapters.load(other, tmp_path)


@EACH
def test_attention_that_cannot_be_added_to_is_refused(config: Method) -> None:
    with pytest.raises(ConfigError, match=r"DebertaV2ForMaskedLM does not compute attention .*adapter.method=lora"):
        adapters.attach(tiny("DebertaV2", head="MaskedLM"), config, seed=0)
    base = build("Bert")
    base.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"not added to flash_attention_2. Write model.attention=sdpa"):
        adapters.attach(base, config, seed=0)


def test_looking_for_the_places_leaves_no_trace() -> None:
    base: nn.Module = build("Bert").train()
    kept = {path: vars(module).get("config") for path, module in base.named_modules()}
    prefix_tuner.attention_sizes(base)  # type: ignore[arg-type]
    assert base.training and all(vars(base.get_submodule(path)).get("config") is each for path, each in kept.items())
