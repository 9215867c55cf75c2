"""Random numbers of a row: a pure function of seed, purpose, epoch, row and repeat, whatever else was drawn."""

from __future__ import annotations

import functools
import threading
from typing import Any, Literal

import numpy as np

Purpose = Literal["augment", "mix", "partners"]

_TAGS: dict[Purpose, int] = {"augment": 0x61756E, "mix": 0x6D6978, "partners": 0x706172}
"""Keep the numbers of one purpose apart from those of another with the same seed."""
_WORD = 1 << 64


class _ThreadGenerators(threading.local):
    """A generator for each purpose in each thread: to set its state costs a tenth of making one."""

    def __init__(self) -> None:
        self.get = functools.cache(self._made)

    @staticmethod
    def _made(purpose: Purpose, seed: int) -> tuple[np.random.Generator, dict[str, Any]]:
        # Words as one integer, low word first, not NumPy's integers, which hold one word.
        bits = np.random.Philox(key=seed % _WORD | _TAGS[purpose] << 64)
        return np.random.Generator(bits), dict(bits.state)


_generators = _ThreadGenerators()


def generator(purpose: Purpose, *, seed: int, epoch: int, row: int, repeat: int = 0) -> np.random.Generator:
    """Generator whose numbers depend on these values alone; it is set anew by the thread's next call for the purpose.

    Philox (Salmon et al. 2011) numbers its blocks: epoch, row and repeat are the high words of the counter, so that
    streams never overlap.

    Args:
        repeat: How often the row was drawn before in the same epoch, as rows of rare classes are.
    """
    made, state = _generators.get(purpose, seed)
    state["state"]["counter"][:] = 0, repeat, row, epoch
    made.bit_generator.state = state  # whose buffer is empty, as it was made
    return made
