"""llama.cpp's rules, written out, cut text by an exported vocabulary as the tokenizer does; others are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import MINILM, STORIES
from workbench.data.starter import FOLDER
from workbench.errors import BackboneError
from workbench.models.exporting import gguf_tokenizer
from workbench.models.exporting.gguf_tokenizer import GgufTokenizer


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
    found = gguf_tokenizer.convert(tokenizer, rows=512)
    assert found.kind == "llama" and found.space_first and len(found.scores) == len(found.tokens) == 512
    draw = random.Random(0)
    letters = "aehilnorstdwy  .,'\"Lé7\n"
    texts = ["Once upon a time, there was a little girl named Lily.", "é ü 漢", ""]
    texts += ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(200)]
    for text in texts:
        assert _joined_by_score(found, text) == tokenizer(text, add_special_tokens=False)["input_ids"] or not text


def test_a_byte_level_vocabulary_keeps_merges_and_names_its_words() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    found = gguf_tokenizer.convert(tokenizer, rows=6150)
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
        ("qwen2", _split(gguf_tokenizer._QWEN)),
        ("llama-bpe", _split(gguf_tokenizer._LLAMA3)),
    ],
)
def test_rules_of_known_families_have_their_names(rule: str, step: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = _changed(lambda content: content.update(pre_tokenizer=step), tmp_path, FOLDER)
    assert gguf_tokenizer.convert(tokenizer, rows=6144).words == rule


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
        gguf_tokenizer.convert(_changed(change, tmp_path, source), rows=512)


def test_word_pieces_are_refused() -> None:
    with pytest.raises(BackboneError, match="a WordPiece tokenizer"):
        gguf_tokenizer.convert(AutoTokenizer.from_pretrained(MINILM), rows=30522)
