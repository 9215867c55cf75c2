"""Half-precision storage with other products: the same function as a converted copy, at half the bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.conftest import GROUPED, tiny
from workbench import adapters
from workbench.adapters import Lora
from workbench.adapters.anatomy import fused_experts
from workbench.adapters.precision.fp8_layers import Fp8Linear
from workbench.config import ModelConfig
from workbench.config.model_heads import classes
from workbench.errors import BackboneError
from workbench.models import backbones, weight_formats
from workbench.models.weight_formats import compute_in, weight_bytes
from workbench.training.master_weights import MasterWeights

STORED = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(3, 40)[None]
FORMATS = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.02, "int8": 0.03, "nf4": 0.2, "fp4": 0.35, "fp8": 0.05}
"""Largest error of the logits of stories260K, relative to the largest logit; 4 bits spoil most in small backbones."""
QUANTISED = pytest.mark.parametrize("weights", weight_formats.FORMATS)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 4, bias=False))
    return nn.Sequential(*layers, Conv1D(3, 4))


@STORED
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_equals_a_converted_copy_in_values_and_gradients(stored: torch.dtype, compute: torch.dtype) -> None:
    """Biases that train have their gradient too."""
    kept = _model().to(stored).requires_grad_(False)
    plain = copy.deepcopy(kept).to(compute)
    compute_in(kept, compute)
    ids = torch.arange(11)[None]
    outputs, bumps = [], []
    for model in (kept, plain):
        model[2].bias.requires_grad_(True)
        bumps.append(torch.zeros(1, 11, 8, requires_grad=True, dtype=compute))
        outputs.append(model[1:](model[0](ids) + bumps[-1]))
        outputs[-1].square().sum().backward()
    assert outputs[0].dtype == compute
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(bumps[0].grad, bumps[1].grad, rtol=0, atol=0)
    precision = {"rtol": 1e-6, "atol": 1e-7} if compute == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(kept[2].bias.grad, plain[2].bias.grad, **precision)


@STORED
def test_what_it_gives_may_be_changed_in_place(stored: torch.dtype) -> None:
    """As that of an ordinary layer may; PEFT's AdaLoRA does."""
    layer = nn.Linear(8, 5).to(stored).requires_grad_(False)
    compute_in(layer, torch.float32)
    x, added = torch.randn(2, 3, 8, requires_grad=True), torch.ones(2, 3, 5, requires_grad=True)
    output = layer(x)
    output += added
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, layer.weight.float().sum(0).expand(2, 3, 8))
    assert added.grad is not None and torch.equal(added.grad, torch.ones(2, 3, 5))


def test_a_weight_that_trains_has_its_gradient() -> None:
    kept = _model().to(torch.bfloat16).requires_grad_(False)
    compute_in(kept, torch.float32)
    kept[2].weight.requires_grad_(True)
    kept(torch.arange(11)[None]).sum().backward()
    assert kept[2].weight.grad.any()


@STORED
def test_weights_keep_their_bytes(stored: torch.dtype) -> None:
    model = _model().to(stored).requires_grad_(False)
    before = weight_bytes(model)
    compute_in(model, torch.float32)
    small = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("1.") or name.endswith("bias"))
    assert weight_bytes(model) == before + small // 2
    assert {model[2].weight.dtype, model[5].weight.dtype, model[0].weight.dtype} == {stored}


def test_shared_weights_count_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)])
    assert weight_bytes(model) == 2 * 4 * 12
    model[1].weight.data = model[0].weight.data
    assert weight_bytes(model) == 4 * 12


def load(folder: str | Path, **section: Any) -> backbones.Backbone:
    return backbones.load(ModelConfig(id=str(folder), **section), None)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits
    return found.float()


def gradients(model: PreTrainedModel, compute: torch.dtype = torch.float32) -> tuple[float, Tensor]:
    """Loss and gradient of a fresh LoRA over `model`, after an evaluation as a run has it."""
    attached = adapters.attach(model, Lora(rank=4), seed=0)
    masters = MasterWeights(attached, compute)
    logits(attached)
    loss = attached.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in masters if each.grad is not None])


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=0))


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("compute", ["auto", "float32"])
@pytest.mark.parametrize("weights", FORMATS)
def test_every_format_is_close_and_learns_the_same(stories: str, weights: str, compute: Any) -> None:
    exact = load(stories, weights="float32").model
    wanted, (loss, gradient) = logits(exact), gradients(exact)
    backbone = load(stories, weights=weights, compute=compute)
    assert backbone.weights == weights
    error = float((logits(backbone.model) - wanted).abs().max() / wanted.abs().max())
    assert error <= FORMATS[weights]
    found, learnt = gradients(backbone.model, backbone.compute)
    assert found == pytest.approx(loss, rel=0.05)
    assert cosine(learnt, gradient) > (0.9 if weights in ("nf4", "fp4") else 0.99)


@pytest.mark.parametrize("weights", ["int8", "nf4", "fp4"])
def test_training_multiplies_with_the_dequantised_weights_whatever_was_evaluated_before(weights: str) -> None:
    """On CPUs with AVX512-bf16 bitsandbytes repacks 4-bit layers in evaluation, and their gradient is lost."""
    backbone = load("starter", weights=weights, compute="float32")
    for layer in backbone.model.modules():
        assert not isinstance(layer, Linear4bit) or layer.compute_dtype == torch.float32
    plain = copy.deepcopy(backbone.model).dequantize(torch.float32)
    before = logits(backbone.model)
    loss, gradient = gradients(backbone.model)
    assert torch.equal(logits(backbone.model), before), "B is zero: nothing may have moved"
    wanted, exact = gradients(plain)
    assert loss == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


@QUANTISED
def test_gpt2_is_quantised_in_its_own_orientation(weights: str, tmp_path: Path) -> None:
    tiny("GPT2", vocab_size=64).save_pretrained(tmp_path)
    model = load(tmp_path, weights=weights, compute="float32").model
    layers = [module for module in model.modules() if isinstance(module, (Linear4bit, Linear8bitLt, Fp8Linear))]
    assert {(layer.in_features, layer.out_features) for layer in layers} == {(32, 96), (32, 32), (32, 128), (128, 32)}
    plain = load(tmp_path, weights="float32").model
    wanted = logits(plain)
    assert cosine(logits(model).flatten(), wanted.flatten()) > (0.98 if weights in ("int8", "fp8") else 0.7)


@QUANTISED
def test_a_family_with_linear_layers_of_its_own_is_refused(weights: str, tmp_path: Path) -> None:
    tiny("Falcon").save_pretrained(tmp_path)
    for refuse in (load, lambda folder, **section: backbones.skeleton(ModelConfig(id=str(folder), **section))):
        with pytest.raises(BackboneError, match=f"model.weights={weights}: the blocks of Falcon.*Write model.weights="):
            refuse(tmp_path, weights=weights)


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    hub = tiny("Llama").config
    hub.quantization_config = {"quant_method": "spqr", "bits": 3}
    hub.save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match=r"quantised already, by spqr, .* Take the repository that it was"):
        backbones.skeleton(ModelConfig(id=str(tmp_path)))


@QUANTISED
def test_gates_keep_their_precision_and_experts_do_in_8_bits(weights: str, tmp_path: Path) -> None:
    """Qwen's mixture has a router (a bare parameter), a gate of one output and fused experts."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 48}
    tiny("Qwen2Moe", **GROUPED, **sizes).save_pretrained(tmp_path)
    backbone = load(tmp_path, weights=weights, compute="bfloat16")
    quantised, eight = (Linear4bit, Linear8bitLt, Fp8Linear), weights in ("int8", "fp8")
    names = {name for name, module in backbone.model.named_modules() if isinstance(module, quantised)}
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("shared_expert." in name for name in names if name.endswith(("gate_proj", "up_proj", "down_proj")))
    told = [note for note in backbone.notes if "experts in one fused tensor, are not quantised" in note]
    assert len(told) == eight
    experts = fused_experts(backbone.model).values()
    assert {each.dtype for each in experts} == {torch.bfloat16 if eight else torch.uint8}


@pytest.mark.parametrize(("outputs", "kept"), [(8, True), (128, True), (3, True), (16, False), (2048, False)])
def test_a_layer_with_an_output_for_every_expert_is_a_router(outputs: int, kept: bool, tmp_path: Path) -> None:
    """8 experts, 128 experts per layer in another place of the configuration; three outputs decide about something."""
    model = tiny("Mixtral", num_local_experts=8)
    model.config.n_routed_experts = 128
    block = model.get_submodule("model.layers.0.mlp")
    block.add_module("choose", nn.Linear(128, outputs))
    assert ("model.layers.0.mlp.choose" in weight_formats.unquantised(model)) == kept


def test_heads_and_embeddings_keep_their_precision(tmp_path: Path) -> None:
    tiny("Bert", head="SequenceClassification").save_pretrained(tmp_path)
    task = classes(["a", "b", "c"], seed=0)
    model = backbones.load(ModelConfig(id=str(tmp_path), weights="nf4", compute="float32"), None, task=task).model
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == {"bert.pooler.dense", "classifier"}
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if "embeddings" in name)


def test_nf4_takes_4_127_bits_a_weight(tmp_path: Path) -> None:
    """Dettmers et al. 2023, section 3: 4 bits, a byte of scale for 64, four bytes for 256 scales."""
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16}
    hub = transformers.LlamaConfig(**shape, num_key_value_heads=4, vocab_size=512, dtype="bfloat16")
    transformers.AutoModelForCausalLM.from_config(hub).save_pretrained(tmp_path)
    backbone = load(tmp_path, weights="nf4")
    layers = [module for module in backbone.model.modules() if isinstance(module, Linear4bit)]
    packed = {id(layer.weight) for layer in layers}
    quantised = sum(layer.in_features * layer.out_features for layer in layers)
    rest = sum(p.nbytes for p in backbone.model.parameters() if id(p) not in packed)
    assert len(layers) == 2 * 7 and quantised == 2 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 1024)
    assert backbone.weight_bytes == pytest.approx(4.127 / 8 * quantised + rest, rel=0.01)
    assert (backbone.weight_bytes - rest) * 8 / quantised == pytest.approx(4.127, rel=0.01)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_beside_4_bits_a_half_precision_checkpoint_stays_as_it_is(compute: Literal["bfloat16", "float32"]) -> None:
    model = load("starter", weights="nf4", compute=compute).model
    embedding = model.get_input_embeddings()
    assert embedding.weight.dtype == torch.bfloat16
    assert str(embedding(IDS).dtype) == f"torch.{compute}"


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi"])
@pytest.mark.parametrize("weights", ["nf4", "fp4"])
def test_layers_that_wait_are_packed_to_the_same_bits(tmp_path: Path, name: str, weights: str) -> None:
    tiny(name, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    section = ModelConfig.model_validate({"id": str(tmp_path), "weights": weights, "compute": "float32"})
    packed, waiting = backbones.load(section, None), backbones.load(section, None, waiting=True)
    unquantised = load(tmp_path, weights="float32", compute="float32")
    early = logits(waiting.model)  # what is measured before the processes have their parts
    assert adapters.count(waiting.model) == adapters.count(packed.model)
    tables = 1100 * sum(isinstance(module, Linear4bit) for module in packed.model.modules())
    assert packed.weight_bytes - tables <= waiting.weight_bytes <= packed.weight_bytes
    for module in waiting.model.modules():
        backbones.bring(module)
    assert torch.equal(logits(waiting.model), logits(packed.model))
    torch.testing.assert_close(early, logits(packed.model), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits(packed.model), logits(unquantised.model))


def test_the_same_layers_are_packed_however_a_backbone_comes(encoder_decoder: str) -> None:
    """T5's `wo` never is."""
    section = ModelConfig.model_validate({"id": encoder_decoder, "weights": "nf4", "compute": "float32"})
    ways = [
        backbones.load(section, None),
        backbones.load(section, None, waiting=True),
        backbones.blueprint(section, vocabulary=512),
    ]
    packed = [{name for name, each in way.model.named_modules() if isinstance(each, Linear4bit)} for way in ways]
    assert packed[0] == packed[1] == packed[2] and packed[0]
    assert not any(name.endswith("wo") for name in packed[0])
