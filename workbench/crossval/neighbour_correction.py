"""Correction by similarity: predictions are drawn to those of the nearest rows, where out-of-fold rows gain.

    p'_i = (1 - a) p_i + a sum_j w_ij p_j,    w_ij = softmax_j(s_ij / t) over the k nearest rows j of row i, never i

s is the cosine similarity of frozen features. This is one step of label propagation, F <- (1 - a) Y + a S F of Zhou et
al. 2004, "Learning with local and global consistency", from Y = F = predictions, as smoothing is in "Correct and
Smooth" of Huang et al. 2021, arXiv:2010.13993, with S normalised by rows: a number stays in its range and probabilities
sum to 1. One step, so that a new row needs the labelled rows alone: its answer does not depend on what else is asked.

Which rows may be asked is what keeps the fit honest. Row i of a fold is predicted by adapters that did not train on it;
the prediction of a row j of another fold comes from adapters that did train on i, whose label would leak through it.
So i asks the rows of its own fold, which the same adapters predict and none of which taught them: only predictions are
asked, never labels. A new row finds the same in every fold, rows and the predictions of adapters that know neither
them nor it. Its consensus is the mean over folds of what each fold's rows say, each as it was fitted.

Nor does a row ask its near-duplicates: a new row has none among the labelled rows, as those of test rows leave training,
and would be corrected by what only copies gain. Copies among the test rows have a stage of their own, ensemble.consensus.

Any mean shrinks predictions, and shrunk ones may have a lower loss whoever was asked. So the correction is held
against predictions that are drawn to the mean of all rows of their fold, by a strength that is fitted in the same way.

Legend: N labelled rows, T other rows, P rows that are asked, K neighbours of a row, the nearest first, D features, C
outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from workbench.config.correction_config import CorrectionConfig
from workbench.crossval import calibration, gains
from workbench.crossval.ensembles import Mask
from workbench.crossval.gains import Gain
from workbench.data.folds.row_split import FoldAssignment
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError
from workbench.evaluation.target_scores import OneHot

Features: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
SameRows: TypeAlias = Callable[[slice], Mask]

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""From which one is chosen: at 0.01 hardly more than the nearest row counts, at 1 all neighbours count alike."""

ROWS_AT_ONCE = 1024
"""Rows that are compared with all that are asked, for the memory of their similarities."""


class Neighbours(NamedTuple):
    """The nearest rows of each row."""

    row_NK: Ints
    """Their numbers among the rows that are asked."""
    similarity_NK: Floats


@dataclass(frozen=True)
class Correction:
    """How predictions are drawn to those of their neighbours."""

    neighbours: int
    """Nearest rows that are asked; of those found, no more."""
    strength: float
    """Share of the neighbours in a prediction; 0 leaves it as it is, to the last bit."""
    temperature: float

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    def consensus(self, found: Neighbours, values_PC: Floats) -> Floats:
        """Weighted means (N, C) of the values of neighbours."""
        nearest = slice(self.neighbours)
        weight_NK = special.softmax(found.similarity_NK[:, nearest] / self.temperature, axis=1)
        consensus_NC: Floats = np.zeros((len(weight_NK), values_PC.shape[1]))
        for weight_N, row_N in zip(weight_NK.T, found.row_NK[:, nearest].T, strict=True):
            consensus_NC += weight_N[:, None] * values_PC[row_N]
        return consensus_NC

    def apply(self, values_NC: Floats, consensus_NC: Floats) -> Floats:
        """Corrected values (N, C)."""
        if not self.strength:
            return values_NC
        return (1 - self.strength) * values_NC + self.strength * consensus_NC


def nearest(rows_ND: Features, asked_PD: Features, count: int, same_NP: SameRows | None = None) -> Neighbours:
    """The nearest of the rows that are asked, for each of some rows.

    Args:
        count: At most as many as there are rows to ask.
        same_NP: From a slice of the rows to a mask (n, P) of those that they may not ask.
    """
    rows_ND, asked_PD = _unit(rows_ND), _unit(asked_PD)
    row_NK = np.empty((len(rows_ND), count), dtype=np.int64)
    similarity_NK = np.empty((len(rows_ND), count))
    for start in range(0, len(rows_ND), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        similarity_nP = rows_ND[some] @ asked_PD.T
        if same_NP is not None:
            similarity_nP[same_NP(some)] = -np.inf
        found_nK = np.argpartition(-similarity_nP, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(similarity_nP, found_nK, axis=1)
        order_nK = np.argsort(-found, axis=1, kind="stable")
        row_NK[some] = np.take_along_axis(found_nK, order_nK, axis=1)
        similarity_NK[some] = np.take_along_axis(found, order_nK, axis=1)
    return Neighbours(row_NK, similarity_NK)


def within_folds(features_ND: Features, fold_N: Ints, cluster_N: Ints, count: int) -> Neighbours:
    """The nearest rows of each row's own fold and of other clusters of near-duplicates, numbered among all rows."""
    row_NK = np.empty((len(fold_N), count), dtype=np.int64)
    similarity_NK = np.empty((len(fold_N), count))
    for own in _folds(fold_N):
        found = nearest(features_ND[own], features_ND[own], count, partial(_same_cluster, cluster_N[own]))
        row_NK[own], similarity_NK[own] = own[found.row_NK], found.similarity_NK
    return Neighbours(row_NK, similarity_NK)


def fit(
    config: CorrectionConfig,
    labels: Labels,
    values_NC: Floats,
    targets_NC: OneHot,
    found: Neighbours,
    part_N: NDArray[Any],
) -> tuple[Correction, Floats]:
    """The number of neighbours, strength and temperature with the lowest out-of-fold loss, where these are not given.

    Returns:
        What all rows fitted, and corrected values (N, C) of each part's rows by what the rows of other parts fitted.

    Args:
        values_NC: As Labels.values gives, by adapters that did not train on the row.
        targets_NC: What Labels.targets gives.
        found: By `within_folds`, of as many neighbours as the largest number to choose from.
        part_N: Rows of one part are judged by what was fitted on the others.
    """
    fitted = partial(_fitted, config, labels, values_NC, targets_NC, found)

    def apply(correction: Correction, rows_N: Mask) -> Floats:
        own = Neighbours(found.row_NK[rows_N], found.similarity_NK[rows_N])
        return correction.apply(values_NC[rows_N], correction.consensus(own, values_NC))

    judged_NC = calibration.cross_fitted(part_N, fitted, apply)
    return fitted(np.ones(len(part_N), dtype=bool)), judged_NC


def gain(
    config: CorrectionConfig,
    labels: Labels,
    values_NC: Floats,
    corrected_NC: Floats,
    targets_NC: OneHot,
    fold_N: NDArray[Any],
    part_N: NDArray[Any],
    *,
    groups_N: NDArray[Any] | None = None,
    sure: float = gains.SURE,
) -> Gain:
    """Gain of corrected values over plain ones, or over those drawn to the mean of their fold where these are better.

    Args:
        values_NC: As in `fit`.
        corrected_NC: As `fit` returns them.
        groups_N: Rows of one group, such as a cluster of duplicates, are one witness.
        sure: Confidence that the gain has to have.
    """
    mean_NC = np.empty_like(values_NC)
    for own in _folds(fold_N):
        mean_NC[own] = values_NC[own].mean(0)
    drawn = Correction(0, 1.0, 1.0)
    shrunk_NC = calibration.cross_fitted(
        part_N,
        lambda rows_N: _strength(labels, values_NC[rows_N], mean_NC[rows_N], targets_NC[rows_N]),
        lambda strength, rows_N: replace(drawn, strength=strength).apply(values_NC[rows_N], mean_NC[rows_N]),
    )
    before_NC = min(values_NC, shrunk_NC, key=lambda each_NC: _loss(labels, each_NC, targets_NC))
    return gains.gain(
        labels, before_NC, corrected_NC, targets_NC, least=config.least_gain, sure=sure, groups_N=groups_N
    )


def corrected(
    correction: Correction, values_TC: Floats, rows_TD: Features, asked_ND: Features, said_NC: Floats, fold_N: Ints
) -> Floats:
    """Corrected values (T, C) of rows that no adapter trained on.

    Args:
        values_TC: Their values by all adapters together.
        rows_TD: Their features.
        asked_ND: Features of the labelled rows.
        said_NC: Values of the labelled rows, by adapters that did not train on them.
        fold_N: The fold of each labelled row.
    """
    if not correction.strength or not len(values_TC):
        return values_TC
    said = []
    for own in _folds(fold_N):
        found = nearest(rows_TD, asked_ND[own], correction.neighbours)
        said.append(correction.consensus(found, said_NC[own]))
    return correction.apply(values_TC, np.mean(said, axis=0))


def _same_cluster(cluster_P: Ints, some: slice) -> Mask:
    """Which of all rows are of the cluster of each of some of them; each row is of its own."""
    same_nP: Mask = cluster_P[some, None] == cluster_P
    return same_nP


def _unit(rows_ND: Features) -> Features:
    """Rows of length 1; one of zeros stays."""
    length_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    unit_ND: Features = rows_ND / np.maximum(length_N1, np.finfo(np.float32).tiny)
    return unit_ND


def _folds(fold_N: NDArray[Any]) -> Iterator[Ints]:
    """Numbers of the rows of each fold."""
    for fold in np.unique(fold_N):
        yield np.flatnonzero(fold_N == fold)


def changed(labels: Labels, before_NC: Floats, after_NC: Floats) -> float | None:
    """Share of rows whose predicted class, or any of several, changed; None for numbers."""
    if labels.kind == "number":
        return None
    pairs = zip(labels.predicted(before_NC), labels.predicted(after_NC), strict=True)
    return float(np.mean([before != after for before, after in pairs]))


def require_rows(config: CorrectionConfig, folds: FoldAssignment, cluster_N: Ints) -> None:
    """Raise ConfigError where a fold has fewer rows that a row may ask than are to be asked."""
    for own in _folds(folds.fold_RN[0]) if config.is_on else ():
        others = len(own) - int(np.unique(cluster_N[own], return_counts=True)[1].max())
        if (wanted := max(config.candidates)) > others:
            cure = f"Write correction.neighbours={others} or less" if others else "Leave correction out"
            raise ConfigError(
                f"correction.neighbours: a row asks {wanted} rows of its own fold, and fold "
                f"{folds.names[folds.fold_RN[0, own[0]]]} has {others} beside a row and its near-duplicates. "
                f"{cure}, give more rows, or write a smaller folds.k."
            )


def _fitted(
    config: CorrectionConfig, labels: Labels, values_NC: Floats, targets_NC: OneHot, found: Neighbours, rows_N: Mask
) -> Correction:
    """Fitted to the labels of the rows of a mask. Every row may be asked, as its label is not."""
    own = Neighbours(found.row_NK[rows_N], found.similarity_NK[rows_N])
    plain_nC, targets_nC = values_NC[rows_N], targets_NC[rows_N]

    def tried(neighbours: int, temperature: float) -> tuple[float, Correction]:
        """The lowest loss, and the correction that has it."""
        whole = Correction(neighbours, 1.0, temperature)
        consensus_nC = whole.consensus(own, values_NC)
        strength = config.strength
        if strength is None:
            strength = _strength(labels, plain_nC, consensus_nC, targets_nC)
        found = replace(whole, strength=strength)
        return _loss(labels, found.apply(plain_nC, consensus_nC), targets_nC), found

    temperatures = TEMPERATURES if config.temperature is None else (config.temperature,)
    return min((tried(*each) for each in product(config.candidates, temperatures)), key=itemgetter(0))[1]


def _strength(labels: Labels, plain_nC: Floats, consensus_nC: Floats, targets_nC: OneHot) -> float:
    """The strength with the lowest loss. The loss of each row is convex in it, so that there is one valley."""

    def loss(strength: float) -> float:
        return _loss(labels, (1 - strength) * plain_nC + strength * consensus_nC, targets_nC)

    valley = optimize.minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-4})
    return min(0.0, float(valley.x), key=loss)


def _loss(labels: Labels, values_nC: Floats, targets_nC: OneHot) -> float:
    return float(gains.row_losses(labels, values_nC, targets_nC).mean())
