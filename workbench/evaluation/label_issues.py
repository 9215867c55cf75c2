"""Labels that are probably wrong: confident learning (Northcutt et al. 2021), on probabilities of models that did not
train on the rows.

Legend: N rows, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def suspected(p_NC: Floats, label_N: Indices) -> dict[int, int]:
    """Rows whose label is probably wrong, the most suspect first, with the class that each is rather of.

    A row is confidently of class j where p_j reaches t_j, the mean of p_j over the rows that are labelled j; where it
    is so of several classes, of the likeliest. Its label is suspect where that is another class. Rows are ranked by the
    normalised margin, the probability of their label less that of the other class.

    Args:
        p_NC: Probabilities of each class, out of fold: a model is sure of the labels that it has learnt.
        label_N: The class of each row, as it is labelled.
    """
    own_N = p_NC[np.arange(len(p_NC)), label_N]
    counts_C = np.bincount(label_N, minlength=p_NC.shape[1])
    threshold_C = np.bincount(label_N, weights=own_N, minlength=p_NC.shape[1]) / np.maximum(counts_C, 1)
    confident_NC = np.where((p_NC >= threshold_C) & (counts_C > 0), p_NC, -1.0)
    other_N = confident_NC.argmax(1)
    suspect_N = (confident_NC.max(1) >= 0) & (other_N != label_N)
    margin_N = own_N - p_NC[np.arange(len(p_NC)), other_N]
    order = np.argsort(margin_N, kind="stable")
    return {int(row): int(other_N[row]) for row in order if suspect_N[row] and margin_N[row] < 0}
