"""A table of predictions read back: its classes, which rows are right, sure or in doubt, and which labels are suspect.

A label is taken to be wrong with a probability that all rows share, and then to be any other class with equal
probability. That share and a temperature are fitted to the labels as they are, and give the probability that each
label is right. cleanlab's confident learning (Northcutt et al. 2021) counts a wrong label wherever a model is surer of
another class than it mostly is, and so counts the model's own mistakes where these are many. The rule here was
preferred on one seed of Banking77 with planted labels; scripts/bench/label_noise.py repeats that. Both rank rows by
the probability of their label.

Legend: N rows, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

if TYPE_CHECKING:
    import pandas as pd

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]
LEAST_PROBABILITY = 1e-12  # lowest probability that has a logarithm here
BOUNDS = ((np.log(0.05), np.log(20.0)), (-12.0, 0.0))
"""Bounds of the logarithm of the temperature, and of the log-odds of a wrong label: half of the labels at most."""


@dataclass(frozen=True)
class RowRanking:
    """How right and how sure each prediction of a table is (N,)."""

    right_N: Mask
    """Whether every class is right; for a number, whether its error is at most the median error."""
    sure_N: Floats
    """Probability of the prediction; distance of the class furthest off where there are several; error of a number."""
    doubt_N: Floats
    """1 where two classes are equally likely, 0 where one is certain; zeros for numbers."""
    is_distance: bool = False
    """Whether `sure_N` measures how far off a row is, as for numbers and several classes."""

    @property
    def mistakes(self) -> list[int]:
        """Wrong rows, the surest (or those with the largest error) first."""
        wrong = np.flatnonzero(~self.right_N)
        return [int(row) for row in wrong[np.argsort(-self.sure_N[wrong], kind="stable")]]

    @property
    def right(self) -> list[int]:
        """Rows that are right, the best first."""
        right = np.flatnonzero(self.right_N)
        return [int(row) for row in right[np.argsort(-self.example_N[right], kind="stable")]]

    @property
    def example_N(self) -> Floats:
        """How good an example each row is: the surer, or for right rows with a distance the closer, the better."""
        return np.where(self.right_N & self.is_distance, -self.sure_N, self.sure_N)

    @property
    def uncertain(self) -> list[int]:
        """Rows that are in doubt, the most doubtful first."""
        return [int(row) for row in np.argsort(-self.doubt_N, kind="stable") if self.doubt_N[row] > 0]


def log_losses(table: pd.DataFrame) -> Floats | None:
    """Negative logarithm of the probability of each row's label (N,), in nats; None where that is not one class."""
    names = class_names(table)
    if not names or isinstance(table["label"].iloc[0], (tuple, list, np.ndarray)):
        return None
    p_NC = table[[f"p_{name}" for name in names]].to_numpy(np.float64)
    label_N = hot(table["label"], names).argmax(1)
    return np.asarray(-np.log(np.maximum(p_NC[np.arange(len(table)), label_N], LEAST_PROBABILITY)), dtype=np.float64)


def suspects(table: pd.DataFrame) -> dict[int, str]:
    """Rows whose label is probably wrong, the most suspect first, each with the class that it more likely has.

    The predictions must be out of fold. Empty where labels are numbers or several classes.
    """
    names = class_names(table)
    if not names or isinstance(table["label"].iloc[0], (tuple, list, np.ndarray)):
        return {}
    label_N = hot(table["label"], names).argmax(1).astype(np.int64)
    class_by_row = suspected(table[[f"p_{name}" for name in names]].to_numpy(np.float64), label_N)
    return {row: names[other] for row, other in class_by_row.items()}


def suspect_table(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `suspects` as a table.

    Columns: row and its content, label, the class `suggested` instead, `self_confidence`, the probability of the
    label, and `score`, the probability that the label is right, below 0.5.
    """
    suggestions, names = suspects(table), class_names(table)
    shown = table.loc[list(suggestions), [name for name in ("row", "text", "image", "audio", "label") if name in table]]
    if not suggestions:
        return shown.assign(suggested=shown["label"], self_confidence=[], score=[])
    p_NC = table[[f"p_{name}" for name in names]].to_numpy(np.float64)
    label_N = hot(table["label"], names).argmax(1).astype(np.int64)
    rows = np.asarray(list(suggestions))
    return shown.assign(
        suggested=list(suggestions.values()),
        self_confidence=p_NC[rows, label_N[rows]],
        score=label_quality(p_NC, label_N)[rows],
    )


def ranked(table: pd.DataFrame) -> RowRanking:
    """Rank the labelled rows of a table that `classification_scores.predictions_table` made."""
    names = class_names(table)
    if not names:
        off_N = (table["predicted"] - table["label"]).abs().to_numpy(np.float64)
        return RowRanking(off_N <= np.median(off_N), off_N, np.zeros(len(table)), is_distance=True)
    true_NC, predicted_NC = (hot(table[column], names) for column in ("label", "predicted"))
    p_NC = table[[f"p_{name}" for name in names]].to_numpy(np.float64)
    right_N = (true_NC == predicted_NC).all(1)
    if isinstance(table["label"].iloc[0], (tuple, list, np.ndarray)):
        off_N, doubt_N = np.abs(p_NC - true_NC).max(1), 1 - 2 * np.abs(p_NC - 0.5).min(1)
        return RowRanking(right_N, off_N, doubt_N, is_distance=True)
    first_NC = -np.sort(-p_NC, axis=1)
    return RowRanking(right_N, first_NC[:, 0], 1 - (first_NC[:, 0] - first_NC[:, 1]))


def class_names(table: pd.DataFrame) -> list[str]:
    """The classes of a table of predictions; none for numbers."""
    return [column.removeprefix("p_") for column in table if column.startswith("p_")]


def hot(cells: pd.Series, names: list[str]) -> Mask:
    """Which classes each cell of a column names (N, C)."""
    rows = [set(cell) if isinstance(cell, (tuple, list, np.ndarray)) else {cell} for cell in cells]
    return np.asarray([[name in row for name in names] for row in rows])


def suspected(p_NC: Floats, label_N: Classes) -> dict[int, int]:
    """Rows whose label is more likely wrong than right, the most suspect first, with the class each more likely has.
    `p_NC`: probabilities of each class, out of fold: a model is sure of the labels that it was trained on. `label_N`:
    the class that each row is labelled with."""
    right_N = label_quality(p_NC, label_N)
    known_C = np.bincount(label_N, minlength=p_NC.shape[1]) > 0
    likeliest_N = np.where(known_C, p_NC, -1.0).argmax(1)
    order = np.argsort(right_N, kind="stable")
    return {int(row): int(likeliest_N[row]) for row in order if right_N[row] < 0.5 and likeliest_N[row] != label_N[row]}


def label_quality(p_NC: Floats, label_N: Classes) -> Floats:
    """Probability that each label is right (N,).

    With share e of wrong labels and own probability q at the fitted temperature, a row has its label with probability
    (1 - e) q + e (1 - q) / (C - 1), of which the first part is right.
    """
    known_C, own_N = np.unique(label_N, return_inverse=True)
    logits_NC = np.log(np.maximum(p_NC[:, known_C], LEAST_PROBABILITY))
    if len(known_C) < 2:
        return np.ones(len(p_NC))

    def parts(at: Floats) -> tuple[Floats, Floats]:
        wrong = float(special.expit(at[1]))
        log_q_NC = special.log_softmax(logits_NC / np.exp(at[0]), axis=1)
        q_N = np.exp(log_q_NC[np.arange(len(own_N)), own_N])
        return (1 - wrong) * q_N, wrong * (1 - q_N) / (len(known_C) - 1)

    def loss(at: Floats) -> float:
        return -float(np.log(np.maximum(sum(parts(at)), LEAST_PROBABILITY)).mean())

    optimum = optimize.minimize(loss, np.array([-0.5, -2.0]), method="L-BFGS-B", bounds=BOUNDS)
    right_N, wrong_N = parts(optimum.x)
    quality_N: Floats = right_N / np.maximum(right_N + wrong_N, LEAST_PROBABILITY)
    return quality_N
