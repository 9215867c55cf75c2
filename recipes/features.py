"""`workbench features`: what a frozen backbone sees in rows, and what it knows of their labels already."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.config import RunConfig
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.row_reader import RowReader
from workbench.errors import ConfigError
from workbench.evaluation.features import Floats, Probe, probe
from workbench.evaluation.frozen_features import frozen_features
from workbench.recipes import classify, crossval, streamed_rows
from workbench.runs import files


class Known(NamedTuple):
    """Share of labels that features tell, of rows that were not looked at."""

    classes: int
    probe: Probe
    likeliest: float
    """Share of those rows that have the most frequent class of the others."""


class ProbedFeatures(NamedTuple):
    """Rows of a table of features."""

    rows: Mapping[str, int]
    """Number of rows by the split that they are in: train, held_out, test, unlabelled."""
    width: int
    known: Known | None
    """None where a row's label is not one class."""

    @property
    def sentence(self) -> str:
        """The findings for a person."""
        counts = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        summary = f"{sum(self.rows.values()):,} rows ({counts}), {self.width:,} features."
        if self.known is None:
            return f"{summary} Labels that are not one class are not compared with them."
        nearest, linear = self.known.probe
        return (
            f"{summary} Of {self.known.classes} classes rows aside are told right without training the backbone: "
            f"{nearest:.1%} by the nearest training rows, {linear:.1%} by a linear probe; always naming the likeliest "
            f"class gives {self.known.likeliest:.1%}."
        )


def write(config: RunConfig, out: Path | None) -> ProbedFeatures:
    """Compute features of all rows that a recipe names; write them, with labels where there are any, as parquet.

    Raises:
        ConfigError: The recipe has no rows whose labels are learnt.
    """
    if config.recipe not in ("classify", "crossval"):
        raise ConfigError(
            f"features: recipe={config.recipe} learns no labels. Name a recipe of classify or crossval, with your rows "
            "as data.train."
        )
    if out is not None:
        files.require_writable(out)
    reader, splits, aside_N = _rows(streamed_rows.local(config))
    computed = frozen_features(config.model, reader, [rows.inputs for rows in splits.values()])
    split_features = dict(zip(splits, computed, strict=True))
    if out is not None:
        tables = [_table(name, rows, split_features[name], reader) for name, rows in splits.items()]
        buffer = io.BytesIO()
        pd.concat(tables, ignore_index=True).to_parquet(buffer)
        files.write_bytes(out, buffer.getvalue())
    counts = {name: len(rows) for name, rows in splits.items()}
    return ProbedFeatures(counts, split_features["train"].shape[1], _known(config, splits, split_features, aside_N))


def _rows(config: RunConfig) -> tuple[RowReader, dict[str, LabelledSet], npt.NDArray[np.bool_] | None]:
    """Rows by their split; of a cross-validation, also which training rows are aside: those of the first fold."""
    if config.recipe == "crossval":
        reader, folds, *_ = crossval.prepare(config)
        named = {"train": folds.rows, "test": folds.test, "unlabelled": folds.unlabelled}
        aside_N = folds.folds.fold_RN[0] == 0
    else:
        reader, data, _ = classify.prepare(config)
        named, aside_N = {"train": data.train, "held_out": data.held_out, "test": data.test}, None
    return reader, {name: rows for name, rows in named.items() if rows is not None}, aside_N


def _known(
    config: RunConfig,
    splits: Mapping[str, LabelledSet],
    scores: Mapping[str, Floats],
    aside_N: npt.NDArray[np.bool_] | None,
) -> Known | None:
    if config.classes.kind != "one":
        return None
    labels = np.asarray([str(label) for label in splits["train"].labels])
    if aside_N is None:
        seen, others, right = scores["train"], scores["held_out"], [str(label) for label in splits["held_out"].labels]
    else:
        seen, others, right = scores["train"][~aside_N], scores["train"][aside_N], labels[aside_N].tolist()
        labels = labels[~aside_N]
    names, counts = np.unique(labels, return_counts=True)
    return Known(
        classes=len(names),
        probe=probe(seen, labels.tolist(), others, right),
        likeliest=float(np.mean([label == names[counts.argmax()] for label in right])),
    )


def _table(split: str, rows: LabelledSet, found_ND: Floats, reader: RowReader) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "row": [record.place for record in rows.records],
            reader.title: [reader.describe(record) for record in rows.records],
            "split": split,
            "label": [None if label is None else str(label) for label in rows.labels],
            "features": list(found_ND),
        }
    )
