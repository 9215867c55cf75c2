"""Rewritten texts: without punctuation, with typos, or with words dropped. Pure functions."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def without_punctuation(text: str) -> str:
    """`text` without punctuation, except between two letters or digits, as in don't and 3.5."""

    def is_kept(index: int) -> bool:
        inside = text[index - 1 : index].isalnum() and text[index + 1 : index + 2].isalnum()
        return inside or not unicodedata.category(text[index]).startswith("P")

    kept = "".join(character for index, character in enumerate(text) if is_kept(index))
    return text if kept == text else re.sub("  +", " ", kept).strip()


def with_typos(text: str, rng: np.random.Generator, *, share: float) -> str:
    """Delete, double, or swap with the next one a share of the letters and digits, at least one."""
    candidates = [index for index, character in enumerate(text) if character.isalnum()]
    if not candidates:
        return text
    characters = list(text)
    for index in rng.choice(candidates, size=max(1, round(share * len(candidates))), replace=False):
        typo = rng.integers(3)
        if typo == 0:
            characters[index] = ""
        elif typo == 1 and text[index + 1 : index + 2].isalnum() and text[index + 1] != text[index]:
            characters[index], characters[index + 1] = characters[index + 1], characters[index]
        else:
            characters[index] *= 2
    return "".join(characters)


def with_words_dropped(text: str, rng: np.random.Generator, *, share: float) -> str:
    """Drop a share of the words, which spaces separate: at least one, never all."""
    words = re.findall(r"\s*\S+\s*?", text)
    if len(words) < 2:
        return text
    count = min(max(1, round(share * len(words))), len(words) - 1)
    dropped = set(rng.choice(len(words), size=count, replace=False).tolist())
    return "".join(word for index, word in enumerate(words) if index not in dropped).lstrip()


def noise_rng(seed: int, name: str, copy: int, texts: Sequence[str]) -> np.random.Generator:
    """Random generator of a row's noise: the same for the same texts, in any row."""
    key = json.dumps([seed, name, copy, *texts]).encode()
    return np.random.default_rng(int.from_bytes(blake2b(key, digest_size=16).digest(), "little"))
