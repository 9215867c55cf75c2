"""Two models on the same rows: the mean difference of a score, its interval, and how likely chance makes it so large.

Legend: S rows that both have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.evaluation import prediction_table

Floats = npt.NDArray[np.float64]
CONTENT = ("row", "prompt", "text", "rejected", "image", "reference", "label")
"""Columns of a table of predictions by which a row is known: where it stands and what it holds."""


@dataclass(frozen=True)
class PairedScore:
    """A score of two models over the rows that both have."""

    name: str
    rows: int
    first: float
    second: float
    """Means of the score over the rows."""
    interval: tuple[float, float] | None
    """Student's 95 % interval of second - first; None where no row differs."""
    p: float | None
    """Probability of a difference of this size or more where there is none; None where no row differs."""

    @property
    def difference(self) -> float:
        """second - first."""
        return self.second - self.first


def compare(first: pd.DataFrame, second: pd.DataFrame) -> list[PairedScore]:
    """Scores of two tables of predictions (`predictions.parquet`) over the rows that are in both.

    Where a row is right or wrong, p is that of the exact test of McNemar (1947), else that of Student's paired t-test.
    """
    ours, theirs = _by_row(first), _by_row(second)
    same = ours.index.intersection(theirs.index)
    if len(same) < 2:
        return []
    names = [name for name in ours if name in theirs]
    return [paired(name, ours.loc[same, name].to_numpy(), theirs.loc[same, name].to_numpy()) for name in names]


def interval(difference_S: Floats) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean difference; None below two rows, or where all differ alike."""
    count = len(difference_S)
    error = float(difference_S.std(ddof=1)) / count**0.5 if count > 1 else 0.0
    if error == 0:  # as where no answer changed: of other rows this says nothing
        return None
    from scipy import stats  # half a second, and most pages compare nothing

    bound = float(stats.t.ppf(0.975, count - 1)) * error
    return float(difference_S.mean()) - bound, float(difference_S.mean()) + bound


def tested(difference: float, error: float, count: int) -> tuple[tuple[float, float] | None, float | None]:
    """Student's 95 % interval of a difference over `count` rows that has this standard error, and p; None where it has
    none."""
    if count < 2 or error == 0:
        return None, None
    from scipy import stats

    bound = float(stats.t.ppf(0.975, count - 1)) * error
    return (difference - bound, difference + bound), float(2 * stats.t.sf(abs(difference) / error, count - 1))


def paired(name: str, first_S: Floats, second_S: Floats) -> PairedScore:
    """A score `name` of two models over rows that both have; p as `compare` says."""
    difference_S = second_S - first_S
    bounds = interval(difference_S)
    means = float(first_S.mean()), float(second_S.mean())
    return PairedScore(name, len(first_S), *means, bounds, None if bounds is None else _p(difference_S, first_S))


def _p(difference_S: Floats, first_S: Floats) -> float:
    from scipy import stats

    if np.isin(first_S, (0, 1)).all() and np.isin(difference_S, (-1, 0, 1)).all():
        gained, lost = int((difference_S > 0).sum()), int((difference_S < 0).sum())
        return float(stats.binomtest(gained, gained + lost).pvalue)
    return float(stats.ttest_1samp(difference_S, 0).pvalue)


def _by_row(table: pd.DataFrame) -> pd.DataFrame:
    """Scores of a table, by what each row is; rows that stand there twice are left out."""
    if "row" not in table:
        return pd.DataFrame()
    keys = [[_plain(cell) for cell in table[name]] for name in CONTENT if name in table]
    scores = pd.DataFrame(_scores(table))
    scores.index = pd.Index(list(zip(*keys, strict=True)), tupleize_cols=False)
    return scores[~scores.index.duplicated(keep=False)]


def _scores(table: pd.DataFrame) -> dict[str, Floats]:
    """Scores of each row (N,), by their name in scores.json."""
    if "f1_after" in table:
        return {"f1": _floats(table["f1_after"]), "rouge_l": _floats(table["rouge_l_after"])}
    if "reward_after" in table:
        return {"reward": _floats(table["reward_after"])}
    if "margin" in table:
        return {"accuracy": _floats(table["margin"] > 0), "margin": _floats(table["margin"])}
    if "right" in table:
        return {"accuracy": _floats(table["right"])}
    if "label" not in table or "predicted" not in table:
        return {}
    if not prediction_table.class_names(table):
        return {"absolute_error": _floats((table["predicted"] - table["label"]).abs())}
    return {"accuracy": _floats(prediction_table.ranked(table).right_N)}


def _floats(column: npt.ArrayLike) -> Floats:
    return np.asarray(column, dtype=np.float64)


def _plain(cell: object) -> object:
    """A cell that can be compared; classes of a row in any order."""
    return tuple(sorted(map(str, cell))) if isinstance(cell, (list, tuple, np.ndarray)) else cell
