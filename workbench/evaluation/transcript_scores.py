"""Word and character error rates of transcripts, by jiwer, with their 95 % bootstrap intervals.

A rate is the edits of all rows over the words (characters) of all references. Case and punctuation count.

Legend: N rows, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import ConfigError
from workbench.evaluation import metrics


class Edits(NamedTuple):
    """How a transcript differs from its reference."""

    words: int  # that are substituted, deleted or inserted
    of_words: int  # in the reference
    characters: int
    of_characters: int

    @property
    def wer(self) -> float:
        """Word error rate."""
        return self.words / self.of_words

    @property
    def cer(self) -> float:
        """Character error rate."""
        return self.characters / self.of_characters


def require_library() -> Any:
    """The module jiwer. Raises ConfigError: it is not installed."""
    try:
        import jiwer
    except ImportError as error:
        raise ConfigError(
            f"data.format=audio scores transcripts by jiwer, which is not there ({error}). "
            "Run: pip install peft-workbench[audio]"
        ) from None
    return jiwer


def edits(transcript: str, reference: str) -> Edits:
    """Edits from a reference of at least one word to a transcript, which may be empty."""
    jiwer = require_library()
    counts: list[int] = []
    for found in (jiwer.process_words(reference, transcript), jiwer.process_characters(reference, transcript)):
        counts += [found.substitutions + found.deletions + found.insertions]
        counts += [found.hits + found.substitutions + found.deletions]
    return Edits(*counts)


def scores(rows: Sequence[Edits]) -> dict[str, float]:
    """`wer` and `cer` of all rows, and their intervals where there are several rows."""
    count_N4 = np.asarray(rows, dtype=np.float64)
    words, of_words, characters, of_characters = count_N4.sum(0)
    found = {"wer": float(words / of_words), "cer": float(characters / of_characters)}
    if len(rows) < 2:
        return found
    drawn_R4 = np.concatenate([each_RN @ count_N4 for each_RN in metrics.resampled(np.ones(len(rows), dtype=np.int64))])
    bounds = metrics.percentile_bounds(drawn_R4[:, ::2] / drawn_R4[:, 1::2])
    return metrics.with_bounds(found, dict(zip(found, bounds, strict=True)))
