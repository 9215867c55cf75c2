"""A table of predictions read back: its classes, and which of its rows are right, sure or in doubt.

Legend: N rows, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from workbench.evaluation import label_issues

if TYPE_CHECKING:
    import pandas as pd

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowRanking:
    """How each row of a table went (N,)."""

    right_N: Mask
    """Whether every class is right; for a number, whether its error is at most the median one."""
    sure_N: Floats
    """Probability of the prediction; of the class that is furthest off where there are several; error of a number."""
    doubt_N: Floats
    """1 where two classes are equally likely, 0 where one is certain; zeros for numbers, which say nothing of it."""
    is_distance: bool = False
    """Whether `sure_N` tells how far off a row is, as for numbers and several classes."""

    @property
    def mistakes(self) -> list[int]:
        """Rows that are wrong, the surest first; of numbers all, the largest error first."""
        wrong = np.flatnonzero(~self.right_N)
        return [int(row) for row in wrong[np.argsort(-self.sure_N[wrong], kind="stable")]]

    @property
    def right(self) -> list[int]:
        """Rows that are right, the best first."""
        right = np.flatnonzero(self.right_N)
        return [int(row) for row in right[np.argsort(-self.example_N[right], kind="stable")]]

    @property
    def example_N(self) -> Floats:
        """How good an example each row is: of a mistake the surer, of a right row the surer or the closer."""
        return np.where(self.right_N & self.is_distance, -self.sure_N, self.sure_N)

    @property
    def uncertain(self) -> list[int]:
        """Rows in the order of their doubt, the greatest first; none where all are sure."""
        order = np.argsort(-self.doubt_N, kind="stable")
        return [int(row) for row in order if self.doubt_N[row] > 0]


def suspects(table: pd.DataFrame) -> dict[int, str]:
    """Rows whose label is probably wrong, the most suspect first, each with the class that it is rather of.

    Predictions are to be out of fold.

    None where a row has a number or several classes.
    """
    names = class_names(table)
    if not names or isinstance(table["label"].iloc[0], (tuple, list, np.ndarray)):
        return {}
    label_N = hot(table["label"], names).argmax(1).astype(np.int64)
    class_by_row = label_issues.suspected(table[[f"p_{name}" for name in names]].to_numpy(np.float64), label_N)
    return {row: names[other] for row, other in class_by_row.items()}


def suspect_table(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `suspects` as a table, a row of it each.

    Columns: row and what it holds, label, the class `suggested` instead, `self_confidence`, the probability of the
    label, and `score`, the probability that the label is right, below 0.5.
    """
    suggestions, names = suspects(table), class_names(table)
    shown = table.loc[list(suggestions), [name for name in ("row", "text", "image", "label") if name in table]]
    if not suggestions:
        return shown.assign(suggested=shown["label"], self_confidence=[], score=[])
    p_NC = table[[f"p_{name}" for name in names]].to_numpy(np.float64)
    label_N = hot(table["label"], names).argmax(1).astype(np.int64)
    rows = np.asarray(list(suggestions))
    return shown.assign(
        suggested=list(suggestions.values()),
        self_confidence=p_NC[rows, label_N[rows]],
        score=label_issues.label_quality(p_NC, label_N)[rows],
    )


def ranked(table: pd.DataFrame) -> RowRanking:
    """Rank the labelled rows of a table as `row_outputs.table` makes it."""
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
    """Which classes a column names (N, C)."""
    rows = [set(cell) if isinstance(cell, (tuple, list, np.ndarray)) else {cell} for cell in cells]
    return np.asarray([[name in row for name in names] for row in rows])
