"""Scores of one answer against its reference: token F1 and ROUGE-L, for any script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")
"""A word, or one character of a script that writes no spaces (Japanese, Chinese, Korean)."""


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and English articles, as SQuAD's scorer normalises them."""
    return [word for word in _WORD.findall(text.lower()) if word not in ("a", "an", "the")]


def token_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over shared words, 0 to 1 (Rajpurkar et al. 2016)."""
    predicted, wanted = words(prediction), words(reference)
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004)."""
    predicted, wanted = words(prediction), words(reference)
    shared = _longest_common(predicted, wanted)
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, row by row of its table.

    Package rouge_score, which finds the same, imports all of nltk and scipy.stats, 0.65 s before a first step.
    """
    length = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for column, against in enumerate(other, start=1):
            longer = diagonal + 1 if word == against else max(length[column], length[column - 1])
            diagonal, length[column] = length[column], longer
    return length[-1]
