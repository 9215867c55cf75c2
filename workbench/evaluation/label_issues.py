"""Labels that are probably wrong: confident learning (Northcutt et al. 2021), on probabilities of models that did not
train on the rows.

The rows are those of cleanlab's `find_label_issues(filter_by="low_self_confidence")`, which a test compares; cleanlab
itself takes seconds to import, and every report of a cross-validation would wait for it.

Legend: N rows, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
LEAST = 1e-6
"""Lowest probability by which a row is confidently of a class that was never learnt."""


def suspected(p_NC: Floats, label_N: Indices) -> dict[int, int]:
    """Rows whose label is probably wrong, the most suspect first, with the class that each is rather of.

    As many rows as `wrong_labels` counts, those whose own label is least probable. Rows that are predicted to be of
    their own class are not among them.

    Args:
        p_NC: Probabilities of each class, out of fold: a model is sure of the labels that it has learnt.
        label_N: The class of each row, as it is labelled.
    """
    own_N, likeliest_N = p_NC[np.arange(len(p_NC)), label_N], _likeliest(p_NC, label_N)
    order = np.argsort(own_N, kind="stable")[: wrong_labels(p_NC, label_N)]
    return {int(row): int(likeliest_N[row]) for row in order if likeliest_N[row] != label_N[row]}


def wrong_labels(p_NC: Floats, label_N: Indices) -> int:
    """How many labels are wrong: the rows off the diagonal of the confident joint.

    A row is confidently of class j where p_j reaches t_j, the mean of p_j over the rows that are labelled j; where it
    is so of several classes, of the likeliest. It is off the diagonal where that is not its label; rows that are
    predicted to be of their own class are not counted.
    """
    own_N = p_NC[np.arange(len(p_NC)), label_N]
    counts_C = np.bincount(label_N, minlength=p_NC.shape[1])
    threshold_C = np.bincount(label_N, weights=own_N, minlength=p_NC.shape[1]) / np.maximum(counts_C, 1)
    threshold_C = np.maximum(threshold_C, LEAST)
    confident_NC = np.where((p_NC >= threshold_C) & (counts_C > 0), p_NC, -1.0)
    other_N = confident_NC.argmax(1)
    off_N = (confident_NC.max(1) >= 0) & (other_N != label_N) & (_likeliest(p_NC, label_N) != label_N)
    return int(off_N.sum())


def _likeliest(p_NC: Floats, label_N: Indices) -> Indices:
    """The likeliest class that rows are labelled with (N,)."""
    found: Indices = np.where(np.bincount(label_N, minlength=p_NC.shape[1]) > 0, p_NC, -1.0).argmax(1)
    return found
