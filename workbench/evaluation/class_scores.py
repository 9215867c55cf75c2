"""Scores of predicted class probabilities; scikit-learn's where it has them.

Legend: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

Probabilities = NDArray[np.float64]
Labels = NDArray[np.int64]
BINS = 15
"""Of the calibration error, as in Guo et al. 2017."""


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds that 95 of 100 samples of such rows would keep."""

    mean: float
    low: float
    high: float


def scores(p_NC: Probabilities, labels_N: Labels) -> dict[str, float]:
    """Accuracy, macro-F1, log-loss (nats), Brier score, expected calibration error; ROC-AUC for two classes.

    The Brier score is the squared distance summed over classes, so 2 is the worst.
    """
    classes = np.arange(p_NC.shape[1])
    chosen_N = p_NC.argmax(1)
    hot_NC = np.eye(len(classes))[labels_N]
    found = {
        "accuracy": float(metrics.accuracy_score(labels_N, chosen_N)),
        "macro_f1": float(metrics.f1_score(labels_N, chosen_N, labels=classes, average="macro", zero_division=0.0)),
        "log_loss": float(metrics.log_loss(labels_N, p_NC, labels=classes)),
        "brier": float(((p_NC - hot_NC) ** 2).sum(1).mean()),
        "calibration_error": calibration_error(p_NC, labels_N),
    }
    if len(classes) == 2 and len(np.unique(labels_N)) == 2:
        found["roc_auc"] = float(metrics.roc_auc_score(labels_N, p_NC[:, 1]))
    return found


def calibration_error(p_NC: Probabilities, labels_N: Labels) -> float:
    """Mean gap between confidence and accuracy over equal bins of confidence, weighted by their rows.

    Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    confidence_N, hit_N = p_NC.max(1), p_NC.argmax(1) == labels_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    gap_bins = np.bincount(bin_N, weights=hit_N - confidence_N, minlength=BINS)
    return float(np.abs(gap_bins).sum() / len(labels_N))


def per_class(p_NC: Probabilities, labels_N: Labels, names: Sequence[str]) -> pd.DataFrame:
    """Precision, recall, F1 and rows of each class, by its name."""
    found = metrics.precision_recall_fscore_support(
        labels_N, p_NC.argmax(1), labels=np.arange(len(names)), zero_division=0.0
    )
    return pd.DataFrame(dict(zip(("precision", "recall", "f1", "rows"), found, strict=True)), index=list(names))


def confusion(p_NC: Probabilities, labels_N: Labels) -> NDArray[np.int64]:
    """Rows of class i that were taken for class j, (C, C)."""
    counts: NDArray[np.int64] = metrics.confusion_matrix(
        labels_N, p_NC.argmax(1), labels=np.arange(p_NC.shape[1])
    ).astype(np.int64)
    return counts


def accuracy_interval(hits: int, rows: int) -> Interval:
    """Wilson's 95 % interval of a share: honest for few rows and near 0 and 1 (Wilson 1927)."""
    found = stats.binomtest(hits, rows).proportion_ci(method="wilson")
    return Interval(hits / rows, float(found.low), float(found.high))
