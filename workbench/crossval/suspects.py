"""Rows whose label is probably wrong, found for each fold by adapters that never saw the fold's rows.

What was said out of fold of a row came from an adapter that trained on all other folds. A fold that dropped rows by it
would drop them by its own labels, and be judged too well by them. So each two folds are left out by an adapter of their
own, which speaks of the rows of one when the other is to be judged.

Legend: M adapters, N labelled rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from workbench.crossval.ensembles import Mask
from workbench.crossval.fold_adapters import FoldAdapter
from workbench.data.folds.stratified_folds import FoldAssignment, Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import DataError
from workbench.evaluation import prediction_table
from workbench.evaluation.classification_scores import OneHot

MOST = 0.5
"""Share of the rows of a class that may be dropped: where most labels are wrong, nothing is known of the class."""
FOLDS = 3
"""Folds that a class needs rows in: two are left out, and one trains."""


def require_classes(folds: FoldAssignment, labels: Labels, targets_NC: OneHot) -> None:
    """Refuse rows of which an adapter that leaves two folds out would not know every class."""
    if folds.k < FOLDS:
        raise DataError(
            f"data.drop_suspects asks adapters that leave two folds out, and there are {folds.k}. "
            f"Write folds.k={FOLDS} or more, or leave data.drop_suspects out."
        )
    class_N = targets_NC.argmax(1)
    for fold_N in folds.fold_RN:
        for number, name in enumerate(labels.names):
            if (present := len(np.unique(fold_N[class_N == number]))) < FOLDS:
                raise DataError(
                    f"data.drop_suspects asks adapters that leave two folds out, and class {name} has rows in "
                    f"{present} only. Give it rows that are no near-duplicates in {FOLDS} folds, or leave "
                    "data.drop_suspects out."
                )


def leave_two_out(folds: FoldAssignment) -> list[FoldAdapter]:
    """An adapter for each two folds of each repeat, which trains on all others and predicts the rows of both."""
    adapters = []
    for repeat, fold_N in enumerate(folds.fold_RN):
        for one, other in combinations(range(folds.k), 2):
            pair_N = np.isin(fold_N, (one, other))
            adapters.append(FoldAdapter(Split(repeat, one, ~pair_N, pair_N), 0, other))
    return adapters


def dropped(
    labels: Labels,
    targets_NC: OneHot,
    members: Sequence[FoldAdapter],
    pairs: Sequence[FoldAdapter],
    outputs_MNC: Floats,
) -> list[Mask]:
    """Rows (N,) that each member is to train without: those among its training rows that are suspected.

    Args:
        pairs: As `leave_two_out` gives them.
        outputs_MNC: Theirs, for the rows of their two folds.
    """
    suspect_masks: dict[tuple[int, int], Mask] = {}
    for each in members:
        repeat, fold, train_N, _ = each.split
        if (repeat, fold) in suspect_masks:
            continue
        values_NC = np.zeros(outputs_MNC.shape[1:])
        for pair, outputs_NC in zip(pairs, outputs_MNC, strict=True):
            if pair.split.repeat == repeat and fold in (pair.split.fold, pair.also):
                mine_N = pair.split.validation_N & train_N
                values_NC[mine_N] = labels.values(outputs_NC[mine_N])
        mask_N = np.zeros(len(train_N), dtype=bool)
        mask_N[train_N] = suspected(targets_NC[train_N], values_NC[train_N])
        suspect_masks[repeat, fold] = mask_N
    return [suspect_masks[each.split.repeat, each.split.fold] for each in members]


def suspected(targets_NC: OneHot, values_NC: Floats) -> Mask:
    """Rows (N,) whose label is probably wrong; of each class the most suspect ones, at most `MOST` of its rows."""
    class_N = targets_NC.argmax(1)
    left_C = np.floor(MOST * np.bincount(class_N, minlength=targets_NC.shape[1]))
    mask_N = np.zeros(len(class_N), dtype=bool)
    for row in prediction_table.suspected(values_NC, class_N):
        mask_N[row] = left_C[class_N[row]] >= 1
        left_C[class_N[row]] -= 1
    return mask_N


def sentence(folds: FoldAssignment, *, seeds: int) -> str:
    """Cost of the stage, in training of the adapters of the folds."""
    pairs, k = folds.k * (folds.k - 1) // 2, folds.k
    times = 1 + pairs * (k - 2) / (k * (k - 1) * seeds)
    return (
        f"data.drop_suspects trains {pairs * len(folds.fold_RN)} more adapters, which leave two folds out each, and "
        f"those of the folds again: about {times:.1f} times the training of the folds on top."
    )
