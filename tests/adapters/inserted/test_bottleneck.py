"""Bottleneck adapters stand where their papers put them, whatever the family, and come off again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Bottleneck
from workbench.adapters.inserted import bottleneck
from workbench.config import RunConfig
from workbench.errors import BackboneError, ConfigError
from workbench.schema import parse

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

METHOD = pytest.mark.parametrize("method", ["houlsby", "pfeiffer", "parallel"])
BACKBONE = pytest.mark.parametrize("backbone", ["Bert", "Llama"])
ids = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2]])
Adapter = Callable[[str, Tensor], Tensor]
"""A(place, x)."""


def build(backbone: str) -> PreTrainedModel:
    model = tiny("Bert", head="MaskedLM") if backbone == "Bert" else tiny(backbone)
    return model.requires_grad_(False)


def section(method: str, **settings: Any) -> Bottleneck:
    return Bottleneck.model_validate({"method": method, "width": 5, **settings})


def attach(model: PreTrainedModel, method: str, **settings: Any) -> Any:
    """With an adapter that changes much."""
    attached = adapters.attach(model, section(method, **settings), seed=0)
    return disturb(attached, 1)


def disturb(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=ids).logits
    return found


# The equations, written a second time.


def bert(model: Any, method: str, adapter: Adapter) -> Tensor:
    """Logits of BERT: post-norm, so every sum is normalised at once."""
    x = model.bert.embeddings(ids)
    for number, layer in enumerate(model.bert.encoder.layer):
        here = f"bert.encoder.layer.{number}"
        h = layer.attention.output.dense(layer.attention.self(x)[0])
        if method == "houlsby":
            h = h + adapter(f"{here}.attention.output.dense", h)
        x = layer.attention.output.LayerNorm(x + h)
        h = layer.output.dense(F.gelu(layer.intermediate.dense(x)))
        if method == "houlsby":
            h = h + adapter(f"{here}.output.dense", h)
        if method == "parallel":
            h = h + 4 * adapter(f"{here}.output.dense", x)
        s = x + h
        if method == "pfeiffer":
            s = s + adapter(f"{here}.output.LayerNorm", layer.output.LayerNorm(s))
        x = layer.output.LayerNorm(s)
    found: Tensor = model.cls(x)
    return found


def llama(model: Any, method: str, adapter: Adapter) -> Tensor:
    """Logits of Llama: pre-norm, so the residual stream is never normalised before the end."""
    x = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])
    for number, layer in enumerate(model.model.layers):
        here = f"model.layers.{number}"
        h, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=None)
        if method == "houlsby":
            h = h + adapter(f"{here}.self_attn.o_proj", h)
        x = x + h
        m = layer.post_attention_layernorm(x)
        h = layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(m)) * layer.mlp.up_proj(m))
        if method == "houlsby":
            h = h + adapter(f"{here}.mlp.down_proj", h)
        if method == "parallel":
            h = h + 4 * adapter(f"{here}.mlp.down_proj", m)
        x = x + h
        if method == "pfeiffer":
            x = x + adapter(here, x)
    found: Tensor = model.lm_head(model.model.norm(x))
    return found


@METHOD
@BACKBONE
def test_the_equation_written_out(backbone: str, method: str) -> None:
    bare = build(backbone).double()
    attached = attach(copy.deepcopy(bare), method).double().eval()
    weights = {name.removeprefix("base_model.model."): each for name, each in attached.named_parameters()}
    kind = {"houlsby": "after", "parallel": "beside"}.get(method, "within" if backbone == "Bert" else "after")
    used: set[str] = set()

    def adapter(place: str, x: Tensor) -> Tensor:
        names = [
            f"{place}.{kind}_bottleneck.bottleneck_{part}.default.{each}"
            for part in ("down", "up")
            for each in ("weight", "bias")
        ]
        used.update(names)
        down, down_bias, up, up_bias = (weights[name] for name in names)
        return F.relu(x @ down.T + down_bias) @ up.T + up_bias

    found, wanted = attached(input_ids=ids).logits, {"Bert": bert, "Llama": llama}[backbone](bare, method, adapter)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert used == {name for name, each in weights.items() if each.requires_grad}
    assert not torch.allclose(found, bare(input_ids=ids).logits, atol=0.1)

    trained = [weights[name] for name in sorted(used)]
    by_hand = torch.autograd.grad(wanted.square().mean(), trained, retain_graph=True)
    for mine, other in zip(torch.autograd.grad(found.square().mean(), trained), by_hand, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_the_scale_multiplies_what_is_added_and_dropout_drops_it() -> None:
    bare = build("Llama")
    wanted = logits(attach(copy.deepcopy(bare), "houlsby"))
    doubled = attach(copy.deepcopy(bare), "houlsby", scale=2.0)
    for name, each in doubled.named_parameters():
        if "bottleneck_up" in name:
            each.data /= 2
    torch.testing.assert_close(logits(doubled), wanted)
    dropping = attach(copy.deepcopy(bare), "houlsby", dropout=0.999999)
    torch.testing.assert_close(logits(dropping), wanted)
    torch.testing.assert_close(dropping.train()(input_ids=ids).logits.detach(), logits(bare), rtol=1e-4, atol=1e-4)


@METHOD
def test_a_fresh_adapter_changes_no_bit(method: str) -> None:
    bare = build("Llama")
    assert torch.equal(logits(adapters.attach(copy.deepcopy(bare), section(method), seed=0)), logits(bare))


# Where it attaches. The families of the contract suite come with their gradients there.

DEEPSEEK = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "moe_intermediate_size": 16,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_hidden_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


def test_houlsby_is_at_the_output_of_every_attention_and_every_mlp() -> None:
    def places(model: PreTrainedModel) -> list[str]:
        return [path.split("s.", 1)[-1].split("block.", 1)[-1] for path in section("houlsby").modules(model)]

    # Phi-3 builds its output projection first; Deepseek's first MLP is dense, its second a mixture of experts.
    phi = ["0.self_attn.o_proj", "0.mlp.down_proj", "1.self_attn.o_proj", "1.mlp.down_proj"]
    assert places(tiny("Phi3")) == phi
    assert places(tiny("DeepseekV3", **DEEPSEEK)) == [*phi[:3], "1.mlp"]
    assert places(tiny("T5", head="Seq2SeqLM", **T5)) == [
        "0.layer.0.SelfAttention.o",
        "0.layer.1.DenseReluDense.wo",
        "0.layer.0.SelfAttention.o",
        "0.layer.1.EncDecAttention.o",
        "0.layer.2.DenseReluDense.wo",
    ]


def test_pfeiffer_is_before_the_norm_of_a_block_that_ends_with_one() -> None:
    albert = tiny("Albert", head="MaskedLM", embedding_size=16)
    norm = "albert.encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm"
    assert bottleneck.find_places(albert, "pfeiffer").within == [norm]
    # Its norm in the MLP is in front of the projection, and the one after the stack tells that blocks end without.
    bitnet = tiny("BitNet", num_key_value_heads=2)
    assert bottleneck.find_places(bitnet, "pfeiffer").after == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (lambda: tiny("OPT", do_layer_norm_before=False), "pfeiffer"),
        (lambda: tiny("Bart", head="Seq2SeqLM", **BART), "pfeiffer"),
        (lambda: tiny("Mamba", head="CausalLM"), "houlsby"),
    ],
    ids=["post-norm OPT", "Bart", "Mamba"],
)
def test_a_place_that_cannot_be_told_is_refused(model: Callable[[], PreTrainedModel], method: str) -> None:
    built = model()
    with pytest.raises(ConfigError, match=r"cannot be told from .* Write adapter.method=") as caught:
        adapters.attach(built, section(method), seed=0)
    assert type(built).__name__ in str(caught.value)


def test_the_width_of_the_bottleneck(llama: PreTrainedModel) -> None:
    def width(**settings: Any) -> int:
        config: Any = Bottleneck(method="pfeiffer", **settings).to_peft(llama, adapters.ExtraParameters())
        return int(config.width)

    assert (width(), width(reduction=4), width(width=7)) == (2, 8, 7)
    with pytest.raises(ConfigError, match=r"32 hidden units .* adapter.reduction=33 leave none. Write adapter.width"):
        adapters.attach(llama, Bottleneck(reduction=33), seed=0)
    both = {"recipe": "sft", "adapter": {"method": "houlsby", "width": 4, "reduction": 2}, "data": {"train": "x.jsonl"}}
    with pytest.raises(ConfigError, match=r"adapter.*: .*width and reduction .* Write one of them"):
        parse(RunConfig, both, source="here")


# Several adapters on one backbone; merging; other backbones.


@METHOD
@BACKBONE
def test_named_adapters_are_switched_stacked_saved_and_deleted(backbone: str, method: str, tmp_path: Path) -> None:
    bare = build(backbone)
    alone = {"default": attach(copy.deepcopy(bare), method), "other": attach(copy.deepcopy(bare), "houlsby", width=3)}
    disturb(alone["other"], 2)
    wanted = {name: logits(model) for name, model in alone.items()}
    for name, model in alone.items():
        (tmp_path / name).mkdir()
        adapters.save(model, tmp_path / name)

    model: Any = PeftModel.from_pretrained(copy.deepcopy(bare), str(tmp_path / "default"))
    model.load_adapter(str(tmp_path / "other"), "other", is_trainable=True)
    for name in ("other", "default", "other"):
        model.set_adapter(name)
        assert torch.equal(logits(model), wanted[name])
        trained = [each for each, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained and all(f".{name}." in each for each in trained)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(bare))

    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    assert not any(torch.allclose(both, each, atol=1e-2) for each in wanted.values())
    model.save_pretrained(str(tmp_path / "both"))
    again: Any = PeftModel.from_pretrained(copy.deepcopy(bare), str(tmp_path / "both" / "other"), "other")
    assert torch.equal(logits(again), wanted["other"])

    model.delete_adapter("other")
    model.set_adapter("default")
    assert torch.equal(logits(model), wanted["default"])
    assert not any(".other." in name for name in model.state_dict())


@METHOD
def test_a_merge_is_refused_and_unloading_leaves_the_bare_backbone(method: str) -> None:
    bare = build("Bert")
    model = attach(copy.deepcopy(bare), method)
    with pytest.raises(ConfigError, match=f"adapter.method={method} cannot be merged: .* activation"):
        adapters.merge(model, section(method))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConfigError, match=r"cannot be merged: .* Keep backbone and adapter apart"):
            merge()
    unloaded = model.unload()
    assert unloaded.state_dict().keys() == bare.state_dict().keys()
    assert torch.equal(logits(unloaded), logits(bare))


@METHOD
def test_a_copy_works_with_its_own_weights(method: str) -> None:
    model = attach(build("Llama"), method)
    wanted = logits(model)
    changed = disturb(copy.deepcopy(model), 3)
    assert not torch.allclose(logits(changed), wanted, atol=1e-2)
    assert torch.equal(logits(model), wanted)
    changed.unload()
    assert torch.equal(logits(model), wanted)


@METHOD
@BACKBONE
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(backbone: str, method: str, reentrant: bool) -> None:
    def gradients(model: Any) -> list[Tensor]:
        model.train()(input_ids=ids, labels=ids).loss.backward()
        return [each.grad for each in model.parameters() if each.requires_grad]

    bare = build(backbone)
    for module in bare.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = gradients(attach(copy.deepcopy(bare), method))
    model = attach(bare, method)
    if reentrant:
        model.enable_input_require_grads()  # or the first block has nothing that asks for a gradient
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for found, each in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(found, each)


@METHOD
def test_another_backbone_is_refused_with_what_does_not_fit(method: str, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    adapters.save(attach(build("Llama"), method), tmp_path / "adapter")
    with pytest.raises(BackboneError, match=r"GPT2LMHeadModel has no module model.layers.0"):
        adapters.load(build("GPT2"), tmp_path / "adapter")
    with pytest.raises(BackboneError, match=r"size mismatch for .*layers.0.*bottleneck_down"):
        adapters.load(tiny("Llama", hidden_size=48), tmp_path / "adapter")


@METHOD
def test_rows_of_new_tokens_train_beside(method: str, tmp_path: Path) -> None:
    bare = tiny("Llama", tie_word_embeddings=False).requires_grad_(False)
    model = adapters.attach(copy.deepcopy(bare), section(method), seed=0, new_token_ids=[60, 61])
    wanted = logits(disturb(model, 1))
    adapters.save(model, tmp_path)
    torch.testing.assert_close(logits(adapters.load(copy.deepcopy(bare), tmp_path)), wanted)
    trained = [each.shape for name, each in model.named_parameters() if each.requires_grad and "token" in name]
    assert trained == [(2, 32), (2, 32)]


# Published counts.


@pytest.mark.parametrize(("width", "per_cent"), [(64, 2.1), (2, 0.1)])
def test_the_share_of_bert_large_that_houlsby_et_al_train(width: int, per_cent: float) -> None:
    """Houlsby et al. 2019: 2.1 % a task with 64 units (table 1; 1.2 times BERT for nine tasks), 0.1 % with 2 (3.5).

    Their share is of the encoder, embeddings aside; of all 335 M weights it would be 1.9 %. Not counted: layer
    normalisations (0.03 %, which they train and we do not) and heads.
    """
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(**large))
    encoder = sum(each.numel() for each in model.bert.encoder.parameters())
    trained = adapters.count(adapters.attach(model, section("houlsby", width=width), seed=0)).trainable
    assert trained == 24 * 2 * (2 * width * 1024 + width + 1024)  # 2md + d + m for each adapter (their section 2.1)
    assert abs(100 * trained / encoder - per_cent) < 0.1
    assert round(1 + 9 * trained / encoder, 1) == (1.2 if width == 64 else 1.0)
