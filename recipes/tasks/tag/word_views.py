"""Views of rows of words for test-time augmentation, which keep every word, and the mean of what is said in them.

Legend: S supervised tokens of a row, C tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from workbench.config.sections.tta_config import TtaConfig
from workbench.data.batching import Floats
from workbench.data.tagged_rows import EncodedTags, TaggedRow
from workbench.data.text import rewriting

_CASES: Mapping[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper}
_BETWEEN = "\0"
"""Stands between words while they are rewritten: no typo changes it."""


def views(config: TtaConfig, *, seed: int) -> Iterator[tuple[str, Callable[[TaggedRow], TaggedRow]]]:
    """The views that `config` names: the name of each, and what makes the row that a row is in it, without tags."""
    for name in config.views:
        if name in _CASES:
            yield name, partial(_in_case, _CASES[name])
        for copy in range(1, config.copies + 1) if name not in _CASES else ():
            yield name, partial(_with_typos, seed=seed, copy=copy, share=config.noise)


def merged(encoded: Sequence[EncodedTags], p: Sequence[Floats]) -> Floats:
    """Mean of the probabilities of a row's words over its views, shape (S, C) of the first one, the row as it is.

    Args:
        encoded: The row in each view.
        p: The probabilities in each view, at its own supervised tokens. A view counts for the words that have a token
            of their own in it.
    """
    sums_SC, counts_S = p[0].copy(), np.ones(len(p[0]))
    for view, p_SC in zip(encoded[1:], p[1:], strict=True):
        _, own, there = np.intersect1d(encoded[0].words, view.words, assume_unique=True, return_indices=True)
        sums_SC[own] += p_SC[there]
        counts_S[own] += 1
    means_SC: Floats = sums_SC / counts_S[:, None]
    return means_SC


def _in_case(change: Callable[[str], str], row: TaggedRow) -> TaggedRow:
    return _rewritten(row, [change(word) for word in row.words])


def _with_typos(row: TaggedRow, *, seed: int, copy: int, share: float) -> TaggedRow:
    rng = rewriting.noise_rng(seed, "typos", copy, row.words)
    return _rewritten(row, rewriting.with_typos(_BETWEEN.join(row.words), rng, share=share).split(_BETWEEN))


def _rewritten(row: TaggedRow, words: Sequence[str]) -> TaggedRow:
    """The row with other words in their places; one that would be empty stays as it is."""
    words = [word or own for word, own in zip(words, row.words, strict=True)]
    text, offsets, last = "", list[tuple[int, int]](), 0
    for (start, end), word in zip(row.offsets, words, strict=True):
        text += row.text[last:start]
        offsets.append((len(text), len(text) + len(word)))
        text, last = text + word, end
    return replace(row, words=tuple(words), text=text + row.text[last:], offsets=tuple(offsets), tags=())
