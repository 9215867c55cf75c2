"""Predictor of `freeze.policy=smartfrz`: attention over the history of a layer's values says whether it has settled.

Its weights are shipped; `scripts/smartfrz.py` trains it and measures how often it is right. It is written in NumPy,
because a configuration is read without torch.

Legend: T intervals, F features of an interval, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WINDOW = 8
"""Latest intervals that are looked at."""
FEATURES = 3
WIDTH = 16
SHIPPED = Path(__file__).with_name("smartfrz.safetensors")
_TINY = 1e-12


def features(moved_T: Floats, away_T: Floats) -> Floats:
    """Features of each interval (T, F), none of which depends on the size or the unit of a layer's values.

    They are the logarithm of the way in the interval, relative to the layer's longest so far; the way relative to the
    distance from the start; and the cosine between the way and the direction from the start to where it began.

    Args:
        moved_T: Length of the layer's way in each interval.
        away_T: Its distance from the start at the end of each.
    """
    before_T = np.concatenate([[0.0], away_T[:-1]])
    # The law of cosines in the triangle of start, beginning and end of the interval.
    cosine_T = (away_T**2 - before_T**2 - moved_T**2) / np.maximum(2 * before_T * moved_T, _TINY)
    columns = [
        np.log(np.maximum(moved_T, _TINY) / np.maximum(np.maximum.accumulate(moved_T), _TINY)).clip(-6, 0),
        (moved_T / np.maximum(away_T, _TINY)).clip(0, 2),
        np.where(before_T > 0, cosine_T, 0.0).clip(-1, 1),
    ]
    return np.stack(columns, axis=1)


def histories(values_TL: Floats) -> dict[int, Floats]:
    """Features of every interval (T, F) of each block, from 0 on, up to where it froze; without those that never train.

    Those of an interval depend on none that follow, so that the first ones are what was known at that time.

    Args:
        values_TL: Of each interval, the way of each layer in it, and then the distance of each from its start; layers
            are the embeddings, the blocks, and what comes after them.
    """
    moved_TL, away_TL = np.split(values_TL, 2, axis=1)
    trained_L = np.logical_and.accumulate(~np.isnan(moved_TL)).sum(axis=0)
    return {
        layer - 1: features(moved_TL[:count, layer], away_TL[:count, layer])
        for layer, count in enumerate(trained_L.tolist()[1:-1], start=1)
        if count
    }


def settled(history_TF: Floats, weights: Mapping[str, Floats]) -> float:
    """Probability that a layer with this history has settled: the latest interval asks, all in the window answer.

    With x the window and z = x E + e + p, p by how long ago an interval was: a = softmax(z_last Q (z K)' / sqrt(D)),
    h = relu((z_last + a z V) A + b), and the probability is sigmoid(h c + d).
    """
    x_TF = history_TF[-WINDOW:]
    z_TD = x_TF @ weights["E"] + weights["e"] + weights["p"][-len(x_TF) :]
    scores_T = (z_TD @ weights["K"]) @ (z_TD[-1] @ weights["Q"]) / np.sqrt(WIDTH)
    answers_T = np.exp(scores_T - scores_T.max())
    heard_D = (answers_T / answers_T.sum()) @ (z_TD @ weights["V"])
    hidden_D = np.maximum((z_TD[-1] + heard_D) @ weights["A"] + weights["b"], 0)
    logit = hidden_D @ weights["c"] + weights["d"]
    return float(1 / (1 + np.exp(-logit.item())))


@cache
def shipped() -> Mapping[str, Floats]:
    """The weights that come with the package."""
    from safetensors.numpy import load_file

    return {name: each.astype(np.float64) for name, each in load_file(SHIPPED).items()}
