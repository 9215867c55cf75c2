"""Rewritten texts: without punctuation, with typos or marks, with words dropped, moved or repeated. Pure functions.

Words are what spaces separate. A text of one word is left as it is by whatever changes words.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

MARKS = ".;?:!,"  # Marks of AEDA (Karimi et al. 2021).


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
    words = _spaced_words(text)
    if len(words) < 2:
        return text
    count = min(max(1, round(share * len(words))), len(words) - 1)
    dropped = set(rng.choice(len(words), size=count, replace=False).tolist())
    return "".join(word for index, word in enumerate(words) if index not in dropped).lstrip()


def with_words_swapped(text: str, rng: np.random.Generator, *, share: float) -> str:
    """Exchange two words, at random, as often as `share` of the words says, at least once (Wei and Zou 2019)."""
    pieces = re.split(r"(\S+)", text)  # spaces, a word, spaces, a word, ...
    count = len(pieces) // 2
    if count < 2:
        return text
    for _ in range(max(1, round(share * count))):
        first, second = (2 * rng.choice(count, size=2, replace=False) + 1).tolist()
        pieces[first], pieces[second] = pieces[second], pieces[first]
    return "".join(pieces)


def with_words_inserted(text: str, rng: np.random.Generator, *, share: float) -> str:
    """Repeat a share of the words, at least one, each behind another word (Wei and Zou 2019 take synonyms of them)."""
    return _with_inserted(text, rng, [word.strip() for word in _spaced_words(text)], share=share)


def with_punctuation(text: str, rng: np.random.Generator, *, share: float) -> str:
    """Put a mark behind a share of the words, at least one (Karimi et al. 2021, who take up to a third of them)."""
    return _with_inserted(text, rng, MARKS, share=share)


def _with_inserted(text: str, rng: np.random.Generator, choices: Sequence[str], *, share: float) -> str:
    """Put some of `choices` behind words of a text, each after a space."""
    words = _spaced_words(text)
    if len(words) < 2:
        return text
    for place in rng.choice(len(words), size=max(1, round(share * len(words))), replace=False):
        words[place] += f" {choices[int(rng.integers(len(choices)))]}"
    return "".join(words)


def _spaced_words(text: str) -> list[str]:
    """The words of a text, each with the spaces before it."""
    return re.findall(r"\s*\S+\s*?", text)


def noise_rng(seed: int, name: str, copy: int, texts: Sequence[str]) -> np.random.Generator:
    """Random generator of a row's noise: the same for the same texts, in any row."""
    key = json.dumps([seed, name, copy, *texts]).encode()
    return np.random.default_rng(int.from_bytes(blake2b(key, digest_size=16).digest(), "little"))
