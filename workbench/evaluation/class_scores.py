"""Scores of predicted class probabilities; scikit-learn's where it has them.

Legend: N rows, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]
Labels = NDArray[np.int64]
BINS = 15
"""Bins of confidence in the calibration error, as in Guo et al. 2017."""
_Z95 = 1.959963984540054
"""The normal quantile of 97.5 %."""


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def scores(p_NC: Probabilities, labels_N: Labels) -> dict[str, float]:
    """Accuracy, macro-F1, log-loss (nats), Brier score, expected calibration error; ROC-AUC for two classes.

    The Brier score is the squared distance summed over classes, so 2 is the worst.
    """
    from sklearn import metrics  # half a second, with scipy.stats, for runs that have classes

    classes = np.arange(p_NC.shape[1])
    predicted_N = p_NC.argmax(1)
    p_NC = np.minimum(p_NC, 1.0)  # the mean of rounded ones may be 1 + 2**-52, which scikit-learn refuses
    one_hot_NC = np.eye(len(classes))[labels_N]
    score_by_name = {
        "accuracy": float(metrics.accuracy_score(labels_N, predicted_N)),
        "macro_f1": float(metrics.f1_score(labels_N, predicted_N, labels=classes, average="macro", zero_division=0.0)),
        "log_loss": float(metrics.log_loss(labels_N, p_NC, labels=classes)),
        "brier": float(((p_NC - one_hot_NC) ** 2).sum(1).mean()),
        "calibration_error": calibration_error(p_NC, labels_N),
    }
    if len(classes) == 2 and len(np.unique(labels_N)) == 2:
        score_by_name["roc_auc"] = float(metrics.roc_auc_score(labels_N, p_NC[:, 1]))
    return score_by_name


def calibration_error(p_NC: Probabilities, labels_N: Labels) -> float:
    """Mean gap between confidence and accuracy over equal bins of confidence, weighted by their rows.

    Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    confidence_N, hit_N = p_NC.max(1), p_NC.argmax(1) == labels_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    gap_bins = np.bincount(bin_N, weights=hit_N - confidence_N, minlength=BINS)
    return float(np.abs(gap_bins).sum() / len(labels_N))


def accuracy_interval(hits: float, rows: float) -> Interval:
    """Wilson's 95 % interval of a share: honest for few rows and near 0 and 1 (Wilson 1927).

    Args:
        hits: At most `rows`. A row of which nobody can say whether it is one counts half.
        rows: Fewer than there are where they depend on each other.
    """
    share, spread = hits / rows, _Z95**2 / rows
    centre, half = share + spread / 2, _Z95 * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    low, high = ((centre + side * half) / (1 + spread) for side in (-1, 1))
    return Interval(share, low if share > 0 else 0.0, high if share < 1 else 1.0)  # rounding aside, these are 0 and 1
