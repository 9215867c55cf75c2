"""Scores of one answer against its reference: token F1 and ROUGE-L, for any script."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")
"""A word, or one character of a script that writes no spaces (Japanese, Chinese, Korean)."""


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and English articles, as SQuAD's scorer normalises them."""
    return [word for word in _WORD.findall(text.lower()) if word not in ("a", "an", "the")]


def token_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over shared words, 0 to 1 (Rajpurkar et al. 2016)."""
    found, wanted = words(prediction), words(reference)
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004)."""
    return float(_rouge().score(reference, prediction)["rougeL"].fmeasure)


class _Words:
    """The interface that rouge_score expects of a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


@lru_cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], tokenizer=_Words())
