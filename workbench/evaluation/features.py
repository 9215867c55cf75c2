"""Features of rows as a frozen backbone sees them, and how much of the labels they tell without any training.

Legend: N rows, B rows of a micro-batch, L tokens, D features.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.adapters import anatomy
from workbench.data.batching import Indices, MicroBatch
from workbench.data.labelled.records import ModelInputs, RowInputs
from workbench.evaluation.row_passes import over_rows
from workbench.models.classifier import Classifier

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

NEIGHBOURS = 10
"""Rows that vote, each by its cosine similarity; fewer where there are not so many."""
STRENGTH = 0.1
"""Inverse strength of the linear probe's penalty on standardised features."""
PARTS = 5
"""Parts of the rows, of which each is judged by a linear probe of the others."""
UNKNOWN = 1e-6
"""Least probability of a class, and that of one which no other row has."""
Floats = NDArray[np.float32]


class Probe(NamedTuple):
    """Shares of rows whose class is told right by features alone."""

    neighbours: float
    """By a vote of the nearest training rows."""
    linear: float
    """By logistic regression on standardised features."""


def features(model: Classifier, rows: RowInputs) -> Floats:
    """Features of each row (N, D), in their order: the inputs of the classification head."""
    head = model.backbone.get_submodule(anatomy.fresh_heads(model.backbone)[-1])
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[Floats]:
        batch, caught = _unlabelled(rows.batch(numbers, epoch=None)).to(device), list[Tensor]()
        handle = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            model.outputs(batch)
        finally:
            handle.remove()
        return list(_of_rows(model, caught[-1], batch).float().cpu().numpy())

    features_by_row = over_rows(model.model, rows.lengths, compute)
    return np.stack([features_by_row[number] for number in range(len(rows.lengths))])


def _unlabelled(read: ModelInputs) -> MicroBatch:
    return MicroBatch(read.inputs, read.positions_B, torch.zeros(len(read.positions_B)), read.tokens)


def _of_rows(model: Classifier, read: Tensor, batch: MicroBatch) -> Tensor:
    """Inputs of the head for each row (B, D): of its last real token, or of the first, or of a picture."""
    if model.token_head is not None:
        return read.flatten(0, 1)[batch.positions_N]
    if read.ndim == 3:
        return read[:, 0]
    return read.flatten(1)


def probe(train_ND: Floats, labels_N: Sequence[str], others_MD: Floats, wanted_M: Sequence[str]) -> Probe:
    """How many of other rows the features of training rows tell the class of; takes seconds."""
    from sklearn.neighbors import KNeighborsClassifier

    nearest = KNeighborsClassifier(min(NEIGHBOURS, len(train_ND)), weights=_similarity, metric="cosine")
    nearest.fit(train_ND, labels_N)
    linear = linear_probe(train_ND, np.asarray(labels_N))
    wanted = np.asarray(wanted_M)
    return Probe(*(float((each.predict(others_MD) == wanted).mean()) for each in (nearest, linear)))


def probe_losses(features_ND: Floats, class_N: Indices, *, seed: int) -> NDArray[np.float64]:
    """Loss (N,) of each row's class in nats, by a linear probe that was fitted to other rows.

    To three digits: the last bits of features depend on the rows that were computed beside them, and are no difference.

    Args:
        class_N: Number of each row's class, from 0.
        seed: Deals the rows to `PARTS` parts.
    """
    part_N = np.random.default_rng([seed, 12]).permutation(len(class_N)) % PARTS
    probability_N = np.full(len(class_N), UNKNOWN)
    for part in range(PARTS):
        mine_N = part_N == part
        known_C = np.unique(class_N[~mine_N])
        if len(known_C) < 2 or not mine_N.any():
            continue
        said_NC = np.full((len(class_N), class_N.max() + 1), UNKNOWN)
        probe = linear_probe(features_ND[~mine_N], class_N[~mine_N])
        said_NC[np.ix_(mine_N, known_C)] = probe.predict_proba(features_ND[mine_N])
        probability_N[mine_N] = said_NC[mine_N, class_N[mine_N]]
    found_N: NDArray[np.float64] = np.round(-np.log(np.maximum(probability_N, UNKNOWN)), 3)
    return found_N


def linear_probe(train_ND: Floats, labels_N: NDArray[Any]) -> Pipeline:
    """Logistic regression on standardised features."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=STRENGTH, max_iter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a rough answer will do
        fitted: Pipeline = make_pipeline(StandardScaler(), regression).fit(train_ND, labels_N)
    return fitted


def _similarity(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of votes: cosine similarities, of which none is zero."""
    return np.maximum(1 - distance, 1e-6)
