"""The section of a page on classes: table of classes, confusions, surest mistakes and the training rows beside them.

Legend: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.evaluation.prediction_table import class_names, hot, suspects
from workbench.report.rendering import begins
from workbench.report.run_record import RunRecord
from workbench.runs import units

WIDEST = 30
"""Classes of a confusion matrix that a page has room for."""
PAIRS = 10
"""Confusions that are listed."""
MISTAKES = 6
SUSPECTS = 20
"""Rows of text whose label is probably wrong."""
LONGEST = 200
"""Characters of the text of such a row."""
LONGEST_NEIGHBOUR = 160
"""Characters of the text or name of a similar training row."""


class Cell(NamedTuple):
    """A cell of the confusion matrix: how many rows of one class were predicted as another, and which share of them."""

    rows: int
    share: float


class Suspect(NamedTuple):
    """A row whose label is probably wrong, by adapters that did not train on it."""

    row: str
    text: str
    label: str
    suggested: str
    sure: str
    """Probability of the label that is suggested."""


class Neighbour(NamedTuple):
    """A training row that is like another row."""

    place: str
    text: str
    """Beginning of its text, or the name of its picture."""
    label: str
    similarity: str
    """Cosine similarity of features by the frozen backbone."""


@dataclass(frozen=True)
class ClassSection:
    """The part of the page; a part that does not apply is empty."""

    classes: list[tuple[str, str, str, str, str]]
    """Name, precision, recall, F1 and rows of each class."""
    matrix: list[tuple[str, list[Cell]]]
    """True class to what its rows were taken for, in the order of `classes`; empty for several classes or too many."""
    confused: list[tuple[str, str, str]]
    """True class, class that its rows were taken for, how many of them."""
    mistakes: list[dict[str, Any]]
    """Rows that are wrong, the surest first, or numbers that are furthest off."""
    suspects: list[Suspect] = field(default_factory=list)
    """Rows whose label is probably wrong, the most suspect first; only of a cross-validation."""


def classified(run: RunRecord) -> ClassSection | None:
    """The section on classes; None where the run classified nothing."""
    table = run.labelled
    if "predicted" not in table or run.tags:
        return None
    names = class_names(table)
    if not names:
        off_N = (table["predicted"] - table["label"]).abs()
        return ClassSection([], [], [], _samples(run, table, off_N, lambda off: f"off by {units.number(off)}"))
    from sklearn import metrics  # half a second, for runs that have classes

    true_NC, predicted_NC = (hot(table[column], names) for column in ("label", "predicted"))
    p_NC = table[[f"p_{name}" for name in names]].to_numpy()
    several = isinstance(table["label"].iloc[0], (list, np.ndarray))
    wrong_N = (true_NC != predicted_NC).any(1)
    sure_N = pd.Series(np.abs(p_NC - true_NC).max(1) if several else p_NC.max(1), index=table.index)
    mistakes = _samples(run, table[wrong_N], sure_N[wrong_N], "{:.2f}".format)
    class_scores = metrics.precision_recall_fscore_support(true_NC, predicted_NC, zero_division=0.0)
    classes = [
        (name, f"{precision:.2f}", f"{recall:.2f}", f"{f1:.2f}", f"{int(rows):,}")
        for name, precision, recall, f1, rows in zip(names, *class_scores, strict=True)
    ]
    if several:
        return ClassSection(classes, [], [], mistakes)
    counts_CC = true_NC.T.astype(np.int64) @ predicted_NC.astype(np.int64)
    wrong_CC = counts_CC * (1 - np.eye(len(names), dtype=np.int64))
    most_wrong = [divmod(int(flat), len(names)) for flat in np.argsort(-wrong_CC, axis=None, kind="stable")[:PAIRS]]
    doubted = list(suspects(table).items()) if run.crossvalidates and "text" in table else []
    return ClassSection(
        classes=classes,
        matrix=[
            (name, [Cell(int(count), float(count / max(counts_C.sum(), 1))) for count in counts_C])
            for name, counts_C in zip(names, counts_CC, strict=True)
            if len(names) <= WIDEST
        ],
        confused=[
            (names[true], names[predicted], f"{wrong_CC[true, predicted]:,} of {counts_CC[true].sum():,}")
            for true, predicted in most_wrong
            if wrong_CC[true, predicted]
        ],
        mistakes=mistakes,
        suspects=[
            Suspect(
                row=table.at[number, "row"],
                text=begins(table.at[number, "text"], LONGEST),
                label=table.at[number, "label"],
                suggested=suggested,
                sure=f"{table.at[number, f'p_{suggested}']:.2f}",
            )
            for number, suggested in doubted[:SUSPECTS]
        ],
    )


def verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence, from its numbers."""
    before, after = run.scores["before"], run.scores["after"]
    rows = f"{len(run.predictions):,} held-out rows"
    if run.judge is not None and (name := run.judge.name) in after:
        interval = f" (95 %: {run.interval(name)})" if run.interval(name) else ""
        sentence = f"{run.judge.title} {units.number(after[name])}{interval} on {rows}"
        return sentence + (f"; always saying the same gives {units.number(before[name])}." if name in before else ".")
    if "accuracy" in after:
        sentence = f"Accuracy {after['accuracy']:.3f} (95 %: {run.interval('accuracy')}) on {rows}"
        return f"{sentence}; always naming the likeliest class gives {before['accuracy']:.3f}."
    if "micro_f1" in after:
        return (
            f"Micro-F1 {after['micro_f1']:.3f} on {rows}; {after['exact_match']:.3f} of them are right in every class."
        )
    sentence = f"Root mean squared error {units.number(after['rmse'])} on {rows}"
    return f"{sentence}; always naming the training rows' mean gives {units.number(before['rmse'])}."


def never_predicted(run: RunRecord) -> list[tuple[str, int]]:
    """Classes that rows have and no prediction names, with their rows; none where the run predicts numbers."""
    table = run.labelled
    names = class_names(table) if "predicted" in table and not run.tags else []
    if not names:
        return []
    true_C, predicted_C = (hot(table[column], names).sum(0) for column in ("label", "predicted"))
    return [
        (name, int(rows)) for name, rows, count in zip(names, true_C, predicted_C, strict=True) if rows and not count
    ]


def neighbours(run: RunRecord) -> Mapping[str, list[Neighbour]]:
    """The training rows that are nearest to each row that has some, by its place, the nearest first."""
    by_row: dict[str, list[Neighbour]] = {}
    for each in () if run.neighbours.empty else run.neighbours.itertuples():
        text = begins(each.text, LONGEST_NEIGHBOUR)
        by_row.setdefault(each.row, []).append(Neighbour(each.neighbour, text, each.label, f"{each.similarity:.2f}"))
    return by_row


def in_words(cell: Any) -> str:
    """A label or a prediction in words."""
    if isinstance(cell, (list, np.ndarray)):
        return ", ".join(cell) or "(none)"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _samples(run: RunRecord, table: pd.DataFrame, by: pd.Series, shown: Any) -> list[dict[str, Any]]:
    """The rows of the highest `by`, which `shown` puts in words."""
    near = neighbours(run)
    title = next(name for name in ("text", "image", "audio") if name in table)
    return [
        {
            "row": table.at[at, "row"],
            "text": table.at[at, title],
            "label": in_words(table.at[at, "label"]),
            "predicted": in_words(table.at[at, "predicted"]),
            "sure": shown(by[at]),
            "near": near.get(table.at[at, "row"], []),
        }
        for at in by.sort_values(ascending=False, kind="stable").index[:MISTAKES]
    ]
