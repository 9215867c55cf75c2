"""What is decided about a backbone, and what a person is told where it cannot be had."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from tests.conftest import T5_SIZES, tiny
from tests.vision_backbones import save_vision
from workbench.adapters import stock
from workbench.config import ModelConfig
from workbench.config.model_heads import MASKED, TEXT
from workbench.data.starter import FOLDER
from workbench.errors import BackboneError, ConfigError
from workbench.losses.chunked_loss import planned_for
from workbench.models import backbones
from workbench.models.backbones import loading_errors
from workbench.schema import parse

CPU = torch.device("cpu")
STORED = "computed in float32: this device has no bfloat16 units"
EMULATED = "bfloat16 products are emulated on this device"
VANISHING = "float16 products are slow on a CPU, and gradients below 6e-8 vanish: model.compute=float32 is safer"
EXHAUSTED = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
]


def _load(**section: Any) -> backbones.Backbone:
    config = ModelConfig.model_validate(section)
    return backbones.load(config, backbones.tokenizer(config))


@pytest.mark.parametrize(
    ("units", "checkpoint", "section", "trainable", "weights", "compute", "note"),
    [
        (False, "float32", {}, False, "float32", "float32", ""),
        (False, "bfloat16", {}, False, "bfloat16", "float32", STORED),
        (False, "float16", {}, False, "float16", "float32", STORED),
        (False, "bfloat16", {}, True, "float32", "float32", ""),
        (False, None, {}, False, "float32", "float32", ""),
        (True, "float32", {}, False, "bfloat16", "bfloat16", ""),
        (True, "float16", {}, False, "bfloat16", "bfloat16", ""),
        (True, "bfloat16", {}, True, "bfloat16", "bfloat16", ""),
        (False, "float32", {"weights": "float16"}, False, "float16", "float32", STORED),
        (False, "float32", {"weights": "bfloat16", "compute": "bfloat16"}, False, "bfloat16", "bfloat16", EMULATED),
        (False, "float32", {"compute": "bfloat16"}, False, "bfloat16", "bfloat16", EMULATED),
        (False, "float32", {"compute": "bfloat16"}, True, "bfloat16", "bfloat16", EMULATED),
        (False, "float32", {"weights": "bfloat16"}, True, "bfloat16", "bfloat16", EMULATED),
        (
            True,
            "float32",
            {"weights": "float16"},
            False,
            "float16",
            "bfloat16",
            "stored in float16, computed in bfloat",
        ),
        (True, "bfloat16", {"weights": "float32"}, False, "float32", "float32", ""),
        (False, "bfloat16", {"weights": "nf4"}, False, "nf4", "float32", ""),
        (True, "bfloat16", {"weights": "nf4"}, False, "nf4", "bfloat16", ""),
        (True, "bfloat16", {"weights": "int8", "compute": "float16"}, False, "int8", "float16", VANISHING),
    ],
)
def test_precision(
    units: bool,
    checkpoint: str | None,
    section: dict[str, str],
    trainable: bool,
    weights: str,
    compute: str,
    note: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backbones, "has_bfloat16_units", lambda _: units)
    hub = PretrainedConfig(dtype=checkpoint)
    found = backbones._precision(ModelConfig.model_validate(section), hub, CPU, trainable=trainable)
    assert found[:2] == (weights, getattr(torch, compute))
    assert [note in text for text in found[2]] == ([True] if note else [])


@pytest.mark.parametrize(("card", "wanted"), [(True, "bfloat16"), (False, "float32")])
def test_a_plan_for_a_card_computes_as_the_card_does(card: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "has_bfloat16_units", lambda _: not card)
    with planned_for(24 * 10**9, bfloat16=card):
        found = backbones._precision(ModelConfig(), PretrainedConfig(dtype="float32"), CPU, trainable=False)
    assert found == (wanted, getattr(torch, wanted), [])


@pytest.mark.parametrize(
    ("section", "trainable", "cure"),
    [
        ({"weights": "float32", "compute": "bfloat16"}, False, "write model.weights=bfloat16 as well"),
        ({"weights": "bfloat16", "compute": "float32"}, True, "write model.weights=float32"),
    ],
)
def test_precisions_that_contradict_each_other_are_refused(
    section: dict[str, str], trainable: bool, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbones, "has_bfloat16_units", lambda _: False)
    with pytest.raises(BackboneError, match=cure):
        backbones._precision(ModelConfig.model_validate(section), PretrainedConfig(), CPU, trainable=trainable)


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16", "AVX512", True),
        ("flags : fpu avx2 amx_bf16 amx_tile", "AVX512", True),
        ("flags : fpu avx2 avx512f avx512_vnni", "AVX512", False),
        ("Features : fp asimd bf16 i8mm", "SVE256", True),
        ("Features : fp asimd bf16 i8mm", "DEFAULT", False),
        ("Features : fp asimd", "DEFAULT", False),
    ],
)
def test_bfloat16_units_of_a_processor(
    flags: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert backbones.has_bfloat16_units.__wrapped__(CPU) is expected


@pytest.mark.parametrize("weights", ["auto", "float32", "bfloat16", "float16"])
def test_a_checkpoint_arrives_bit_for_bit(stories: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "has_bfloat16_units", lambda _: False)
    backbone = _load(id=stories, weights=weights)
    assert (backbone.weights, backbone.compute) == ("float32" if weights == "auto" else weights, torch.float32)
    dtype = backbones.DTYPES[backbone.weights]
    with safe_open(Path(stories) / "model.safetensors", "pt") as file:
        for name, parameter in backbone.model.named_parameters():
            wanted = file.get_tensor(name).to(dtype)
            assert torch.equal(parameter, wanted.to(parameter.dtype)), name
    assert not backbone.model.training and not any(p.requires_grad for p in backbone.model.parameters())
    norms = sum(p.numel() for p in backbone.model.parameters() if p.ndim == 1)
    total = sum(p.numel() for p in backbone.model.parameters())
    assert backbone.weight_bytes == total * dtype.itemsize + norms * (4 - dtype.itemsize)


@pytest.mark.parametrize(
    ("weights", "bits", "constants"),
    [("nf4", 4, 1 / 64), ("int8", 8, 0.0)],  # double quantisation: a byte of scale for every 64 weights
)
def test_weight_bytes_of_quantised_backbones(weights: str, bits: int, constants: float) -> None:
    backbone = _load(id="starter", weights=weights, compute="float32")
    linear = [module for name, module in backbone.model.named_modules() if name.endswith("_proj")]
    sizes = [(module.in_features, module.out_features) for module in linear]
    small = sum(rows * columns * bits // 8 for rows, columns in sizes)
    scales = sum(rows * columns * constants if constants else 4 * columns for rows, columns in sizes)
    others = sum(p.nbytes for name, p in backbone.model.named_parameters() if "_proj" not in name)
    assert backbone.weights == weights and backbone.compute == torch.float32
    # Tables of the code are left over: 16 values and 256 values for each layer, and its description.
    assert 0 <= backbone.weight_bytes - (small + scales + others) <= len(linear) * 4 * (16 + 256 + 64)
    outputs = backbone.model(input_ids=torch.arange(8)[None])
    assert outputs.logits.dtype == torch.float32


def test_nf4_differs_from_the_checkpoint_by_what_nf4_rounds(stories: str) -> None:
    exact, rounded = (
        _load(id=stories, weights="float32", compute="float32").model,
        _load(id=stories, weights="nf4", compute="float32").model.dequantize(torch.float32),
    )
    for name, wanted in exact.state_dict().items():
        found = rounded.state_dict()[name]
        error = float((found - wanted).norm() / wanted.norm())
        assert 0.02 < error < 0.15 if "_proj" in name else error == 0, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_kernel_is_the_one_asked_for(stories: str, attention: str) -> None:
    assert _load(id=stories, weights="float32", attention=attention).model.config._attn_implementation == attention


def test_a_missing_pad_token_is_not_invented(stories: str, trained: Path) -> None:
    assert backbones.tokenizer(ModelConfig(id=stories)).pad_token is None
    saved = backbones.tokenizer(ModelConfig(id=str(trained / "adapter")))
    assert saved.pad_token is None and len(saved) == 512 + 2


def test_new_tokens_grow_the_vocabulary_by_themselves_and_keep_the_old_rows(stories: str) -> None:
    config = ModelConfig(id=stories, weights="float32", new_tokens=("<|one|>", "<|two|>"))
    tokenizer = backbones.tokenizer(config)
    assert tokenizer("a<|two|>b", add_special_tokens=False)["input_ids"].count(513) == 1
    grown, plain = (_load(**section) for section in (config.model_dump(), {"id": stories, "weights": "float32"}))
    old, new = (each.model.get_parameter("model.embed_tokens.weight") for each in (plain, grown))
    assert old.shape == (512, 64) and new.shape == (514, 64)
    assert torch.equal(old, new[:512])
    assert grown.model.get_output_embeddings().weight is new


def test_new_rows_start_the_same_in_every_process(stories: str) -> None:
    rows = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        grown = _load(id=stories, weights="float32", new_tokens=["<|one|>"])
        rows.append(grown.model.get_parameter("model.embed_tokens.weight")[512])
        drawn = torch.rand(3)
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(3), drawn), "loading must not move the global random state"
    assert torch.equal(rows[0], rows[1]) and rows[0].any()


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
T5GEMMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.2}
NESTED = {
    "encoder": {"model_type": "bert", **SMALL},
    "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, **SMALL},
}
DROPPING: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("CausalLM", {}),
    "OPT": ("CausalLM", {}),
    "T5": ("Seq2SeqLM", T5_SIZES),
    "Bart": ("Seq2SeqLM", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_layerdrop": 0.3}),
    "EncoderDecoder": ("Seq2SeqLM", {**NESTED, "decoder_start_token_id": 1}),
    "T5Gemma": ("Seq2SeqLM", {"dropout_rate": 0.3, "encoder": T5GEMMA, "decoder": T5GEMMA}),
    "Data2VecText": ("MaskedLM", {}),
    "Llama": ("CausalLM", {}),
}
"""Head and settings of tiny backbones; of all but the last, dropout is on as it comes."""


@pytest.mark.parametrize("name", DROPPING)
def test_a_backbones_own_dropout_is_off_unless_asked_for(name: str, tmp_path: Path) -> None:
    """In training mode the loss is a function of the rows; what is saved is configured as it came."""
    head, sizes = DROPPING[name]
    tiny(name, head=head, **sizes).save_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(3, 9)[None]}
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if head == "Seq2SeqLM" else {}
    task = MASKED if head == "MaskedLM" else TEXT
    for dropout in (False, True):
        section = ModelConfig(id=str(tmp_path), weights="float32", dropout=dropout)
        model = backbones.load(section, None, task=task).model.train()
        alike = torch.equal(model(**inputs).logits, model(**inputs).logits)
        assert alike == (not dropout or name == "Llama")
        stock.save(model, tmp_path / f"{dropout}")
        assert _rates(tmp_path / f"{dropout}") == _rates(tmp_path)


def _rates(folder: Path) -> dict[str, float]:
    """Rates of dropout in a configuration, nested ones too."""
    flat = flatten(json.loads((folder / "config.json").read_text()))
    return {key: value for key, value in flat.items() if "drop" in key}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries, by path."""
    items = [
        flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        for key, value in values.items()
    ]
    return {key: value for each in items for key, value in each.items()}


BROKEN = {
    "pickle": ("pytorch_model.bin", b"\x80", "a pickle, which can execute code"),
    "pickled shards": ("pytorch_model.bin.index.json", b"{}", "a pickle, which can execute code"),
    "HQQ's own": ("qmodel.pt", b"\x80", "a pickle, .* HQQ's own format. Take the repository that it was made from"),
    "nothing": ("README.md", b"", r"holds no weights"),
    "cut": ("model.safetensors", b"\x10\0\0\0\0\0\0\0{", "damaged weights"),
    "empty": ("model.safetensors", b"", "damaged weights"),
    "pointer": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "damaged weights"),
    "shard": ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "cannot be loaded"),
    "index": ("model.safetensors.index.json", b"{}", "cannot be loaded"),
}
"""A file in the place of a backbone's weights, its content, and what is said of it."""


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_cannot_be_loaded_are_refused_before(case: str, stories: str, tmp_path: Path) -> None:
    name, content, why = BROKEN[case]
    folder = shutil.copytree(stories, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).write_bytes(content)
    with pytest.raises(BackboneError, match=why):
        backbones.require_weights(ModelConfig(id=str(folder)))
    backbones.require_weights(ModelConfig(id=stories))


@pytest.mark.parametrize("tokens", [["<|turn_begin|>", "<|turn_end|>"], ["<one>"], ["[A]", "[B]", "[C]", "[D]"]])
def test_tokens_without_rows_are_refused_until_they_train(tokens: list[str], stories: str, tmp_path: Path) -> None:
    """What the message says to write is what trains all of them, another new token beside them, too."""
    folder = shutil.copytree(stories, tmp_path / "model")
    larger = backbones.tokenizer(ModelConfig(id=stories))
    rows = len(larger)
    larger.add_tokens(tokens, special_tokens=True)
    larger.save_pretrained(folder)
    with pytest.raises(BackboneError, match=f"{len(tokens)} tokens for which its embedding has no rows") as refused:
        backbones.tokenizer(ModelConfig(id=str(folder)))
    (written,) = re.findall(r"model.new_tokens='(\[.*?\])',", str(refused.value))
    section = ModelConfig(id=str(folder), weights="float32", new_tokens=(*json.loads(written), "<more>"))
    tokenizer = backbones.tokenizer(section)
    assert backbones.new_token_ids(section, tokenizer) == [*range(rows, rows + len(tokens) + 1)]
    assert backbones.load(section, tokenizer).model.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_a_pad_token_without_a_row_adds_none(stories: str, tmp_path: Path) -> None:
    """No mask is taken from pad tokens, so that the backbone stays as it is, as stock PEFT loads it."""
    folder = shutil.copytree(stories, tmp_path / "model")
    larger = backbones.tokenizer(ModelConfig(id=stories))
    rows = len(larger)
    larger.add_special_tokens({"pad_token": "<pad-of-mine>"})
    larger.save_pretrained(folder)
    section = ModelConfig(id=str(folder), weights="float32")
    assert backbones.load(section, backbones.tokenizer(section)).model.get_input_embeddings().weight.shape[0] == rows


def test_a_token_that_is_known_already_is_refused(stories: str) -> None:
    with pytest.raises(BackboneError, match=r"model.new_tokens: </s> already in the vocabulary of .*Leave them out"):
        backbones.tokenizer(ModelConfig(id=stories, new_tokens=("</s>", "<|one|>")))


@pytest.mark.parametrize(
    ("tokens", "expected"), [(["<a>", "<b>", "<a>"], "<a> appears twice"), (["<a>", ""], "at least 1 character")]
)
def test_new_tokens_that_are_no_tokens_are_refused(tokens: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"model.yaml has 1 mistake:\n  new_tokens.*{expected}"):
        parse(ModelConfig, {"new_tokens": tokens}, source="model.yaml")


def test_offline_the_cure_is_named() -> None:
    for function in (backbones.tokenizer, backbones.hub_config):
        with pytest.raises(BackboneError) as caught:
            function(ModelConfig(id="owner/nothing"))
        text = str(caught.value)
        assert text.startswith("model.id=owner/nothing cannot be loaded: the hub cannot be reached")
        assert "hf download owner/nothing" in text and "`starter`" in text


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(
        BackboneError, match=f"model.id: no folder {name}. Write model.id=FOLDER with one that exists, a hub id"
    ):
        backbones.tokenizer(ModelConfig(id=name))


@pytest.mark.parametrize(
    ("raised", "cure"),
    [
        (OSError("We couldn't connect to 'https://huggingface.co'"), "hf download owner/name"),
        (OSError("401 Client Error. Cannot access gated repo"), "hf auth login"),
        (OSError("owner/name is not a valid model identifier listed on 'https://huggingface.co/models'"), "spelling"),
        (ValueError("contains custom code ... pass the argument `trust_remote_code=True`"), "trust_remote_code=true"),
        (KeyError("brandnew"), "brandnew"),
    ],
)
def test_what_the_hub_says_becomes_what_to_do(raised: Exception, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(BackboneError, match=cure) as caught:
        backbones.hub_config(ModelConfig(id="owner/name"))
    assert str(caught.value).startswith("model.id=owner/name cannot be loaded: ")


def test_code_that_comes_with_a_backbone_does_not_run(stories: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stories, tmp_path / "foreign"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Foreign"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(BackboneError):
        backbones.hub_config(ModelConfig(id=str(folder)))
    assert not (tmp_path / "ran").exists()


def test_the_starter_is_found_by_name() -> None:
    assert backbones.hub_config(ModelConfig()).model_type == "llama"
    assert len(backbones.tokenizer(ModelConfig())) == json.loads((FOLDER / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__name__)
def test_exhausted_memory_is_no_damaged_file(error: Exception, stories: str) -> None:
    with (
        pytest.raises(BackboneError, match=r"memory is exhausted\. End other programs, write model\.weights=nf4"),
        loading_errors(ModelConfig(id=stories), "weights", "*.safetensors"),
    ):
        raise error


def test_other_errors_over_a_whole_folder_are_damage(stories: str) -> None:
    with (
        pytest.raises(BackboneError, match=r"damaged weights \(ValueError: header too large\)"),
        loading_errors(ModelConfig(id=stories), "weights", "*.safetensors"),
    ):
        raise ValueError("header too large")


def test_digests_follow_the_weights_and_nothing_else(tmp_path: Path) -> None:
    model = ModelConfig(id=save_vision(tmp_path, "ViT"))
    before = backbones.file_digests(model)
    (Path(model.id) / "notes.md").write_text("read me")
    assert backbones.file_digests(model) == before
    weights = Path(model.id) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    changed = {name for name, digest in backbones.file_digests(model).items() if before[name] != digest}
    assert changed == {f"{model.id}/model.safetensors"}


def test_weights_are_here_or_would_have_to_be_fetched(tmp_path: Path) -> None:
    model = ModelConfig(id=save_vision(tmp_path, "ViT"))
    assert backbones.weights_are_local(model) and backbones.weights_are_local(ModelConfig())
    (Path(model.id) / "model.safetensors").unlink()
    assert not backbones.weights_are_local(model) and not backbones.weights_are_local(ModelConfig(id="nobody/nothing"))
