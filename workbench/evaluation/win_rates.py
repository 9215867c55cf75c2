"""How often one model's answer beats another's to the same prompt.

Legend: S prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from workbench.data.text import generated_answers
from workbench.evaluation import paired_rows
from workbench.runs import units

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


def interval(win_S: Floats) -> tuple[float, float]:
    """95 % interval of the mean of wins (1), losses (0) and what is between them.

    Wilson's where there are wins and losses alone, else Student's of the mean over prompts, within 0 and 1; where all
    prompts end alike Wilson's formula with the mean in place of the share, which is wider.
    """
    shares = paired_rows.interval(win_S)
    if np.isin(win_S, (0, 1)).all() or shares is None:
        return _wilson(float(win_S.mean()), len(win_S))
    return max(0.0, shares[0]), min(1.0, shares[1])


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson 1927, with a share that need not be one of `count`."""
    z = NormalDist().inv_cdf(0.975)
    middle, spread = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (middle - spread) / (1 + z**2 / count), (middle + spread) / (1 + z**2 / count)


def summary(win_S: Floats, own: Sequence[str], other: Sequence[str]) -> dict[str, float]:
    """Scores by name: the win rate with its 95 % interval, a tie counting half, and what may explain it.

    `longer` is how often the longer of two answers wins, over those of unlike length (words): far above one half says
    that length is rewarded. `words` and `repetition` are means of the own answers and of the other's.
    """
    low, high = interval(win_S)
    score_by_name = {
        "win_rate": float(win_S.mean()),
        "win_rate_low": low,
        "win_rate_high": high,
        "ties": float((win_S == 0.5).mean()),
    }
    longer_S = np.asarray([len(a.split()) - len(b.split()) for a, b in zip(own, other, strict=True)])
    if (unlike_S := longer_S != 0).any():
        score_by_name["longer"] = float(np.where(longer_S > 0, win_S, 1 - win_S)[unlike_S].mean())
    score_by_name |= generated_answers.answer_lengths(own)
    score_by_name |= {f"{name}_other": value for name, value in generated_answers.answer_lengths(other).items()}
    return units.rounded(score_by_name)
