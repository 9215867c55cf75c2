"""Characters of a text: their scripts, the share of symbols, and those that a wrong decoding left."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

UNSPACED = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
"""Scripts that write no spaces between words, so that rules on words say nothing of them."""

_BROKEN = re.compile("\ufffd|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac.|\u00ef\u00bb\u00bf")
"""The replacement character, and UTF-8 that was read as Latin-1 or Windows-1252: é becomes Ã©, a quote â€œ."""


def scripts(text: str) -> dict[str, int]:
    """Letters of each script, the most frequent first; the first word of a letter's Unicode name is its script."""
    letter_counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if script := _script(character):
            letter_counts[script] += count
    return dict(letter_counts.most_common())


def symbol_share(text: str) -> float | None:
    """Share of characters, spaces aside, that are neither letters, marks nor digits; None where there are none."""
    counts = Counter(character for character in text if not character.isspace())
    total = sum(counts.values())
    symbols = sum(count for character, count in counts.items() if unicodedata.category(character)[0] not in "LMN")
    return symbols / total if total else None


def broken(text: str) -> float:
    """Characters that a wrong decoding left."""
    return float(len(_BROKEN.findall(text)))


@lru_cache(maxsize=65536)
def _script(character: str) -> str:
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return {"CJK": "Han", "FULLWIDTH": "Latin", "HALFWIDTH": "Katakana"}.get(name, name.capitalize())
