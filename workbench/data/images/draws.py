"""Random numbers of a row: a pure function of seed, purpose, epoch and row, whatever was drawn for other rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["augment", "mix", "partners"]

_TAGS: dict[Purpose, int] = {"augment": 0x61756E, "mix": 0x6D6978, "partners": 0x706172}
"""Keep the numbers of one purpose apart from those of another with the same seed."""
_WORD = 1 << 64


def generator(purpose: Purpose, *, seed: int, epoch: int, row: int, repeat: int = 0) -> np.random.Generator:
    """Generator whose numbers depend on these values alone.

    Philox (Salmon et al. 2011) numbers its blocks: epoch, row and repeat are the high words of the counter, so that
    streams never overlap, and a generator costs half of one that is seeded by hashing.

    Args:
        repeat: How often the row was drawn before in the same epoch, as rows of rare classes are.
    """
    # Words as one integer, low word first: lists of them take half as long again. Not NumPy's, which hold one word.
    key = seed % _WORD | _TAGS[purpose] << 64
    counter = int(repeat) << 64 | int(row) << 128 | int(epoch) << 192
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
