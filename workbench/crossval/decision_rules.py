"""Which class a row is given: log-probabilities are moved by how rare a class is, as `evaluate.metric` gains most.

The largest probability is best for accuracy alone. Macro F1, kappa and Matthews correlation gain where rare classes are
named at lower probabilities, and F1 of several classes with other thresholds than 0.5.

Legend: N rows, C classes.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from workbench.crossval import ensembles
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation.classification_scores import OneHot

SHARES = np.arange(0, 1.01, 0.125)
"""Candidates for the multiple of the logarithm of how rare a class is; 1 takes all classes for equally frequent."""
LOWER = np.arange(0, 2.01, 0.25)
"""Candidates for what is added to the log-odds of every class, where a row may have several."""


def fits(labels: Labels) -> bool:
    """Whether a rule can make the score of the labels better: a metric of labels is named, and they are classes."""
    return labels.kind != "number" and labels.metric is not None and labels.metric.of_labels


def fit(labels: Labels, values_NC: Floats, targets_NC: OneHot) -> tuple[float, ...]:
    """`Labels.shift` with the best score on these rows; of equal ones the first, which moves least.

    Classes are moved by a multiple of how rare they are, and where a row may have several, all of them by one number
    more.

    Args:
        labels: With a metric.
        values_NC: Probabilities of models that did not train on the row.
        targets_NC: What Labels.targets gives.
    """
    rare_C = -np.log((targets_NC.sum(0) + 1) / (len(targets_NC) + 1))
    rare_C -= rare_C.min()
    lower = LOWER if labels.kind == "several" else LOWER[:1]
    tried = [tuple((added + share * rare_C).tolist()) for share, added in product(SHARES, lower)]
    return min(tried, key=lambda shift: ensembles.cost(labels, labels.moved(values_NC, shift), targets_NC))


def in_words(labels: Labels, shift: tuple[float, ...]) -> str:
    """The rule for a person: its farthest classes."""
    if labels.kind == "several":
        threshold_C = 1 / (1 + np.exp(shift))
        return f"A class is given from the probability {_some(labels, threshold_C, threshold_C, '{:.2f}')}."
    return (
        f"Before the largest is taken, probabilities are multiplied: {_some(labels, np.exp(shift), shift, '{:.1f}')}."
    )


def _some(labels: Labels, said_C: Floats, order_C: Floats | tuple[float, ...], form: str) -> str:
    order = np.argsort(order_C, kind="stable")
    shown = order if len(order) <= 4 else [*order[:2], *order[-2:]]
    words = [f"`{labels.names[place]}` {form.format(said_C[place])}" for place in shown]
    return ", ".join(words[:2] + ["..."] * (len(order) > 4) + words[2:])
