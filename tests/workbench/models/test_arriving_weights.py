"""Backbones that arrive quantised: the numbers of their files, the bytes of a plan, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    TorchAoConfig,
)

import workbench
from tests.conftest import tiny, trains
from tests.workbench.models.test_packed_integers import Integers, repository
from workbench.config import ModelConfig
from workbench.config.yaml_text import read_yaml
from workbench.errors import BackboneError
from workbench.models import backbones, weight_formats
from workbench.models.weight_formats import weight_bytes
from workbench.planning import fake_tensors
from workbench.recipes.verbs.merge import merge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PACKED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCK = 16
RECIPE = """
recipe: sft
model: {{id: {model}}}
adapter: {{method: lora, rank: 4}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 2, learning_rate: 1.0e-2}}
evaluate: {{every: null, answers: 0}}
"""


def packed(stories: str, folder: Path, settings: dict[str, Any]) -> Path:
    """The small backbone as a repository of weights that bitsandbytes has packed."""
    quantised = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(stories, quantization_config=quantised, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    return folder


def in_fp8(folder: Path) -> dict[str, Tensor]:
    """A repository of FP8 weights with a scale for each block; returns the weights that they stand for, by name."""
    model, stored, wanted = tiny("Llama"), dict[str, Tensor](), dict[str, Tensor]()
    for name, value in model.state_dict().items():
        if not name.endswith("proj.weight"):
            stored[name] = value.bfloat16()
            continue
        rows, columns = value.shape[0] // BLOCK, value.shape[1] // BLOCK
        blocks = value.reshape(rows, BLOCK, columns, BLOCK).transpose(1, 2)
        scales = blocks.abs().amax((-1, -2)) / 448
        eight = (blocks / scales[..., None, None]).to(torch.float8_e4m3fn)
        stored[name] = eight.transpose(1, 2).reshape(value.shape).contiguous()
        stored[f"{name}_scale_inv"] = scales.contiguous()
        wanted[name] = (eight.float() * scales[..., None, None]).transpose(1, 2).reshape(value.shape)
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    model.config.quantization_config = how
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return wanted


@pytest.mark.parametrize("name", PACKED)
def test_what_bitsandbytes_packed_is_what_is_loaded_and_planned(name: str, short_stories: str, tmp_path: Path) -> None:
    section = ModelConfig(id=str(packed(short_stories, tmp_path, PACKED[name])), compute="bfloat16")
    loaded = backbones.load(section, None)
    assert loaded.weights == name.split()[0]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    own = {path: each for path, each in loaded.model.named_parameters() if each.dtype in (torch.uint8, torch.int8)}
    assert own and all(torch.equal(each, stock.get_parameter(path)) for path, each in own.items())
    planned = backbones.blueprint(section, vocabulary=0)
    planned.model.to_empty(device="cpu")
    planned.model.tie_weights()
    fake_tensors.pack(planned.model, planned.weights, planned.compute)
    assert weight_bytes(planned.model) == loaded.weight_bytes


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_fp8_is_its_numbers_times_the_scale_of_their_block_and_is_saved_plain(stored: Any, tmp_path: Path) -> None:
    wanted = in_fp8(tmp_path)
    loaded = backbones.load(ModelConfig(id=str(tmp_path), weights=stored, compute=stored), None)
    dtype = weight_formats.HALVES[0] if stored == "bfloat16" else torch.float32
    for name, value in wanted.items():
        assert torch.equal(loaded.model.get_parameter(name), value.to(dtype)), name
    assert {each.dtype for each in loaded.model.parameters()} == {dtype}
    loaded.model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A repository of experts in MXFP4; returns the weights that they stand for, by name."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(vocab_size=40, **sizes, **heads)).bfloat16()
    stored, wanted = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value.contiguous()
            continue
        experts, inputs, outputs = value.shape
        packed = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()  # the low half comes first
        numbers = torch.tensor([*FP4, *(-each for each in FP4)])[pairs]
        whole = numbers * torch.exp2(scales.float() - 127)[..., None]
        wanted[name] = whole.flatten(-2).mT.bfloat16()
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return wanted


def compressed(folder: Path, scheme: str, form: str) -> dict[str, Tensor]:
    """A repository that compressed-tensors has written; returns the weights that it stands for, by name."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        fake_quantize,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = tiny("Llama", hidden_size=128, intermediate_size=128).bfloat16()
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(scheme, ["Linear"])},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    apply_quantization_config(model, config)
    wanted = {}
    for name, module in model.named_modules():
        if not hasattr(module, "quantization_scheme") or not isinstance(module, torch.nn.Linear):
            continue
        arguments, weight, whole = module.quantization_scheme.weights, module.weight.detach(), None
        parts = weight.float().reshape(len(weight), -1, arguments.group_size or weight.shape[1])
        if hasattr(module, "weight_global_scale"):
            whole = generate_gparam(weight.float().min(), weight.float().max())
            module.weight_global_scale.data = whole.reshape(module.weight_global_scale.shape)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments, global_scale=whole)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
        zero = getattr(module, "weight_zero_point", None)
        wanted[f"{name}.weight"] = fake_quantize(weight, module.weight_scale, zero, arguments, global_scale=whole)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return wanted


def by_torchao(folder: Path) -> dict[str, Tensor]:
    """A repository of torchao's int8 weights; returns the weights that they stand for, by name."""
    quantisation = pytest.importorskip("torchao.quantization")
    tiny("Llama", hidden_size=128, intermediate_size=128).bfloat16().save_pretrained(folder / "plain")
    settings = TorchAoConfig(quantisation.Int8WeightOnlyConfig())
    plain: Any = folder / "plain"
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    names = [name for name, _ in model.named_parameters() if name.endswith("proj.weight")]
    return {name: model.get_parameter(name).dequantize() for name in names}


COMPRESSED = {
    "FP8_DYNAMIC": "float-quantized",
    "W4A16": "pack-quantized",
    "W8A8": "int-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
}
"""Format of each scheme, as vLLM's makers publish them."""
ARRIVING = {"fp8": in_fp8, "mxfp4": in_mxfp4, "torchao": by_torchao} | {
    scheme: partial(compressed, scheme=scheme, form=form) for scheme, form in COMPRESSED.items()
}
INTEGERS = {
    "gptq": Integers("gptq"),
    "awq": Integers("awq"),
    "hqq": Integers("hqq", bits=3),
    "aqlm": Integers("aqlm", bits=8, group=4, books=2),
}
ARRIVING |= {method: partial(repository, how=how) for method, how in INTEGERS.items()}


@pytest.mark.nightly(but=["mxfp4", "torchao", "W4A16", "NVFP4A16"])
@pytest.mark.parametrize("make", [each for name, each in ARRIVING.items() if name != "fp8"], ids=list(ARRIVING)[1:])
def test_it_is_dequantised_to_the_numbers_that_it_stands_for(
    make: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    wanted = make(tmp_path)
    loaded = backbones.load(ModelConfig(id=str(tmp_path), weights="bfloat16", compute="bfloat16"), None)
    assert wanted
    for name, value in wanted.items():
        assert torch.equal(loaded.model.get_parameter(name), value.bfloat16()), name


@pytest.mark.nightly(but=["fp8", "mxfp4", "torchao", "W4A16", "gptq"])
@pytest.mark.parametrize("make", ARRIVING.values(), ids=ARRIVING)
def test_packed_again_it_has_the_bits_of_its_numbers_packed(
    make: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """Those that a repository of the dequantised numbers has; a plan counts the bytes."""
    make(tmp_path / "arrives")
    plain = backbones.load(ModelConfig(id=str(tmp_path / "arrives"), weights="bfloat16", compute="bfloat16"), None)
    plain.model.save_pretrained(tmp_path / "plain")
    again, wanted = (
        backbones.load(ModelConfig(id=str(tmp_path / name), weights="nf4", compute="bfloat16"), None)
        for name in ("arrives", "plain")
    )
    assert again.weights == "nf4" and again.weight_bytes == wanted.weight_bytes < plain.weight_bytes
    found = again.model.state_dict()
    assert found.keys() == wanted.model.state_dict().keys()
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(found[name], value), name
    section = ModelConfig(id=str(tmp_path / "arrives"), weights="nf4", compute="bfloat16")
    planned = backbones.blueprint(section, vocabulary=0)
    planned.model.to_empty(device="cpu")
    planned.model.tie_weights()
    fake_tensors.pack(planned.model, planned.weights, planned.compute)
    assert weight_bytes(planned.model) == again.weight_bytes


@pytest.mark.parametrize("name", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_over_it_trains_says_its_format_and_merges(
    name: str, short_stories: str, questions: Path, tmp_path: Path
) -> None:
    model = packed(short_stories, tmp_path / "model", PACKED[name])
    run = trains(tmp_path, RECIPE, model=model, train=questions)(name="run")
    assert read_yaml(run / "config.yaml")["model"]["weights"] == name
    found = merge(run, out=tmp_path / "merged")
    assert found.agreement.kl is not None and found.agreement.kl < 0.05
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_what_arrives_of_a_float32_backbone_is_packed_again(tmp_path: Path) -> None:
    repository(tmp_path, INTEGERS["gptq"], tiny("Llama", hidden_size=64, intermediate_size=64))
    again, wanted = (
        backbones.load(ModelConfig(id=str(each), weights="nf4", compute="float32"), None)
        for each in (tmp_path, tmp_path / "plain")
    )
    assert again.weight_bytes == wanted.weight_bytes
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("method", ["hqq", pytest.param("aqlm", marks=pytest.mark.slow)])
def test_a_run_over_packed_integers_trains_and_merges_to_plain_weights(
    method: str, short_stories: str, questions: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(short_stories, dtype=torch.bfloat16)
    wanted = repository(tmp_path / "model", INTEGERS[method], model)
    AutoTokenizer.from_pretrained(short_stories).save_pretrained(tmp_path / "model")
    run = trains(tmp_path, RECIPE, model=tmp_path / "model", train=questions)(name="run")
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([each for each in losses if "loss" in each]) == 2
    found = merge(run, out=tmp_path / "merged")
    assert found.agreement.kl is not None and found.agreement.kl < 0.05
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert wanted
    for name, value in wanted.items():
        assert torch.cosine_similarity(merged[name].float().flatten(), value.flatten(), 0) > 0.9, name


def test_what_cannot_be_is_refused_in_a_sentence(short_stories: str, tmp_path: Path) -> None:
    four, eight = packed(short_stories, tmp_path / "four", PACKED["nf4"]), tmp_path / "eight"
    in_fp8(eight)

    def config(model: Path, **more: str) -> ModelConfig:
        return ModelConfig.model_validate({"id": str(model), **more})

    for load, words in (
        (
            lambda: backbones.load(config(eight, weights="int8"), None),
            "FP8 and are dequantised.* nf4 or fp4 packs them again, int8 does not. Write model.weights=nf4",
        ),
        (lambda: backbones.load(config(four, weights="int8"), None), "packed in nf4, .* Write model.weights=auto"),
        (lambda: backbones.load(config(four), None, trainable=True), "adapter.method=full trains them"),
        (lambda: backbones.load(config(four), None, waiting=True), "Write distributed.zero=1"),
    ):
        with pytest.raises(BackboneError, match=words):
            load()
    over = r"arrive in nf4, over which adapter.method=loha .* Write adapter.method=lora"
    with pytest.raises(BackboneError, match=over):
        workbench.check("sft/quickstart", ["data.limit=40", f"model.id={four}", "adapter={method: loha}"])
