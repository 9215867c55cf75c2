"""How often one model's answer beats another's to the same prompt.

Legend: S prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workbench.data.text import answer_signals
from workbench.evaluation import class_scores

Floats = npt.NDArray[np.float64]


def of_rewards(own_S: Sequence[float], other_S: Sequence[float]) -> Floats:
    """1 where the own answer has the higher reward, 0 where it has the lower one, 0.5 where they are equal; (S,)."""
    win_S: Floats = (1 + np.sign(np.asarray(own_S) - np.asarray(other_S))) / 2
    return win_S


def of_verdicts(own_first_S: Sequence[int], other_first_S: Sequence[int]) -> Floats:
    """Mean of two verdicts on each pair of answers: one saw the own answer first, one the other's.

    Args:
        own_first_S: 1: the first answer is better; 2: the second one; 0: neither.
        other_first_S: The same, of the same answers in the other order.
    """
    own, other = np.asarray(own_first_S), np.asarray(other_first_S)
    points = np.asarray([0.5, 1.0, 0.0])
    win_S: Floats = (points[own] + 1 - points[other]) / 2
    return win_S


def order_agreement(own_first_S: Sequence[int], other_first_S: Sequence[int]) -> float:
    """Share of prompts whose verdict stays the same when the order changes; a judge that looks at places has 0."""
    swapped = np.asarray([0, 2, 1])[np.asarray(other_first_S)]
    return float((np.asarray(own_first_S) == swapped).mean())


def summary(win_S: Floats, own: Sequence[str], other: Sequence[str]) -> dict[str, float]:
    """Scores by name: the win rate with Wilson's 95 % interval, a tie counting half, and what may explain it.

    `longer` is how often the longer of two answers wins, over those of unlike length (words): far above one half says
    that length is rewarded. `words` and `repetition` are means of the own answers and of the other's.
    """
    interval = class_scores.accuracy_interval(round(float(win_S.sum())), len(win_S))
    score_by_name = {
        "win_rate": float(win_S.mean()),
        "win_rate_low": interval.low,
        "win_rate_high": interval.high,
        "ties": float((win_S == 0.5).mean()),
    }
    longer_S = np.asarray([len(a.split()) - len(b.split()) for a, b in zip(own, other, strict=True)])
    if (unlike_S := longer_S != 0).any():
        score_by_name["longer"] = float(np.where(longer_S > 0, win_S, 1 - win_S)[unlike_S].mean())
    score_by_name |= answer_signals.of_answers(own)
    score_by_name |= {f"{name}_other": value for name, value in answer_signals.of_answers(other).items()}
    return {name: round(value, 6) for name, value in score_by_name.items()}
