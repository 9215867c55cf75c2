"""`workbench features`: what a frozen backbone sees in labelled rows, and what it knows of their labels already."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.config import RunConfig
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.row_reader import RowReader
from workbench.errors import ConfigError
from workbench.evaluation.features import Probe, probe
from workbench.evaluation.frozen_features import frozen_features
from workbench.recipes import classify, streamed_rows
from workbench.runs import files


class Found(NamedTuple):
    """Rows of a table of features, and what they tell of the labels."""

    rows: int
    width: int
    classes: int
    probe: Probe
    likeliest: float
    """Share of the held-out rows that have the most frequent class of the training rows."""


def write(config: RunConfig, out: Path | None) -> Found:
    """Compute features of the training and held-out rows; write them with their labels into a parquet file.

    Raises:
        ConfigError: The recipe is not `classify`, or labels are not one class.
    """
    if config.recipe != "classify" or config.classes.kind != "one":
        raise ConfigError(
            f"features: recipe={config.recipe} with classes.kind={config.classes.kind}. Features are compared with one "
            "class a row: take recipe classify and classes.kind=one."
        )
    if out is not None:
        files.require_writable(out)
    reader, data, _ = classify.prepare(streamed_rows.local(config))
    seen = {"train": data.train, "held_out": data.held_out}
    computed = frozen_features(config.model, reader, [rows.inputs for rows in seen.values()])
    found = dict(zip(seen, computed, strict=True))
    labels = {name: [str(label) for label in rows.labels] for name, rows in seen.items()}
    if out is not None:
        tables = [_table(name, rows, found[name], labels[name], reader) for name, rows in seen.items()]
        buffer = io.BytesIO()
        pd.concat(tables, ignore_index=True).to_parquet(buffer)
        files.write_bytes(out, buffer.getvalue())
    names, counts = np.unique(labels["train"], return_counts=True)
    return Found(
        rows=sum(map(len, found.values())),
        width=found["train"].shape[1],
        classes=len(names),
        probe=probe(found["train"], labels["train"], found["held_out"], labels["held_out"]),
        likeliest=float(np.mean([label == names[counts.argmax()] for label in labels["held_out"]])),
    )


def _table(
    split: str, rows: LabelledSet, found_ND: np.ndarray[tuple[int, int], np.dtype[np.float32]], labels: list[str],
    reader: RowReader,
) -> pd.DataFrame:  # fmt: skip
    return pd.DataFrame(
        {
            "row": [record.place for record in rows.records],
            reader.title: [reader.describe(record) for record in rows.records],
            "split": split,
            "label": labels,
            "features": list(found_ND),
        }
    )
