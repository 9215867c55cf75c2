"""Confidence that matches how often a prediction is right, and fits that no row judges by itself.

Legend: N rows, n rows of a fold, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from workbench.crossval.ensembles import Mask
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import target_scores
from workbench.evaluation.target_scores import OneHot

Fitted = TypeVar("Fitted")

COLDEST, HOTTEST = 0.05, 20.0
BLIND = 2
"""Rows that join the others as though labelled at random."""


def temperature(labels: Labels, outputs_NC: Floats, targets_NC: OneHot) -> float:
    """The number by which to divide logits so that their loss is lowest; 1 for numbers, which claim no confidence.

    Guo et al. 2017, arXiv:1706.04599, section 4.2. Two blind rows join the N ones, as in Platt 1999, because N rows
    that are all right would ask for a confidence without bound. Never a temperature with a higher loss than 1 has.
    """
    if labels.kind == "number":
        return 1.0
    rows = len(targets_NC)
    soft_NC = (rows * targets_NC.astype(np.float64) + BLIND * target_scores.random_target(labels)) / (rows + BLIND)
    optimum = optimize.minimize_scalar(
        lambda log: target_scores.loss(labels, outputs_NC / math.exp(log), soft_NC),
        bounds=(math.log(COLDEST), math.log(HOTTEST)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    best = math.exp(optimum.x)
    falls = target_scores.loss(labels, outputs_NC / best, targets_NC) < target_scores.loss(
        labels, outputs_NC, targets_NC
    )
    return best if falls else 1.0


def cross_fitted(
    fold_N: NDArray[Any], fit: Callable[[Mask], Fitted], apply: Callable[[Fitted, Mask], Floats]
) -> Floats:
    """Values (N, C) of all rows, each fold's by what was fitted on the rows of the other folds.

    Args:
        fold_N: The fold of each row, by any name.
        fit: Fits on the rows of a mask (N,).
        apply: Values (n, C) of the rows of a mask, by what `fit` gave.

    Raises:
        ValueError: All rows are of one fold, so that none is left to fit on.
    """
    folds = np.unique(fold_N)
    if len(folds) < 2:
        raise ValueError("cross-fitting needs rows of two folds or more")
    masks = [fold_N == fold for fold in folds]
    fold_values = [apply(fit(~mask_N), mask_N) for mask_N in masks]
    values_NC = np.empty((len(fold_N), fold_values[0].shape[1]))
    for mask_N, values_nC in zip(masks, fold_values, strict=True):
        values_NC[mask_N] = values_nC
    return values_NC
