"""Scores of a frozen backbone alone, before anything trains, and the training rows that are most like other rows.

Legend: T training rows and M other rows that are looked at, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from workbench.config import ModelConfig, RunConfig
from workbench.config.model_heads import ModelHead
from workbench.data.batching import Indices
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.records import RowReader
from workbench.errors import WorkbenchError
from workbench.evaluation.features import Floats, Probe, probe
from workbench.evaluation.frozen_features import are_known, frozen_features
from workbench.evaluation.prediction_table import ranked, suspects
from workbench.models import backbones, model_files
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.distributed.placement import Placement

if TYPE_CHECKING:
    import pandas as pd

FILE, NEIGHBOURS_FILE = "probe.json", "neighbours.parquet"
"""In a run directory: scores of the frozen backbone; training rows that are nearest to rows worth looking at."""
NEIGHBOURS = 3
"""Training rows that are shown beside a row."""
EXPLAINED = 24
"""Mistakes, and suspected labels, that are shown beside training rows."""
SHARE = 0.08
"""Rows that are looked at before a run, as a share of those that its steps read: a step costs three passes or more."""
LEAST, MOST = 64, 4000
"""Fewer rows tell nothing; more take long to compare."""
LARGEST = 500_000_000
"""Parameters of a backbone from which loading it once more is no small thing."""
CHECK_WORK = {"cpu": 2e12, "cuda": 1e15}
"""Floating-point operations of some seconds, by device, that `check` may do."""
_COLUMNS = ("row", "neighbour", "text", "label", "similarity")


class Look(Protocol):
    """Compares rows by what the frozen backbone makes of them."""

    def __call__(self, *, most: int) -> FrozenProbe:
        """Look at so many of the rows."""


@dataclass(frozen=True)
class FrozenProbe:
    """Training rows and others as the frozen backbone sees them."""

    model: ModelConfig
    reader: RowReader
    train: LabelledSet
    others: LabelledSet
    """Held-out rows; of a cross-validation the training rows once more."""
    train_T: Indices
    """Numbers of the rows of `train` that are looked at."""
    others_M: Indices
    train_TD: Floats
    others_MD: Floats
    fold_N: Indices
    """Fold of each row of `train`: rows of the same fold are not compared."""
    other_fold_N: Indices
    """Fold of each row of `others`; held-out rows have one of their own."""

    def scores(self) -> Probe | None:
        """Shares of the rows of the last fold that the others tell right.

        None where a row has not one class, or there is nothing to compare.
        """
        seen_T, asked_M = self._scored()
        train = [self.train.labels[row] for row in self.train_T[seen_T]]
        others = [self.others.labels[row] for row in self.others_M[asked_M]]
        names = [label for label in (*train, *others) if isinstance(label, str)]
        if len(names) < len(train) + len(others) or len(set(train)) < 2 or not others:
            return None
        return probe(self.train_TD[seen_T], names[: len(train)], self.others_MD[asked_M], names[len(train) :])

    def _scored(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Training rows that are not of the last fold (T,), and other rows that are (M,)."""
        last = self.other_fold_N.max()
        return self.fold_N[self.train_T] != last, self.other_fold_N[self.others_M] == last

    @property
    def facts(self) -> dict[str, Any]:
        """For FILE: rows that were scored, what came of it, and rows among which neighbours are found, of all."""
        probe_scores, (seen_T, asked_M) = self.scores(), self._scored()
        counts = {
            "train": int(seen_T.sum()),
            "others": int(asked_M.sum()),
            "compared": len(self.train_T),
            "rows": len(self.train),
        }
        return counts | ({} if probe_scores is None else probe_scores._asdict())

    def neighbours(self, rows: Sequence[int]) -> list[tuple[int, int, float]]:
        """Some of the other rows, each with its nearest training rows of other folds and their cosine similarities.

        The mean of the training rows is taken from all features: it is the same for all, and would make all alike.

        Args:
            rows: Numbers of other rows.
        """
        (others_XD,) = frozen_features(self.model, self.reader, [self.others.inputs.take(np.asarray(rows, np.int64))])
        centre_D = self.train_TD.mean(0)
        similarity_XT = _unit(others_XD - centre_D) @ _unit(self.train_TD - centre_D).T
        matches = []
        for row, similarity_T in zip(rows, similarity_XT, strict=True):
            similarity_T[self.fold_N[self.train_T] == self.other_fold_N[row]] = -np.inf
            for nearest in np.argsort(-similarity_T, kind="stable")[:NEIGHBOURS]:
                if similarity_T[nearest] > -np.inf:
                    matches.append((int(row), int(self.train_T[nearest]), float(similarity_T[nearest])))
        return matches

    def write_neighbours(self, folder: Path, table: pd.DataFrame, *, out_of_fold: bool = False) -> LabelledSet:
        """Write NEIGHBOURS_FILE into a run directory; returns the training rows that it names.

        Args:
            table: Predictions of `others`, in their order.
            out_of_fold: Whether adapters made them that did not train on the rows, so that labels may be suspected.
        """
        import pandas as pd  # 0.2 s, which the first step need not wait for

        from workbench.evaluation.thumbnails import label_in_words

        wanted = [*ranked(table).mistakes[:EXPLAINED], *(list(suspects(table))[:EXPLAINED] if out_of_fold else [])]
        matches: list[tuple[int, int, float]] = []
        if wanted:
            with suppress(WorkbenchError, torch.OutOfMemoryError):  # the run is done; it does not fail for a neighbour
                matches = self.neighbours(list(dict.fromkeys(wanted)))
        lines = [
            (
                self.others.place(row),
                self.train.place(nearest),
                self.reader.describe(self.train.records[nearest]),
                label_in_words(self.train.labels[nearest]),
                similarity,
            )
            for row, nearest, similarity in matches
        ]
        files.write_bytes(folder / NEIGHBOURS_FILE, pd.DataFrame(lines, columns=list(_COLUMNS)).to_parquet())
        return self.train.subset(np.unique(np.asarray([nearest for _, nearest, _ in matches], dtype=np.int64)))


def of_splits(
    config: RunConfig, reader: RowReader, train: LabelledSet, held_out: LabelledSet, *, most: int
) -> FrozenProbe:
    """Look at training and held-out rows, `most` in all, or all whose features are known.

    The training rows get what the held-out ones leave of `most`.
    """
    folds = np.zeros(len(train), dtype=np.int64), np.ones(len(held_out), dtype=np.int64)
    if len(train) + len(held_out) <= MOST and are_known(config.model, reader, [train.inputs, held_out.inputs]):
        most = MOST
    others_M = _some(len(held_out), max(1, most // 2), config.seed)
    train_T = _some(len(train), max(1, most - len(others_M)), config.seed)
    inputs = [train.inputs.take(train_T), held_out.inputs.take(others_M)]
    train_TD, others_MD = frozen_features(config.model, reader, inputs)
    return FrozenProbe(config.model, reader, train, held_out, train_T, others_M, train_TD, others_MD, *folds)


def of_folds(config: RunConfig, reader: RowReader, rows: LabelledSet, fold_N: Indices, *, most: int) -> FrozenProbe:
    """Look at `most` of the rows of a cross-validation, or all whose features are known.

    Each is compared with those of other folds.
    """
    if len(rows) <= MOST and are_known(config.model, reader, [rows.inputs]):
        most = MOST
    rows_T = _some(len(rows), most, config.seed)
    (found_TD,) = frozen_features(config.model, reader, [rows.inputs.take(rows_T)])
    return FrozenProbe(config.model, reader, rows, rows, rows_T, rows_T, found_TD, found_TD, fold_N, fold_N)


def rows_before_run(config: RunConfig, task: ModelHead, *, visits: int | None) -> int:
    """How many rows a run looks at besides its training; 0 for none.

    Args:
        visits: Rows that all of its steps read; None where a budget alone limits it.
    """
    if config.evaluate.probe != "auto":
        return config.evaluate.probe
    rows = 0 if visits is None else min(MOST, int(SHARE * visits))
    return rows if rows >= LEAST and _parameters(config, task) <= LARGEST else 0


def rows_in_check(config: RunConfig, task: ModelHead, lengths: Indices) -> int:
    """How many rows `check` looks at, in seconds; 0 for none, as where it would have to fetch weights.

    Args:
        lengths: Tokens or patches of each row.
    """
    if config.evaluate.probe != "auto":
        return config.evaluate.probe
    if not model_files.are_here(config.model):
        return 0
    parameters, work = _parameters(config, task), CHECK_WORK.get(backbones.device().type, CHECK_WORK["cuda"])
    rows = min(MOST, int(work / (2 * parameters * float(lengths.mean()))))
    return rows if rows >= LEAST and parameters <= LARGEST else 0


def before_run(
    config: RunConfig, run: Run, task: ModelHead, look: Look, *, visits: int | None, say: Callable[[str], None]
) -> FrozenProbe | None:
    """Look at rows in a small share of the run's time, write FILE and tell it; None where nobody looks.

    Args:
        visits: See `rows_before_run`.
    """
    probes = Placement(config.distributed, run.ranks).probes
    most = rows_before_run(config, task, visits=visits) if probes else 0
    if not most:
        return None
    frozen_probe = look(most=most)
    facts = frozen_probe.facts
    files.write_json(run.path / FILE, facts)
    if text := sentence(facts):
        say(text)
    return frozen_probe


def in_check(config: RunConfig, task: ModelHead, lengths: Indices, look: Look) -> str:
    """FILE in words, of rows that `check` looks at; empty where it looks at none."""
    most = rows_in_check(config, task, lengths)
    return sentence(look(most=most).facts) if most else ""


def sentence(facts: Mapping[str, Any], *, after: float | None = None) -> str:
    """FILE in words; empty where there is nothing to tell.

    Args:
        after: Accuracy of the run.
    """
    if "linear" not in facts:
        return ""
    run = "" if after is None else f"; this run {after:.2f}"
    return (
        f"The frozen backbone alone: k-NN {facts['neighbours']:.2f}, linear probe {facts['linear']:.2f}{run} "
        f"({facts['train']:,} training rows, {facts['others']:,} others)."
    )


def _parameters(config: RunConfig, task: ModelHead) -> int:
    return sum(each.numel() for each in backbones.skeleton(config.model, task=task).parameters())


def _some(count: int, most: int, seed: int) -> Indices:
    """Rows from all over a set, in their order."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def _unit(rows_XD: Floats) -> Floats:
    length = np.linalg.norm(rows_XD, axis=-1, keepdims=True)
    return np.asarray(rows_XD / np.maximum(length, np.finfo(np.float32).tiny), dtype=np.float32)
