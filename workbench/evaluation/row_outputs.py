"""Outputs of a classifier for rows, and the table of its predictions.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from workbench.data.batching import Indices, MicroBatch
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Label, Labels
from workbench.data.labelled.records import RowReader
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows

if TYPE_CHECKING:
    import pandas as pd


def outputs(
    model: nn.Module, predict: Callable[[MicroBatch], Tensor], rows: LabelledSet, *, scoring: ModelResults | None = None
) -> Floats:
    """Outputs (N, C) of rows in their order.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """
    device = next(model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        outputs_BC: list[list[float]] = predict(rows.batch(numbers).to(device)).double().cpu().tolist()
        return outputs_BC

    outputs_by_row = over_rows(model, rows.lengths, compute, scoring=scoring, content=rows.inputs.arrays())
    return np.asarray([outputs_by_row[number] for number in range(len(rows))])


def table(labels: Labels, rows: LabelledSet, values_NC: Floats, reader: RowReader, *, labelled: bool) -> pd.DataFrame:
    """One line for each row: place, content, label if `labelled`, prediction, and a column `p_CLASS` for each class.

    Labels of several classes are lists.

    Args:
        values_NC: Probabilities of the classes, or numbers, as `Labels.values` returns them.
    """
    columns: dict[str, object] = {
        "row": [record.place for record in rows.records],
        reader.title: [reader.describe(record) for record in rows.records],
    }
    if labelled:
        columns["label"] = [_cell(label) for label in rows.labels]
    columns["predicted"] = [_cell(label) for label in labels.predicted(values_NC)]
    if labels.kind != "number":
        columns |= {f"p_{name}": values_NC[:, number] for number, name in enumerate(labels.names)}
    import pandas as pd  # 0.2 s, which the first step need not wait for

    return pd.DataFrame(columns)


def _cell(label: Label | None) -> object:
    return list(label) if isinstance(label, tuple) else label
