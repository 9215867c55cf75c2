"""Virtual tokens are tokens: at the right positions, seen by the text alone, the same whatever a row is padded with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import FAMILIES, tiny
from workbench import adapters
from workbench.adapters import METHODS, DeepPrompt, Method, Prefix, Prompt, PTuning
from workbench.errors import BackboneError, ConfigError
from workbench.models import output_heads, weight_formats

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WORDS = torch.tensor([[33, 44, 55]])
TEXT = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
SMALL: list[Method] = [
    Prompt(virtual_tokens=3),
    PTuning(virtual_tokens=3),
    DeepPrompt(virtual_tokens=3),
    Prefix(virtual_tokens=3, encoder_width=8),
]
EACH = pytest.mark.parametrize("config", SMALL, ids=lambda config: config.method)


def build(name: str) -> PreTrainedModel:
    model = tiny(name, head="Seq2SeqLM", decoder_start_token_id=0, **T5) if name == "T5" else tiny(name)
    return model.requires_grad_(False)


def attach(model: PreTrainedModel, config: Method) -> Any:
    """Adapter with values that differ from what it starts from."""
    attached = adapters.attach(model, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return attached.eval()


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = TEXT) -> Tensor:
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}  # type: ignore[union-attr]
    found: Tensor = model(input_ids=ids, **inputs).logits[:, -ids.shape[1] :]
    return found


@torch.no_grad()
def keys_and_values(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the backbone itself caches of these tokens, as a row of a prefix for each."""
    cache = model(input_ids=ids, use_cache=True).past_key_values
    kept = torch.stack([kind for layer in cache.layers for kind in (layer.keys[0], layer.values[0])])
    return kept.permute(2, 0, 1, 3).flatten(1)


@pytest.mark.parametrize("name", [*sorted(FAMILIES), "T5"])
def test_a_prompt_of_real_embeddings_is_those_tokens_before_the_text(name: str) -> None:
    base = build(name)
    wanted = _after_words(base)
    model: Any = adapters.attach(base, Prompt(virtual_tokens=3), seed=0).eval()
    words = base.get_input_embeddings()(WORDS[0])
    model.prompt_encoder["default"].embedding.weight.data = words.clone()
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)


def test_a_prefix_of_real_keys_and_values_is_those_tokens_before_the_text(family: PreTrainedModel) -> None:
    wanted, kept = _after_words(family), keys_and_values(family, WORDS)
    model: Any = adapters.attach(family, DeepPrompt(virtual_tokens=3), seed=0).eval()
    prefix = model.prompt_encoder["default"].embedding.weight
    assert prefix.shape == kept.shape
    prefix.data = kept
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _after_words(base: PreTrainedModel) -> Tensor:
    """The backbone's logits of the text behind WORDS, which stand in the encoder where there is one."""
    both = torch.cat([WORDS, TEXT], 1)
    decoder = {"decoder_input_ids": TEXT} if base.config.is_encoder_decoder else {}
    found: Tensor = base(input_ids=both, **decoder).logits[:, -TEXT.shape[1] :]
    return found


@pytest.mark.nightly(but="each value once")
@EACH
def test_a_row_is_the_same_alone_and_padded_on_the_right(family: PreTrainedModel, config: Method) -> None:
    model = attach(family, config)
    head = output_heads.find(model, family)
    rows = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 0, 0, 0, 0]])
    with torch.no_grad():
        together = head.hidden(model, {"input_ids": rows})
        alone = head.hidden(model, {"input_ids": rows[1:, :3]})
        masked = model(input_ids=rows, attention_mask=(rows != 0).long()).logits
    torch.testing.assert_close(together[1:, :3], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.project(together)[1, :3], masked[1, -7:-4], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(but="each value once")
@EACH
def test_the_first_virtual_token_is_seen_and_sees_no_text(family: PreTrainedModel, config: Method) -> None:
    model = attach(family, config)
    before = logits(model)
    weight = model.prompt_encoder["default"].embedding.weight
    weight.data[0] += torch.linspace(-1, 1, weight.shape[1])
    assert float((logits(model)[0, 0] - before[0, 0]).abs().max()) > 1e-3
    changed = TEXT.clone()
    changed[0, 4:] = 11
    torch.testing.assert_close(logits(model, changed)[0, :4], logits(model)[0, :4], rtol=1e-5, atol=1e-5)


@EACH
def test_several_named_adapters_switch_and_are_saved_apart(
    llama: PreTrainedModel, config: Method, tmp_path: Path
) -> None:
    bare = copy.deepcopy(llama)
    base = logits(llama)
    model = attach(llama, config)
    first = logits(model)
    torch.manual_seed(3)
    model.add_adapter("second", config.to_peft(llama, adapters.ExtraParameters()))
    model.set_adapter("second")
    second = logits(model)
    assert not torch.allclose(first, second, atol=1e-2)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)

    adapters.save(model, tmp_path / "both")
    loaded: Any = adapters.load(bare, tmp_path / "both")
    torch.testing.assert_close(logits(loaded), first, rtol=1e-5, atol=1e-5)
    adapters.load(loaded, tmp_path / "both" / "second", name="second")
    loaded.set_adapter("second")
    torch.testing.assert_close(logits(loaded), second, rtol=1e-5, atol=1e-5)


@EACH
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_virtual_tokens_have_the_precision_that_is_computed_in(
    llama: PreTrainedModel, config: Method, stored: torch.dtype, tmp_path: Path
) -> None:
    llama.to(stored)  # type: ignore[arg-type]
    exact = attach(copy.deepcopy(llama).float(), config)
    weight_formats.compute_in(llama, torch.float32)
    bare = copy.deepcopy(llama)
    model = attach(llama, config)
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-5)
    adapters.save(model, tmp_path)
    torch.testing.assert_close(logits(adapters.load(bare, tmp_path)), logits(exact), rtol=1e-4, atol=1e-5)


@EACH
def test_an_adapter_of_another_backbone_is_refused_before_it_is_used(config: Method, tmp_path: Path) -> None:
    adapters.save(attach(build("Llama"), config), tmp_path)
    others = [tiny("Llama", hidden_size=64)]
    if isinstance(config, DeepPrompt | Prefix):
        others.append(tiny("Llama", num_hidden_layers=3))
    for other in others:
        with pytest.raises(BackboneError, match="does not fit the backbone"):
            adapters.load(other, tmp_path)


@pytest.mark.parametrize("config", SMALL[:2], ids=lambda config: config.method)
@pytest.mark.parametrize(("name", "head"), [("Bert", "MaskedLM"), ("Bert", "SequenceClassification")])
def test_models_that_write_no_text_are_refused(config: Method, name: str, head: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{config.method}: virtual tokens .* BertFor{head} .*Use adapter.method=lora"
    ):
        adapters.attach(tiny(name, head=head), config, seed=0)


@EACH
def test_they_cannot_be_merged_and_say_why(llama: PreTrainedModel, config: Method) -> None:
    with pytest.raises(ConfigError, match="cannot be merged: virtual tokens are no update of its weights"):
        adapters.merge(attach(llama, config), config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DeepPrompt(virtual_tokens=200), 11_468_800),
        (Prefix(virtual_tokens=200, encoder_width=None), 11_468_800),
        (Prompt(virtual_tokens=200), 614_400),
        # 1,024 wide: 8 heads of 128. Embeddings, then a layer to 512, then one to keys and values of 28 layers.
        (Prefix(virtual_tokens=200), 200 * 1024 + 1024 * 512 + 512 + 512 * 2 * 28 * 1024 + 2 * 28 * 1024),
        (PTuning(virtual_tokens=200), 200 * 3072 + 3 * (3072 * 3072 + 3072)),
    ],
    ids=lambda value: value.method if isinstance(value, Method) else str(value),
)
def test_parameters_of_llama_32_3b_as_published(config: Method, expected: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    llama = LlamaConfig(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama)
    assert adapters.count(adapters.attach(model, config, seed=0)).trainable == expected


def test_every_method_of_the_family_counts_its_positions() -> None:
    """Embeddings and a cache take positions of the backbone, keys and values in attention modules none."""
    causal, encoder = tiny("Llama"), tiny("Bert", head="SequenceClassification", num_labels=3)
    in_cache = {"prompt": 20, "p-tuning": 20, "prefix": 20, "p-tuning-v2": 20, "lora": 0}
    assert {name: METHODS[name]().extra_positions(causal) for name in in_cache} == in_cache
    beside = {"prefix": 0, "p-tuning-v2": 0, "lora": 0}
    assert {name: METHODS[name]().extra_positions(encoder) for name in beside} == beside
