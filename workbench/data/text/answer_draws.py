"""Random numbers of answers that are drawn from a model's probabilities.

Legend: G answers to a prompt, T most tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class SampledAnswer(NamedTuple):
    """An answer, and how likely each of its tokens was to whom drew it."""

    ids: npt.NDArray[np.int64]
    log_probs: Floats
    """Natural log-probability of each token, at the temperature of the draw."""


def draws(key: Sequence[int], *, answers: int, tokens: int) -> Floats:
    """Random numbers (G, T) in [0, 1) of the answers to a prompt; those of each answer depend on `key` and its number.

    Args:
        key: Numbers >= 0, such as seed, step and row.
    """
    return np.stack([np.random.default_rng([*key, answer]).random(tokens) for answer in range(answers)])
