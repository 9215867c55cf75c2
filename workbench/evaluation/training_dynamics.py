"""Training dynamics of rows: how sure the model became of each row, how steadily, and what it forgot.

Swayamdipta et al. 2020, "Dataset Cartography"; forgetting events by Toneva et al. 2019. A visit records the loss of a
row in the step that trains on it: one visit per epoch, each at another point of the training.

Legend: N rows, V visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.data.batching import Examples
from workbench.data.labelled.class_sampling import RepeatedRows
from workbench.evaluation.prediction_table import class_names, ranked
from workbench.runs import files
from workbench.training.row_losses import Visits

FILE = "dynamics.parquet"
HARDEST = 12  # rows that reports show
Floats = npt.NDArray[np.float64]


def write(folder: Path, visits: Visits, train: Examples, text: Callable[[int], str] | None = None) -> None:
    """Write dynamics.parquet into a run directory: `table` with the place of each row. `text`: gives the text of a row
    by number, for a column with the texts of the hardest rows; None: no column."""
    if isinstance(train, RepeatedRows):
        visits = visits._replace(row=train.row_of(visits.row.astype(np.int64)).astype(np.int32))
    dynamics_table = table(visits)
    number_N = dynamics_table.pop("number").astype(int)
    dynamics_table.insert(0, "row", [train.place(number) for number in number_N])
    if text is not None:
        dynamics_table["text"] = number_N[hardest(dynamics_table).index].map(text)
    files.write_bytes(folder / FILE, dynamics_table.to_parquet(index=False))


def table(visits: Visits) -> pd.DataFrame:
    """One line for each visited row, in the order of their numbers.

    Columns: number; visits; first_loss and last_loss, in nats; confidence, the mean probability of its labels over
    its visits, and variability, its standard deviation; correctness, the mean share of its labels that were the
    likeliest; forgotten, how often it was all right at one visit and not at the next; losses, one for each visit.
    """
    order = np.lexsort((visits.step, visits.row))
    row_V, loss_V = visits.row[order], visits.loss[order]
    p_V, right_V = (each[order].astype(np.float64) for each in (visits.probability, visits.right))
    number_N, start_N, count_N = np.unique(row_V, return_index=True, return_counts=True)
    at_V = np.repeat(np.arange(len(number_N)), count_N)
    mean_N = np.bincount(at_V, p_V) / count_N
    same_V = at_V[1:] == at_V[:-1]
    lost_V = same_V & (right_V[:-1] == 1) & (right_V[1:] < 1)
    return pd.DataFrame(
        {
            "number": number_N,
            "visits": count_N,
            "first_loss": loss_V[start_N],
            "last_loss": loss_V[start_N + count_N - 1],
            "confidence": mean_N,
            "variability": np.sqrt(np.bincount(at_V, (p_V - mean_N[at_V]) ** 2) / count_N),
            "correctness": np.bincount(at_V, right_V) / count_N,
            "forgotten": np.bincount(at_V[:-1][lost_V], minlength=len(number_N)),
            "losses": np.split(loss_V, start_N[1:]) if len(number_N) else [],
        }
    )


def write_combined(folder: Path, members: Sequence[Path], out_of_fold: pd.DataFrame) -> None:
    """Write dynamics.parquet of several adapters that trained on overlapping rows: means and sums.

    The first of `losses` is the mean loss of the adapters' first visits, and so on. Where rows have classes, the column
    right_out_of_fold is the share of the repeats in which the out-of-fold prediction of a row is its label.

    Args:
        members: Folders of the adapters; those without such a file are left out.
        out_of_fold: The table of out_of_fold.parquet.
    """
    tables = [pd.read_parquet(member / FILE) for member in members if (member / FILE).exists()]
    nonempty_tables = [each for each in tables if len(each)]
    if not nonempty_tables:
        return
    every = pd.concat(nonempty_tables, ignore_index=True)
    grouped = every.groupby("row", sort=False)
    means = grouped[["first_loss", "last_loss", "confidence", "variability", "correctness"]].mean()
    sums = grouped[["visits", "forgotten"]].sum()
    code_M, rows = pd.factorize(every["row"])
    count_M = every["losses"].map(len).to_numpy()
    visit_V = np.concatenate([np.arange(count) for count in count_M])
    mean = pd.Series(np.concatenate(every["losses"].tolist())).groupby([np.repeat(code_M, count_M), visit_V]).mean()
    ends = mean.groupby(level=0).size().cumsum()
    whole = sums.join(means).assign(
        adapters=grouped.size(), losses=pd.Series(np.split(mean.to_numpy(), ends[:-1]), index=rows)
    )
    if class_names(out_of_fold):
        right = pd.Series(ranked(out_of_fold).right_N, index=out_of_fold["row"]).groupby(level=0).mean()
        whole = whole.assign(right_out_of_fold=right.reindex(whole.index))
    files.write_bytes(folder / FILE, whole.reset_index().to_parquet(index=False))


def never_learned(table: pd.DataFrame) -> pd.DataFrame:
    """Rows none of whose labels was ever the likeliest, in two visits or more; least probable first."""
    return table[(table["correctness"] == 0) & (table["visits"] > 1)].sort_values("confidence", kind="stable")


def unlearnable(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that were never learned in training and are wrong out of fold in every repeat; empty without folds."""
    never = never_learned(table)
    return never[never["right_out_of_fold"] == 0] if "right_out_of_fold" in never else never.head(0)


def hardest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose labels stayed least probable, least probable first."""
    return table.sort_values("confidence", kind="stable").head(HARDEST)
