"""A GGUF file computes what its model does, by another reader, and what GGUF has no place for is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import CHAT_TEMPLATE, MINILM, STORIES, tiny
from workbench.data.starter import FOLDER
from workbench.errors import BackboneError
from workbench.models.exporting import gguf_files
from workbench.models.exporting.gguf_files import GgufTokenizer

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
    gguf_files.write_model(model, tokenizer, path, template=CHAT_TEMPLATE, stop=stop or [2], bos=True, name="tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_another_reader_computes_the_same(name: str, dtype: torch.dtype, tokenizer: Any, tmp_path: Path) -> None:
    model: Any = tiny(name, vocab_size=512, **FAMILIES[name])
    rounded = {key: tensor.to(dtype).float() for key, tensor in model.state_dict().items()}
    model.load_state_dict(rounded)
    wanted = _logits(model)
    _write(model.to(dtype), tokenizer, tmp_path / "model.gguf")
    found = _logits(gguf_files.load_model(tmp_path / "model.gguf"))
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


def _joined_by_score(tokenizer: GgufTokenizer, text: str) -> list[int]:
    """llama.cpp's SentencePiece: join the neighbours whose text is the token of the highest score, leftmost first."""
    numbers = {token: number for number, token in enumerate(tokenizer.tokens)}
    parts = list((" " + text if tokenizer.space_first else text).replace(" ", "▁"))
    while True:
        pairs = [(parts[n] + parts[n + 1], n) for n in range(len(parts) - 1) if parts[n] + parts[n + 1] in numbers]
        if not pairs:
            break
        _, place = max(pairs, key=lambda pair: (tokenizer.scores[numbers[pair[0]]], -pair[1]))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        ids += [numbers[part]] if part in numbers else [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_scores_join_what_the_merges_join() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(STORIES)
    found = gguf_files.convert_tokenizer(tokenizer, rows=512)
    assert found.kind == "llama" and found.space_first and len(found.scores) == len(found.tokens) == 512
    draw = random.Random(0)
    letters = "aehilnorstdwy  .,'\"Lé7\n"
    texts = ["Once upon a time, there was a little girl named Lily.", "é ü 漢", ""]
    texts += ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(200)]
    for text in texts:
        assert _joined_by_score(found, text) == tokenizer(text, add_special_tokens=False)["input_ids"] or not text


def test_a_byte_level_vocabulary_keeps_merges_and_names_its_words() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    found = gguf_files.convert_tokenizer(tokenizer, rows=6150)
    assert (found.kind, found.words, found.scores) == ("gpt2", "gpt-2", [])
    merges = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["merges"]
    assert list(found.merges) == [" ".join(pair) for pair in merges]
    assert len(found.tokens) == 6150 and found.tokens[:2] == ["<|endoftext|>", "<|user|>"]
    assert found.types[:6] == [3, 3, 3, 3, 3, 1] and found.types[-1] == 5


def _changed(change: Callable[[dict[str, Any]], object], folder: Path, source: Path) -> PreTrainedTokenizerFast:
    content = json.loads((source / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def _second_way(merges: list[list[str]]) -> list[str]:
    """A merge whose neighbour gives the same token, taken away."""
    place = next(n for n in range(1, len(merges)) if "".join(merges[n]) == "".join(merges[n - 1]))
    return merges.pop(place)


DIGITS = {"type": "Digits", "individual_digits": True}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTES, "use_regex": False}]}


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("smollm", {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}),
        ("qwen2", _split(gguf_files._QWEN)),
        ("llama-bpe", _split(gguf_files._LLAMA3)),
    ],
)
def test_rules_of_known_families_have_their_names(rule: str, step: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = _changed(lambda content: content.update(pre_tokenizer=step), tmp_path, FOLDER)
    assert gguf_files.convert_tokenizer(tokenizer, rows=6144).words == rule


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        (FOLDER, lambda content: content.update(pre_tokenizer=_split(r"\d+")), "the rule"),
        (FOLDER, lambda content: content.update(normalizer={"type": "Lowercase"}), "the rule"),
        (STORIES, lambda content: content.update(normalizer={"type": "NFKC"}), "the rule"),
        (STORIES, lambda content: content["model"]["merges"].pop(40), "whose merges never join"),
        (
            STORIES,
            lambda content: content["model"]["merges"].append(_second_way(content["model"]["merges"])),
            "at two places of its merges",
        ),
    ],
    ids=["words", "case", "letters", "missing merge", "repeated merge"],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(
    source: Path, change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BackboneError, match=f"{words}.*convert_hf_to_gguf.py"):
        gguf_files.convert_tokenizer(_changed(change, tmp_path, source), rows=512)


def test_word_pieces_are_refused() -> None:
    with pytest.raises(BackboneError, match="a WordPiece tokenizer"):
        gguf_files.convert_tokenizer(AutoTokenizer.from_pretrained(MINILM), rows=30522)
