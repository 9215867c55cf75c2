"""A GGUF file computes what its model does, by another reader, and what GGUF has no place for is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from tests.conftest import CHAT_TEMPLATE, STORIES, tiny
from workbench.errors import BackboneError
from workbench.models.exporting import gguf_model

IDS = torch.tensor([[1, 403, 407, 261, 378, 9, 500, 12]])
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STORIES)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits
    return found


def _write(model: PreTrainedModel, tokenizer: Any, path: Path, stop: list[int] | None = None) -> None:
    gguf_model.write(model, tokenizer, path, template=CHAT_TEMPLATE, stop=stop or [2], bos=True, name="tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_another_reader_computes_the_same(name: str, dtype: torch.dtype, tokenizer: Any, tmp_path: Path) -> None:
    model: Any = tiny(name, vocab_size=512, **FAMILIES[name])
    rounded = {key: tensor.to(dtype).float() for key, tensor in model.state_dict().items()}
    model.load_state_dict(rounded)
    wanted = _logits(model)
    _write(model.to(dtype), tokenizer, tmp_path / "model.gguf")
    found = _logits(gguf_model.load(tmp_path / "model.gguf"))
    assert float(wanted.std()) > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_llamas_queries_and_keys_stand_in_pairs(tokenizer: Any, tmp_path: Path) -> None:
    """The two numbers that one angle turns are neighbours in llama.cpp, and half a head apart in transformers."""
    model = tiny("Llama", vocab_size=512)
    _write(model, tokenizer, tmp_path / "model.gguf")
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    width, weight = 8, model.get_submodule("model.layers.0.self_attn.q_proj").get_parameter("weight").detach()
    found = torch.from_numpy(tensors["blk.0.attn_q.weight"].data.copy())
    for row in range(len(weight)):
        head, place = divmod(row, width)
        half, angle = divmod(place, width // 2)
        assert torch.equal(found[head * width + 2 * angle + half], weight[row])


def test_tokenizer_template_and_ends_are_in_the_file(tokenizer: Any, tmp_path: Path) -> None:
    _write(tiny("Llama", vocab_size=520), tokenizer, tmp_path / "model.gguf", stop=[7, 2])
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["tokenizer.ggml.tokens"][:512] == tokenizer.convert_ids_to_tokens(range(512))
    assert len(found["tokenizer.ggml.tokens"]) == found["llama.vocab_size"] == 520
    types = found["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6] and set(types[512:]) == {5}
    assert found["tokenizer.ggml.eos_token_id"] == 2 and found["tokenizer.ggml.eot_token_id"] == 7
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.chat_template"] == CHAT_TEMPLATE
    again: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = "Once upon a time, Lily said: ok?"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Gemma2", {}, "writes llama, qwen2, qwen3, and this backbone is gemma2"),
        ("Mistral", {}, "this backbone is mistral"),
        ("Llama", {"mlp_bias": True}, "no place for mlp_bias=True"),
        ("Llama", {"hidden_act": "gelu"}, "no place for hidden_act=gelu"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear"),
    ],
    ids=["gemma2", "mistral", "bias", "activation", "rope"],
)
def test_an_architecture_that_gguf_would_compute_otherwise_is_refused(
    name: str, settings: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny(name, vocab_size=512, **settings)
    with pytest.raises(BackboneError, match=words):
        _write(model, tokenizer, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_more_ends_than_places_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="places for 3 tokens that end a text, and this run has </s>"):
        _write(tiny("Llama", vocab_size=512), tokenizer, tmp_path / "model.gguf", stop=[2, 3, 4, 5])
