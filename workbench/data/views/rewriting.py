"""One text, written otherwise: letters in another case, without punctuation, or with noise. Pure functions."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def without_punctuation(text: str) -> str:
    """`text` without punctuation, but for what stands between two letters or digits, as in don't and 3.5."""

    def stays(place: int) -> bool:
        inside = text[place - 1 : place].isalnum() and text[place + 1 : place + 2].isalnum()
        return inside or not unicodedata.category(text[place]).startswith("P")

    kept = "".join(letter for place, letter in enumerate(text) if stays(place))
    return text if kept == text else re.sub("  +", " ", kept).strip()


def with_typos(text: str, chance: np.random.Generator, *, share: float) -> str:
    """A share of the letters and digits, at least one, is left out, doubled, or exchanged with the next one."""
    places = [place for place, letter in enumerate(text) if letter.isalnum()]
    if not places:
        return text
    letters = list(text)
    for place in chance.choice(places, size=max(1, round(share * len(places))), replace=False):
        slip = chance.integers(3)
        if slip == 0:
            letters[place] = ""
        elif slip == 1 and text[place + 1 : place + 2].isalnum() and text[place + 1] != text[place]:
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
        else:
            letters[place] *= 2
    return "".join(letters)


def with_words_dropped(text: str, chance: np.random.Generator, *, share: float) -> str:
    """A share of the words is left out: at least one, never all. A word is what stands between spaces."""
    words = re.findall(r"\s*\S+\s*?", text)
    if len(words) < 2:
        return text
    count = min(max(1, round(share * len(words))), len(words) - 1)
    dropped = set(chance.choice(len(words), size=count, replace=False).tolist())
    return "".join(word for place, word in enumerate(words) if place not in dropped).lstrip()


def chance_of(seed: int, name: str, copy: int, texts: Sequence[str]) -> np.random.Generator:
    """Random generator of a row's noise: the same for the same texts, wherever the row stands."""
    key = json.dumps([seed, name, copy, *texts]).encode()
    return np.random.default_rng(int.from_bytes(blake2b(key, digest_size=16).digest(), "little"))
