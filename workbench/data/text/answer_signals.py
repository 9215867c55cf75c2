"""Signals that a reward is served and not its purpose: answers grow, repeat themselves, or are rewarded for length.

Legend: S answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

GRAM = 4
"""Words, or tokens, that are compared together."""


def repetition(text: str) -> float:
    """Share of an answer's runs of four words that it had before; 0 where it is shorter."""
    return repeated(text.split())


def repeated(parts: Sequence[Hashable]) -> float:
    """The same of its words, or its tokens."""
    grams = [tuple(parts[start : start + GRAM]) for start in range(len(parts) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def of_answers(texts: Sequence[str]) -> dict[str, float]:
    """Mean words and mean repetition of answers; empty where there are none."""
    if not texts:
        return {}
    words = float(np.mean([len(text.split()) for text in texts]))
    return {"words": round(words, 6), "repetition": round(float(np.mean(list(map(repetition, texts)))), 6)}


def length_correlation(texts: Sequence[str], reward_S: Sequence[float]) -> float | None:
    """Spearman's rank correlation of words and rewards; None where one of them is the same for all."""
    from scipy import stats  # takes 0.7 s to import

    words = [len(text.split()) for text in texts]
    if len(set(words)) < 2 or len(set(reward_S)) < 2:
        return None
    return float(stats.spearmanr(words, reward_S).statistic)
