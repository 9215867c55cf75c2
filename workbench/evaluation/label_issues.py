"""Labels that are probably wrong, by probabilities of models that did not train on the rows.

A label is taken to be wrong with a probability that all rows share, and then to be any other class alike. That share
and a temperature are fitted to the labels as they are, and give the probability that each label is right.

cleanlab's confident learning (Northcutt et al. 2021) counts a wrong label wherever a model is surer of another class
than it mostly is, and so counts the model's own mistakes where these are many. The rule here was preferred on one seed
of Banking77 with planted labels; scripts/bench/label_noise.py repeats that. Both rank rows by the probability of their
label.

Legend: N rows, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LEAST = 1e-12
"""Lowest probability that has a logarithm here."""
BOUNDS = ((np.log(0.05), np.log(20.0)), (-12.0, 0.0))
"""Bounds of the logarithm of the temperature, and of the log-odds of a wrong label: half of the labels at most."""


def suspected(p_NC: Floats, label_N: Indices) -> dict[int, int]:
    """Rows whose label is rather wrong than right, the most suspect first, with the class that each is rather of.

    Args:
        p_NC: Probabilities of each class, out of fold: a model is sure of the labels that it has learnt.
        label_N: The class of each row, as it is labelled.
    """
    right_N = label_quality(p_NC, label_N)
    known_C = np.bincount(label_N, minlength=p_NC.shape[1]) > 0
    likeliest_N = np.where(known_C, p_NC, -1.0).argmax(1)
    order = np.argsort(right_N, kind="stable")
    return {int(row): int(likeliest_N[row]) for row in order if right_N[row] < 0.5 and likeliest_N[row] != label_N[row]}


def label_quality(p_NC: Floats, label_N: Indices) -> Floats:
    """Probability that each label is right (N,).

    With share e of wrong labels and own probability q at the fitted temperature, a row has its label with probability
    (1 - e) q + e (1 - q) / (C - 1), of which the first part is right.
    """
    known_C, own_N = np.unique(label_N, return_inverse=True)
    logits_NC = np.log(np.maximum(p_NC[:, known_C], LEAST))
    if len(known_C) < 2:
        return np.ones(len(p_NC))

    def parts(at: Floats) -> tuple[Floats, Floats]:
        wrong = float(special.expit(at[1]))
        log_q_NC = special.log_softmax(logits_NC / np.exp(at[0]), axis=1)
        q_N = np.exp(log_q_NC[np.arange(len(own_N)), own_N])
        return (1 - wrong) * q_N, wrong * (1 - q_N) / (len(known_C) - 1)

    def loss(at: Floats) -> float:
        return -float(np.log(np.maximum(sum(parts(at)), LEAST)).mean())

    optimum = optimize.minimize(loss, np.array([-0.5, -2.0]), method="L-BFGS-B", bounds=BOUNDS)
    right_N, wrong_N = parts(optimum.x)
    quality_N: Floats = right_N / np.maximum(right_N + wrong_N, LEAST)
    return quality_N
