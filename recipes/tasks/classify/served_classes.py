"""Classifiers as `workbench serve` answers for them.

Legend: N rows, C outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.config import RunConfig
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import NamedColumns, RowReader
from workbench.data.rows import RawRow
from workbench.errors import ConfigError, DataError
from workbench.evaluation.serving.served_models import ClassModel, Turns
from workbench.models import classifier
from workbench.recipes.tasks.classify import class_run

Row = str | dict[str, str]


def require_texts(run: Path, config: RunConfig) -> None:
    """Raise ConfigError where requests could not hold the rows of a run."""
    if config.media:
        raise ConfigError(
            f"{run}: it reads rows with data.format={config.data.format}, and requests hold text. `workbench predict` "
            "names their classes."
        )


def load(run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ClassModel:
    """The classifier of a run by name; so many requests may wait for it."""
    model = classifier.load(run, config)

    def values(rows: LabelledSet) -> Floats:
        return model.labels.values(class_run.outputs(run, config, model, rows))

    return served(config, name, created, model.reader, model.labels, values, queue=queue)


def served(
    config: RunConfig,
    name: str,
    created: int,
    reader: RowReader,
    labels: Labels,
    values: Callable[[LabelledSet], Floats],
    *,
    queue: int,
) -> ClassModel:
    """The model of a run by name, whose classes `values` gives: probabilities (N, C), or numbers, of rows."""

    def classify(rows: Sequence[Row]) -> list[dict[str, Any]]:
        named = [_named(row, reader.columns, place) for place, row in enumerate(rows, start=1)]
        encoded = labelled_data.encode(reader.reread("the request", "", named), reader, labels)
        values_NC = values(encoded)
        pairs = zip(labels.predicted(values_NC), values_NC.tolist(), strict=True)
        return [{"label": label, "probs": values_C, "num_classes": len(values_C)} for label, values_C in pairs]

    return ClassModel(name, config.model.id, created, Turns(queue), classify, labels.names)


def _named(row: Row, columns: Sequence[str], place: int) -> NamedColumns:
    if isinstance(row, str) and len(columns) == 1:
        row = {columns[0]: row}
    if isinstance(row, str) or set(row) != set(columns):
        raise DataError(f"input {place}: expected an object with {', '.join(columns)}.")
    return NamedColumns(RawRow(f"input {place}", dict(row)), row)
