"""What a classifier says of rows, and how that stands in a table.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from workbench.data.batching import MicroBatch, micro_batches
from workbench.data.classes import Labelled
from workbench.data.labels import Floats, Label, Labels

TOKENS = 4096
"""Padded tokens in one forward pass without gradients."""


@torch.no_grad()
def outputs(model: nn.Module, predict: Callable[[MicroBatch], Tensor], rows: Labelled) -> Floats:
    """Outputs (N, C) of rows in their order."""
    device = next(model.parameters()).device
    found: dict[int, Floats] = {}
    for indices in micro_batches(np.arange(len(rows)), rows.lengths, tokens=TOKENS):
        said_BC = predict(rows.batch(indices).to(device)).double().cpu().numpy()
        found.update(zip(indices.tolist(), said_BC, strict=True))
    return np.stack([found[row] for row in range(len(rows))])


def table(labels: Labels, rows: Labelled, values_NC: Floats, *, texts: list[str], labelled: bool) -> pd.DataFrame:
    """One line a row: its place, text, label where it has one, what was predicted, and `p_CLASS` for each class.

    Several classes stand in a list.

    Args:
        values_NC: Probabilities of the classes, or numbers, as Labels.values gives.
    """
    columns: dict[str, object] = {"row": [record.place for record in rows.records], "text": texts}
    if labelled:
        columns["label"] = [_cell(label) for label in rows.labels]
    columns["predicted"] = [_cell(label) for label in labels.predicted(values_NC)]
    if labels.kind != "number":
        columns |= {f"p_{name}": values_NC[:, number] for number, name in enumerate(labels.names)}
    return pd.DataFrame(columns)


def _cell(label: Label | None) -> object:
    return list(label) if isinstance(label, tuple) else label
