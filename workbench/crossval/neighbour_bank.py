"""The labelled rows of a cross-validation as neighbours of others: features, folds, predictions and labels.

Features are the frozen backbone's, or the embeddings of the run that `correction.embedder` names.

Legend: N labelled rows, T other rows, D features, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors
from safetensors import safe_open

from workbench.config.sections.correction_config import Ask
from workbench.crossval import neighbour_correction
from workbench.crossval.fold_adapters import FoldContext
from workbench.crossval.neighbour_correction import AnsweringRows, Correction, Features, Ints
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.errors import FileError
from workbench.evaluation import run_embedder
from workbench.evaluation.frozen_features import frozen_features
from workbench.runs import files
from workbench.runs.run_directory import Run

FILE = "neighbours.safetensors"
"""The rows that predictions are corrected by, in a run directory."""
_FEATURES = "members/features.safetensors"


class NeighbourBank(NamedTuple):
    """Labelled rows that others are drawn to."""

    features_ND: Features
    fold_N: Ints
    answers: dict[Ask, Floats]
    """Predictions (N, C) by adapters that did not train on the row, not corrected, and labels."""
    embedder: str = ""
    """Digest of the embedder that features are of; empty: the frozen backbone's."""

    def neighbours(self, asks: Sequence[Ask], cluster_N: Ints, count: int) -> dict[Ask, AnsweringRows]:
        """The rows that each of them may ask, and the answers."""
        centred_ND = self._centred(self.features_ND)
        return {
            ask: AnsweringRows(
                neighbour_correction.across_folds(ask, centred_ND, self.fold_N, cluster_N, count), self.answers[ask]
            )
            for ask in asks
        }

    def corrected(self, correction: Correction, values_TC: Floats, rows_TD: Features) -> Floats:
        """Corrected values (T, C) of rows that no adapter trained on.

        Args:
            values_TC: By all adapters together.
            rows_TD: Features of the rows, by the same model.
        """
        known_ND, answers_NC = self._centred(self.features_ND), self.answers[correction.ask]
        return neighbour_correction.corrected(
            correction, values_TC, self._centred(rows_TD), known_ND, answers_NC, self.fold_N
        )

    def save(self, run: Path) -> None:
        """Write it into a run directory, for `read`."""
        arrays: dict[str, NDArray[Any]] = {"features": self.features_ND, "fold": self.fold_N}
        arrays |= {ask: answers_NC for ask, answers_NC in self.answers.items()}
        files.write_bytes(run / FILE, safetensors.save(arrays, {"embedder": self.embedder} if self.embedder else None))

    def _centred(self, rows_XD: Features) -> Features:
        """Features less the mean of the labelled rows: what all rows have in common makes none of them similar."""
        centred_XD: Features = rows_XD - self.features_ND.mean(0)
        return centred_XD


def read(run: Path) -> NeighbourBank:
    """The bank of the finished run at `run`."""
    arrays = safetensors.load_file(run / FILE)
    with safe_open(run / FILE, "numpy") as file:
        embedder = (file.metadata() or {}).get("embedder", "")
    answers: dict[Ask, Floats] = {"predictions": arrays["predictions"], "labels": arrays["labels"]}
    return NeighbourBank(arrays["features"], arrays["fold"], answers, embedder)


def of_run(context: FoldContext, run: Run, data: FoldData, values_NC: Floats) -> tuple[NeighbourBank, Features | None]:
    """The bank of a run that has not ended, and features (T, D) of its test rows where it has some.

    Args:
        values_NC: Of the labelled rows, by adapters that did not train on them.
    """
    if not run.ranks.agreed((run.home / _FEATURES).exists()):
        sets = {"train": data.rows} | ({} if data.test is None else {"test": data.test})
        set_features = dict(zip(sets, _features(context, list(sets.values())), strict=True))
        files.write_bytes(run.path / _FEATURES, safetensors.save(set_features))
        run.ranks.wait()
    set_features = safetensors.load_file(run.home / _FEATURES)
    fold_N = np.asarray(data.folds.fold_RN[0], dtype=np.int64)
    answers = neighbour_correction.answers(data.labels, values_NC, data.rows.targets_NC)
    embedder = run_embedder.of(context.config, "correction")
    digest = "" if embedder is None else embedder.digest
    return NeighbourBank(set_features["train"], fold_N, answers, digest), set_features.get("test")


def corrected(
    run: Path, context: FoldContext, rows: LabelledSet, values_TC: Floats, decided: dict[str, Any] | None
) -> Floats:
    """Values (T, C) of other rows as the finished run at `run` decided to correct them.

    Args:
        values_TC: Not corrected.
        decided: `Correction.facts`; None where the run does not correct.

    Raises:
        FileError: The embedder that `correction.embedder` names has changed since.
    """
    if decided is None:
        return values_TC
    bank, embedder = read(run), run_embedder.of(context.config, "correction")
    if bank.embedder != ("" if embedder is None else embedder.digest):
        raise FileError(
            f"correction.embedder={context.config.correction.embedder}: {run} corrects predictions by its embeddings, "
            "and it is not what it was then. Put back what it was, or run the cross-validation again."
        )
    (rows_TD,) = _features(context, [rows])
    return bank.corrected(Correction(**decided), values_TC, rows_TD)


def _features(context: FoldContext, sets: Sequence[LabelledSet]) -> list[Features]:
    embedder = run_embedder.of(context.config, "correction")
    if embedder is None:
        return frozen_features(context.config.model, context.reader, [rows.inputs for rows in sets])
    return [embedder.embed([context.reader.describe(record) for record in rows.records]) for rows in sets]
