"""Copies train in place of the backbone's weights: which, how many, beside each other, and back into the backbone."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from tests.conftest import tiny
from workbench import adapters, losses
from workbench.adapters import BitFit, LastLayers, LayerNorm, LinearProbe, Method
from workbench.errors import ConfigError
from workbench.models import output_heads, weight_formats
from workbench.training import activation_checkpointing

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
METHODS: dict[str, Method] = {"bitfit": BitFit(), "linear-probe": LinearProbe(), "last-layers": LastLayers(layers=1)}
METHOD = pytest.mark.parametrize("name", METHODS)


def _attach(model: PreTrainedModel, config: Method, new: tuple[int, ...] = ()) -> Any:
    return adapters.attach(model, config, seed=0, new_token_ids=new)


def _disturb(model: nn.Module, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits.float()


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _own(name: str) -> str:
    """The backbone's name of the parameter that a copy stands for."""
    return name.removeprefix("base_model.model.").replace(".partial.partial_copies.default", "")


def _t5() -> PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    return tiny("T5", head="Seq2SeqLM", tie_word_embeddings=True, **sizes)


# Which parameters train.


def test_bitfit_trains_every_bias_below_the_head_and_nothing_else(family: PreTrainedModel) -> None:
    wanted = {name for name, _ in family.base_model.named_parameters() if name.endswith("bias")}
    if not wanted:
        with pytest.raises(ConfigError, match=r"has no biases, so nothing would train\. Write adapter\.method="):
            _attach(family, BitFit())
        return
    model = _attach(family, BitFit())
    prefix = family.base_model_prefix + "."
    found = {_own(name).removeprefix(prefix) for name, each in model.named_parameters() if each.requires_grad}
    assert found == wanted


@pytest.mark.parametrize(("width", "heads", "layers", "share"), [(768, 12, 12, "0.09%"), (1024, 16, 24, "0.08%")])
def test_bitfit_of_bert_is_as_small_as_the_paper_says(width: int, heads: int, layers: int, share: str) -> None:
    """Table 1 of Ben Zaken et al. 2022; their count leaves out the task's head."""
    config = BertConfig(
        hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=4 * width
    )
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    body = adapters.count(model.bert).total
    trainable = (
        adapters.count(_attach(model, BitFit())).trainable - adapters.count(model.classifier.original_module).total
    )
    assert trainable == layers * 11 * width + 2 * width
    assert f"{trainable / body:.2%}" == share


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("Llama", "model.norm"),
        ("GPT2", "transformer.ln_f"),
        ("OPT", "model.decoder.final_layer_norm"),
        ("GPTNeoX", "gpt_neox.final_layer_norm"),
        ("Falcon", "transformer.ln_f"),
        ("Phi", "model.final_layernorm"),
        ("Mixtral", "model.norm"),
        ("Gemma3Text", "model.norm"),
    ],
)
def test_last_layers_are_the_last_block_and_the_final_norm(name: str, norm: str) -> None:
    base = tiny(name)
    last = adapters.anatomy.blocks(base)[0][-1]
    wanted = {path for path, _ in base.named_parameters() if path.startswith((f"{last}.", f"{norm}."))}
    model = _attach(base, LastLayers(layers=1))
    assert {_own(path) for path, each in model.named_parameters() if each.requires_grad} == wanted


@pytest.mark.parametrize("name", ["Bert", "Roberta", "DebertaV2"])
def test_encoders_that_normalise_after_each_layer_have_no_final_norm(name: str) -> None:
    base = tiny(name, head="MaskedLM")
    assert LastLayers(layers=1).modules(base) == [f"{base.base_model_prefix}.encoder.layer.1"]


def test_of_an_encoder_decoder_the_last_layers_are_the_decoders() -> None:
    model = _t5()
    assert LastLayers(layers=2).modules(model) == ["decoder.block.1", "decoder.block.2", "decoder.final_layer_norm"]
    with pytest.raises(ConfigError, match=r"adapter\.layers=4, but T5ForConditionalGeneration has 3 blocks\. Write"):
        _attach(model, LastLayers(layers=4))


def test_a_body_without_a_head_cannot_be_probed(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"LlamaModel has no output head\. Take a backbone with one"):
        _attach(llama.model, LinearProbe())


# Their values.


@METHOD
def test_a_fresh_copy_and_a_merged_one_compute_the_same_bit_for_bit(name: str) -> None:
    base = tiny("Phi")
    before = _logits(base)
    model = _attach(copy.deepcopy(base), METHODS[name])
    assert torch.equal(_logits(model), before)
    trained = _logits(_disturb(model))
    assert not torch.allclose(trained, before, atol=1e-2)
    merged = adapters.merge(model, METHODS[name])
    assert type(merged) is type(base) and type(merged.lm_head) is nn.Linear
    assert torch.equal(_logits(merged), trained)
    unloaded = _disturb(_attach(copy.deepcopy(base), METHODS[name])).unload()
    assert torch.equal(_logits(unloaded), before)


@METHOD
def test_the_gradient_is_that_of_the_backbones_own_parameter(name: str) -> None:
    base = tiny("Phi")
    model = _attach(copy.deepcopy(base), METHODS[name])
    found = _gradients(model, model(input_ids=IDS, labels=IDS).loss)
    wanted = _gradients(base, base(input_ids=IDS, labels=IDS).loss)
    assert found
    for path, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[_own(path)], rtol=1e-5, atol=1e-7)


@METHOD
def test_recomputed_activations_see_the_copies(name: str) -> None:
    model = _disturb(_attach(tiny("Phi"), METHODS[name])).train()
    wanted = _gradients(model, model(input_ids=IDS, labels=IDS).loss)
    activation_checkpointing.keep(model, True)
    found = _gradients(model, model(input_ids=IDS, labels=IDS).loss)
    torch.testing.assert_close(found, wanted)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
def test_compiled_layers_see_the_copies_that_are_active_now() -> None:
    model = _disturb(_attach(tiny("Phi"), BitFit()))
    wanted = _logits(model)
    for layer in model.base_model.model.model.layers:
        layer.compile(dynamic=True, backend="aot_eager")  # what is traced and guarded; code generation takes 30 s
    torch.testing.assert_close(_logits(model), wanted, rtol=1e-5, atol=1e-5)
    wanted = _logits(_disturb(copy.deepcopy(model), seed=2))
    torch.testing.assert_close(_logits(_disturb(model, seed=2)), wanted, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(_logits(model), _logits(tiny("Phi")), rtol=1e-5, atol=1e-5)


def test_copies_over_half_precision_weights_train_in_float32() -> None:
    for config in METHODS.values():
        reference = _disturb(_attach(tiny("Phi").bfloat16().float(), config))
        stored = tiny("Phi").bfloat16()
        weight_formats.compute_in(stored, torch.float32)
        model = _disturb(_attach(stored.requires_grad_(False), config))
        torch.testing.assert_close(_logits(model), _logits(reference))
        found = _gradients(model, model(input_ids=IDS, labels=IDS).loss)
        torch.testing.assert_close(found, _gradients(reference, reference(input_ids=IDS, labels=IDS).loss))
        assert torch.equal(_logits(adapters.merge(model, config)), _logits(adapters.merge(reference, config)))


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_biases_of_quantised_layers(weights: str, tmp_path: Path) -> None:
    tiny("OPT", hidden_size=64, word_embed_proj_dim=64, ffn_dim=64).save_pretrained(tmp_path / "base")
    four = weights == "nf4"
    quantised = BitsAndBytesConfig(load_in_4bit=four, load_in_8bit=not four, bnb_4bit_quant_type="nf4")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantised, device_map="cpu")
    weight_formats.settle(loaded, torch.float32)
    before = _logits(loaded)
    model = _attach(loaded.requires_grad_(False), BitFit())
    assert torch.equal(_logits(model), before)
    _disturb(model)
    found = _gradients(model, model(input_ids=IDS, labels=IDS).loss)
    # The same values over the weights that it multiplies with.
    plain = copy.deepcopy(model).unload().dequantize(torch.float32).requires_grad_(False)
    reference = _attach(plain, BitFit())
    reference.load_state_dict({key: each for key, each in model.state_dict().items() if "partial" in key}, strict=False)
    wanted = _gradients(reference, reference(input_ids=IDS, labels=IDS).loss)
    assert found.keys() == wanted.keys()
    for path, gradient in found.items():
        largest = max(float(wanted[path].abs().max()), 1e-3)
        assert float((gradient - wanted[path]).abs().max()) < (1e-4 if four else 0.1) * largest, path


# Beside each other, and away.


def test_adapters_live_beside_each_other(tmp_path: Path) -> None:
    base = tiny("GPT2")
    alone: dict[str, Tensor] = {}
    for seed, (name, config) in enumerate(METHODS.items()):
        model = _disturb(_attach(copy.deepcopy(base), config), seed)
        adapters.save(model, tmp_path / name)
        alone[name] = _logits(model)
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        assert sum(each.numel() for each in saved.values()) == adapters.count(model).trainable
    together: Any = adapters.load(copy.deepcopy(base), tmp_path / "bitfit")
    for name in ("linear-probe", "last-layers"):
        together.load_adapter(str(tmp_path / name), adapter_name=name)
    for name, active in (("last-layers", "last-layers"), ("bitfit", "default"), ("linear-probe", "linear-probe")):
        together.set_adapter(active)
        assert torch.equal(_logits(together), alone[name]), name
    with together.disable_adapter():
        assert torch.equal(_logits(together), _logits(base))
    with pytest.raises(ValueError, match="replace the same weights"):
        together.base_model.set_adapter(["default", "last-layers"])
    together.set_adapter("last-layers")
    together.delete_adapter("default")
    assert torch.equal(_logits(together), alone["last-layers"])


# A head that shares the embedding's weights.


def test_the_chunked_loss_reaches_a_tied_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("workbench.losses.chunked_loss"), "CHUNK_ELEMENTS", 3 * 64)
    base = tiny("Llama", tie_word_embeddings=True).requires_grad_(False)
    embedding = base.get_input_embeddings().weight.clone()
    model = _disturb(_attach(base, LinearProbe()))
    head = output_heads.find(model, base)
    assert (head.vocabulary, head.width, [tuple(each.shape) for each in head.trainable()]) == (64, 32, [(64, 32)])
    hidden = head.hidden(model, {"input_ids": IDS})[0, :-1]
    loss = losses.next_token(hidden, IDS[0, 1:], head.project, vocabulary=64, weights=head.trainable(), scale=1 / 6)
    found = _gradients(model, loss)
    wanted = _gradients(model, F.cross_entropy(model(input_ids=IDS).logits[0, :-1], IDS[0, 1:]))
    torch.testing.assert_close(found, wanted)
    assert len(found) == 1 and torch.equal(base.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Falcon", "Gemma3Text", "Bert", "T5"])
def test_a_merged_head_is_no_longer_tied_and_a_stock_install_loads_it_so(name: str, tmp_path: Path) -> None:
    auto = {"Bert": AutoModelForMaskedLM, "T5": AutoModelForSeq2SeqLM}.get(name, AutoModelForCausalLM)
    if name == "T5":
        base = _t5()
    else:
        base = tiny(name, head="MaskedLM" if name == "Bert" else "CausalLM", tie_word_embeddings=True)
    embedding = base.get_input_embeddings().weight.clone()
    inputs = {"input_ids": IDS, **({"labels": IDS} if name == "T5" else {})}
    model = _disturb(_attach(base.requires_grad_(False), LinearProbe())).eval()
    with torch.no_grad():
        wanted = model(**inputs).logits
        merged = adapters.merge(model, LinearProbe())
        assert torch.equal(merged(**inputs).logits, wanted)
        merged.save_pretrained(tmp_path)
        stock = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert torch.equal(stock(**inputs).logits, wanted)
    assert torch.equal(stock.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize("config", [BitFit(), LastLayers(layers=1)], ids=["bitfit", "last-layers"])
def test_rows_of_new_tokens_train_beside(config: Method, tmp_path: Path) -> None:
    base = tiny("GPT2").requires_grad_(False)
    model = _disturb(_attach(copy.deepcopy(base), config, (60, 61)))
    wanted = _logits(model)
    adapters.save(model, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(each.numel() for each in saved.values()) == adapters.count(model).trainable
    torch.testing.assert_close(_logits(adapters.load(copy.deepcopy(base), tmp_path / "adapter")), wanted)
    torch.testing.assert_close(_logits(adapters.merge(model, config)), wanted, rtol=1e-4, atol=1e-5)


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
