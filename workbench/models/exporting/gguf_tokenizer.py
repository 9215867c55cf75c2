"""A fast tokenizer as GGUF describes it, for the kinds that llama.cpp cuts in the same way; others are refused.

llama.cpp reads a byte-level BPE (`gpt2`) by its merges and the name of the rule that cuts text into words, and a
SentencePiece BPE (`llama`) by a score for each token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from workbench.errors import BackboneError

Json = Mapping[str, Any]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORD_RULES: dict[str, list[Json]] = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _QWEN}}, {"type": "ByteLevel", "use_regex": False}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA3}}, {"type": "ByteLevel", "use_regex": False}],
}
"""llama.cpp's names of the rules that cut text into words, and the steps of a tokenizer.json that do the same."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A vocabulary and the rules to cut text into it."""

    kind: str
    """`gpt2` or `llama`."""
    words: str
    """Name of the rule that cuts text into words."""
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]
    """Empty for byte-level BPE."""
    space_first: bool
    """Whether a space is put before a text."""


def convert(tokenizer: PreTrainedTokenizerBase, *, rows: int) -> GgufTokenizer:
    """The tokenizer as GGUF describes it.

    Args:
        rows: Of the embedding; those without a token get an unused one.

    Raises:
        BackboneError: llama.cpp knows no such tokenizer.
    """
    backend: Any = tokenizer.backend_tokenizer
    content: Json = json.loads(backend.to_str())
    model: Json = content["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise refused(f"a {model['type']} tokenizer of this form")
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokens, types = _vocabulary(tokenizer, content, rows)
    if model.get("byte_fallback"):
        scores = _scores(tokens, types, pairs)
        return GgufTokenizer("llama", "default", tokens, types, [], scores, _space_first(content))
    return GgufTokenizer("gpt2", _word_rule(content), tokens, types, list(map(" ".join, pairs)), [], False)


def refused(what: str) -> BackboneError:
    """The error of a tokenizer that llama.cpp does not know."""
    return BackboneError(
        f"The tokenizer: {what} is none that llama.cpp cuts text by in the same way, as far as this version knows "
        f"(SentencePiece BPE; byte-level BPE with the rules {', '.join(WORD_RULES)}). Export --to merged and convert "
        "that with llama.cpp's own convert_hf_to_gguf.py."
    )


def _vocabulary(tokenizer: PreTrainedTokenizerBase, content: Json, rows: int) -> tuple[list[str], list[int]]:
    """Tokens in the order of their numbers, and their types."""
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    unknown, bytes_too = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    tokens, types = [], []
    for number in range(max(rows, max(known) + 1)):
        token = known.get(number, f"[PAD{number}]")
        tokens.append(token)
        if number not in known:
            types.append(gguf.TokenType.UNUSED)
        elif token == unknown:
            types.append(gguf.TokenType.UNKNOWN)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        elif bytes_too and len(token) == 6 and token.startswith("<0x"):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
    return tokens, [int(each) for each in types]


def _word_rule(content: Json) -> str:
    step = content["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    for name, wanted in WORD_RULES.items():
        alike = len(steps) == len(wanted) and all(w.items() <= s.items() for w, s in zip(wanted, steps, strict=True))
        if alike and not any(each.get("add_prefix_space") for each in steps) and _normalised(content, name):
            return name
    raise refused(f"the rule {json.dumps(steps)[:200]}")


def _normalised(content: Json, rule: str) -> bool:
    """Whether text is rewritten before it is cut only as that rule's own tokenizers do: Qwen's compose letters.

    llama.cpp leaves that out, which changes nothing for text that is composed already (NFC), as nearly all is.
    """
    normaliser = content["normalizer"]
    return normaliser is None or (normaliser == {"type": "NFC"} and rule == "qwen2")


def _space_first(content: Json) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text, and after each special token."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normaliser = content["normalizer"] or {"type": "none"}
    steps = normaliser["normalizers"] if normaliser["type"] == "Sequence" else [normaliser]
    if content["pre_tokenizer"] is None and steps == [{"type": "Prepend", "prepend": "▁"}, replace]:
        return True
    if content["pre_tokenizer"] is None and steps == [replace]:
        return False
    raise refused(f"the rule {json.dumps([content['normalizer'], content['pre_tokenizer']])[:200]}")


def _scores(tokens: Sequence[str], types: Sequence[int], pairs: Sequence[Sequence[str]]) -> list[float]:
    """A score for each token by which llama.cpp joins the same pairs in the same order as the merges.

    llama.cpp joins any two neighbours whose text is a token, those of the highest score first. That is the order of
    the merges where all pairs that give a token stand together, and none of them is missing.
    """
    first: dict[str, int] = {}
    last = ""
    for number, pair in enumerate(pairs):
        token = "".join(pair)
        if token != last and token in first:
            raise refused(f"one that joins {token!r} at two places of its merges")
        first.setdefault(token, number)
        last = token
    _require_all_pairs({tuple(pair) for pair in pairs}, tokens, types)
    return [float(-first.get(token, len(pairs))) for token in tokens]


def _require_all_pairs(pairs: set[tuple[str, ...]], tokens: Sequence[str], types: Sequence[int]) -> None:
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL}
    for token in normal:
        for cut in range(1, len(token)):
            halves = (token[:cut], token[cut:])
            if halves[0] in normal and halves[1] in normal and halves not in pairs:
                raise refused(f"one whose merges never join {halves[0]!r} and {halves[1]!r} to its token {token!r}")
