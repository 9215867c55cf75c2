"""What is predicted from a config.json alone is what is counted, and what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests import matrix
from tests.conftest import FAMILIES, tiny
from workbench import adapters
from workbench.adapters import METHODS, Lora, Method
from workbench.config import ModelConfig
from workbench.config.model_heads import MASKED, TEXT
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones, model_sizes
from workbench.models.model_sizes import AdapterSize

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SMALL: dict[str, Any] = {"rank": 4, "width": 4, "virtual_tokens": 3, "layers": 1, "block": 4, "coefficients": 20}


SMALL |= {"share": 0.05, "vectors": 12, "tokens": (5,), "invocation": (5,)}


T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


# Fused experts that are saved one by one; tied weights and Conv1D; two stacks; an encoder.
BUILD: dict[str, dict[str, Any]] = {
    "Mixtral": FAMILIES["Mixtral"],
    "GPT2": FAMILIES["GPT2"],
    "T5": {**T5_SIZES, "head": "Seq2SeqLM"},
    "Bert": {"head": "MaskedLM"},
}


def small(name: str) -> Method:
    known = METHODS[name].model_fields
    return METHODS[name].model_validate({"method": name, **{k: v for k, v in SMALL.items() if k in known}})


def folder(path: Path, config: transformers.PretrainedConfig) -> ModelConfig:
    """A backbone of which there is nothing but its config.json."""
    config.save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return ModelConfig(id=str(path), weights="float32")


@pytest.mark.parametrize(("family", "name"), matrix.method_of_predicted_size())
def test_predicted_is_counted_and_saved(family: str, name: str, tmp_path: Path) -> None:
    model, method = tiny(family, **BUILD[family]).requires_grad_(False), small(name)
    config = folder(tmp_path / "model", model.config)
    task = MASKED if family == "Bert" else TEXT
    if "float32" not in method.facts.weights:
        model.save_pretrained(tmp_path / "whole")
        config = ModelConfig(id=config.id, weights="nf4")
        model = backbones.load(ModelConfig(id=str(tmp_path / "whole"), weights="nf4"), None, task=task).model
    if method.refusal(model):
        with pytest.raises(ConfigError, match=rf"adapter.method={name.replace('+', '.')}: "):
            model_sizes.predict(config, method, task=task)
        return
    found = model_sizes.predict(config, method, task=task)
    ids = torch.tensor([[3, 5, 7, 9]])
    live = adapters.attach(model, method, seed=0, sample=lambda: iter([{"input_ids": ids, "labels": ids}]))
    (tmp_path / "saved").mkdir()
    adapters.save(live, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    assert found == AdapterSize(*adapters.count(live), file.stat().st_size)


def test_gpt3_as_in_the_lora_paper(tmp_path: Path) -> None:
    """Hu et al. 2021, section 4.2: 18,874,368 parameters, 35 MB instead of 350 GB."""
    shape = {"num_hidden_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "ffn_dim": 4 * 12288}
    hub = transformers.OPTConfig(**shape, word_embed_proj_dim=12288, vocab_size=50257, max_position_embeddings=2048)
    found = model_sizes.predict(folder(tmp_path, hub), Lora(rank=4, targets=("q_proj", "v_proj")))
    assert found.trainable == 18_874_368 and 2 * found.trainable == 36 * 2**20
    assert 2 * (found.total - found.trainable) == pytest.approx(350e9, rel=0.01)
    assert 0 < found.file_bytes - 4 * found.trainable < 2 * 2 * 96 * 200  # the header names every tensor


def test_qwen_3b(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
    hub = transformers.Qwen2Config(**shape, intermediate_size=11008, vocab_size=151936, tie_word_embeddings=True)
    found = model_sizes.predict(folder(tmp_path, hub), Lora(rank=16, targets=("q_proj", "v_proj")))
    assert found.trainable == 3_686_400
    assert found.total - found.trainable == 3_085_938_688


@pytest.mark.parametrize("weights", ["nf4", "int8", "bfloat16"])
def test_quantised_backbones_have_as_many_parameters(stories: str, weights: Any) -> None:
    config = ModelConfig(id=stories, weights=weights)
    live = adapters.attach(backbones.load(config, None).model, Lora(rank=3), seed=0)
    assert model_sizes.predict(config, Lora(rank=3))[:2] == adapters.count(live)


def test_file_bytes_of_any_tensors(tmp_path: Path) -> None:
    tensors = {
        "zwölf.weight": torch.zeros(3, 5),
        "a": torch.zeros(7, dtype=torch.int64),
        "b" * 11: torch.zeros(2, 2, 2),
        "empty": torch.zeros(0, 4),
    }
    for count in range(1, 5):
        some = dict(list(tensors.items())[:count])
        save_file(some, tmp_path / "file", metadata={"format": "pt"})
        assert model_sizes.file_bytes(some) == (tmp_path / "file").stat().st_size


@pytest.mark.slow
def test_a_survey_gives_settings_to_the_methods_that_have_them(short_stories: str) -> None:
    plain, narrow = (
        model_sizes.survey([f"model.id={short_stories}", *words]).sizes for words in ([], ["adapter.rank=6"])
    )
    assert set(plain) == set(narrow) == set(METHODS)
    for name, section in METHODS.items():
        assert (plain[name] == narrow[name]) == ("rank" not in section.model_fields or isinstance(plain[name], str))
    assert isinstance(plain["bitfit"], str) and "has no biases" in plain["bitfit"]
    one = model_sizes.survey([f"model.id={short_stories}", "adapter={method: dora, rank: 6}"])
    assert one.sizes == {"dora": narrow["dora"]} and one.parameters == 123_712


@pytest.mark.slow
def test_a_survey_refuses_as_a_run_does(stories: str) -> None:
    found = model_sizes.survey([f"model.id={stories}", "model.weights=nf4"]).sizes
    assert "quantised weights have no gradient. Write model.weights=float32|" in str(found["full"])
    found = model_sizes.survey([f"model.id={stories}", "model.weights=float16", "adapter.method=full"]).sizes
    assert "adapter.method=full cannot train float16 weights" in str(found["full"])
    with pytest.raises(BackboneError, match=r"no folder \./none"):
        model_sizes.survey(["model.id=./none"])


def test_new_tokens_count_as_they_train(stories: str) -> None:
    """Two rows of 64 for the tied embedding, and the two that the vocabulary grows by."""
    words = [f"model.id={stories}", "adapter.method=lora"]
    plain, more = (model_sizes.survey([*words, *new]) for new in ([], ["model.new_tokens=[<a>, <b>]"]))
    before, after = plain.sizes["lora"], more.sizes["lora"]
    assert isinstance(before, AdapterSize) and isinstance(after, AdapterSize)
    assert after.trainable == before.trainable + 2 * 64
    grown = json.loads((Path(stories) / "config.json").read_text())["vocab_size"] + 2 - 512
    assert after.total == before.total + 2 * 64 + grown * 64
