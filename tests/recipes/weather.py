"""Sentences on the weather, in words that say their class and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS = {"sun": "bright warm sun", "rain": "cold wet rain", "snow": "white deep snow"}
OTHERS = [
    "garden",
    "river",
    "window",
    "castle",
    "market",
    "bottle",
    "candle",
    "forest",
    "ladder",
    "pocket",
    "saddle",
    "tunnel",
    "violin",
    "wagon",
    "yellow",
    "zebra",
    "anchor",
    "basket",
    "copper",
    "dragon",
    "engine",
    "feather",
    "guitar",
    "hammer",
    "island",
    "jungle",
    "kitten",
    "lemon",
    "mirror",
    "needle",
]


def weather(rows: int, *, seed: int, wrong: float = 0.0) -> list[dict[str, Any]]:
    """Sentences of other words with two that say the class, and a share of wrong labels."""
    chance, names = np.random.default_rng(seed), list(WORDS)
    found = []
    for number in range(rows):
        label = names[number % 3]
        others = chance.choice(OTHERS, size=int(chance.integers(3, 7)), replace=False)
        words = [*others, *chance.choice(WORDS[label].split(), size=2, replace=False)]
        said = names[int(chance.integers(3))] if chance.random() < wrong else label
        found.append({"text": " ".join(map(str, chance.permutation(words))), "label": said})
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
