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
them nor it. Its consensus is the mean over folds of what each fold's rows say, each as it was fitted. Near-duplicates
share a fold, so that they ask each other.

Any mean shrinks predictions, and shrunk ones may have a lower loss whoever was asked. So the correction is held against
predictions that are drawn to the mean of all rows of their fold, by a strength that is fitted in the same way.

Legend: N labelled rows, T other rows, P rows that are asked, K neighbours of a row, the nearest first, D features, C
outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Iterator
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

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""From which one is chosen: at 0.01 hardly more than the nearest row counts, at 1 all neighbours count alike."""


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


def nearest(asked_PD: Features, count: int, rows_ND: Features | None = None) -> Neighbours:
    """The nearest of the rows that are asked, for each of some rows; without `rows_ND` for each of themselves.

    Args:
        asked_PD: At least `count` rows, and one more where they are compared with themselves: no row is its own
            neighbour, and each of equal rows is one of the others.
    """
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=count, metric="cosine", algorithm="brute").fit(asked_PD)
    distance_NK, row_NK = search.kneighbors(rows_ND)
    return Neighbours(row_NK.astype(np.int64), 1 - distance_NK.astype(np.float64))


def within_folds(features_ND: Features, fold_N: NDArray[Any], count: int) -> Neighbours:
    """The nearest rows of each row's own fold, numbered among all rows."""
    row_NK = np.empty((len(fold_N), count), dtype=np.int64)
    similarity_NK = np.empty((len(fold_N), count))
    for own in _folds(fold_N):
        found = nearest(features_ND[own], count)
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
        found = nearest(asked_ND[own], correction.neighbours, rows_TD)
        said.append(correction.consensus(found, said_NC[own]))
    return correction.apply(values_TC, np.mean(said, axis=0))


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


def require_rows(config: CorrectionConfig, folds: FoldAssignment) -> None:
    """Raise ConfigError where a fold has fewer rows beside a row than are asked for."""
    names, counts = np.unique(folds.fold_RN[0], return_counts=True)
    fewest = int(counts.argmin())
    others, wanted = int(counts[fewest]) - 1, max(config.candidates, default=0)
    if wanted > others:
        cure = f"Write correction.neighbours={others} or less" if others else "Leave correction out"
        raise ConfigError(
            f"correction.neighbours: {wanted} rows of a row's own fold are asked, and fold "
            f"{folds.names[int(names[fewest])]} has {others} beside it. {cure}, or give more rows or fewer folds.k."
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
