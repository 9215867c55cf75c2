"""The labelled rows of a cross-validation as neighbours of others: their frozen features, folds and predictions.

Legend: N labelled rows, T other rows, D features, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from workbench.crossval import neighbour_correction
from workbench.crossval.fold_adapters import FoldContext
from workbench.crossval.neighbour_correction import Correction, Features, Ints, Neighbours
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.evaluation.frozen_features import frozen_features
from workbench.runs import files
from workbench.runs.run_directory import Run

FILE = "neighbours.safetensors"
"""The rows that predictions are corrected by, in a run directory."""
_FEATURES = "members/features.safetensors"


class NeighbourBank(NamedTuple):
    """Labelled rows that others are drawn to."""

    features_ND: Features
    said_NC: Floats
    """Values by adapters that did not train on the row, not corrected."""
    fold_N: Ints

    def within_folds(self, cluster_N: Ints, count: int) -> Neighbours:
        """The nearest rows of each row's own fold and of other clusters of near-duplicates."""
        return neighbour_correction.within_folds(self._centred(self.features_ND), self.fold_N, cluster_N, count)

    def corrected(self, correction: Correction, values_TC: Floats, rows_TD: Features) -> Floats:
        """Corrected values (T, C) of rows that no adapter trained on.

        Args:
            values_TC: By all adapters together.
            rows_TD: Frozen features of the rows.
        """
        known_ND = self._centred(self.features_ND)
        return neighbour_correction.corrected(
            correction, values_TC, self._centred(rows_TD), known_ND, self.said_NC, self.fold_N
        )

    def save(self, run: Path) -> None:
        """Write it into a run directory, for `read`."""
        arrays: dict[str, NDArray[Any]] = {"features": self.features_ND, "values": self.said_NC, "fold": self.fold_N}
        files.write_bytes(run / FILE, safetensors.save(arrays))

    def _centred(self, rows_XD: Features) -> Features:
        """Features less the mean of the labelled rows: what all rows have in common makes none of them similar."""
        centred_XD: Features = rows_XD - self.features_ND.mean(0)
        return centred_XD


def read(run: Path) -> NeighbourBank:
    """The bank of the finished run at `run`."""
    found = safetensors.load_file(run / FILE)
    return NeighbourBank(found["features"], found["values"], found["fold"])


def of_run(room: FoldContext, run: Run, data: FoldData, said_NC: Floats) -> tuple[NeighbourBank, Features | None]:
    """The bank of a run that has not ended, and features (T, D) of its test rows where it has some.

    Args:
        said_NC: Values of the labelled rows, by adapters that did not train on them.
    """
    if not run.ranks.agreed((run.home / _FEATURES).exists()):
        sets = {"train": data.rows} | ({} if data.test is None else {"test": data.test})
        found = dict(zip(sets, _frozen(room, list(sets.values())), strict=True))
        files.write_bytes(run.path / _FEATURES, safetensors.save(found))
        run.ranks.wait()
    found = safetensors.load_file(run.home / _FEATURES)
    fold_N = np.asarray(data.folds.fold_RN[0], dtype=np.int64)
    return NeighbourBank(found["train"], said_NC, fold_N), found.get("test")


def corrected(
    run: Path, room: FoldContext, rows: LabelledSet, values_TC: Floats, decided: dict[str, Any] | None
) -> Floats:
    """Values (T, C) of other rows as the finished run at `run` decided to correct them.

    Args:
        values_TC: Not corrected.
        decided: `Correction.facts`; None where the run does not correct.
    """
    if decided is None:
        return values_TC
    (rows_TD,) = _frozen(room, [rows])
    return read(run).corrected(Correction(**decided), values_TC, rows_TD)


def _frozen(room: FoldContext, sets: Sequence[LabelledSet]) -> list[Features]:
    return frozen_features(room.config.model, room.reader, [rows.inputs for rows in sets])
