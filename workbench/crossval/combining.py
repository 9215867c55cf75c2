"""One prediction from the adapters of a cross-validation; every fit uses out-of-fold rows.

Legend: M adapters, N labelled rows, T test rows, U unlabelled rows, X rows of any kind, C outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from workbench.crossval import calibration, ensembles
from workbench.crossval.ensembles import Mask
from workbench.data.folds.duplicates import Ints
from workbench.data.folds.stratified_folds import Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation.target_scores import OneHot

How = Literal["mean", "geometric", "rank", "greedy"]
PARTS = 5
"""Parts of the out-of-fold rows: a row is judged by fits on the other parts."""


@dataclass(frozen=True)
class OutOfFold:
    """The labelled rows, and which adapter may speak of which: those that did not train on it."""

    labels: Labels
    targets_NC: OneHot
    present_MN: Mask
    part_N: Ints
    """Rows of one part are judged by what was fitted on the other parts. Parts cut across folds: an adapter speaks of
    its own fold alone, and could not be told from others by what is fitted without that fold."""

    def only(self, member_M: Mask) -> OutOfFold:
        """The same with some of the adapters."""
        return replace(self, present_MN=self.present_MN & member_M[:, None])


def out_of_fold(
    labels: Labels, targets_NC: OneHot, splits: Sequence[Split], *, cluster_N: Ints, seed: int
) -> OutOfFold:
    """For adapters that trained on `splits`; rows of a cluster of near-duplicates share a part."""
    _, cluster_N = np.unique(cluster_N, return_inverse=True)
    part_of = np.random.default_rng([seed, 4]).permutation(cluster_N.max() + 1) % PARTS
    return OutOfFold(labels, targets_NC, np.stack([split.validation_N for split in splits]), part_of[cluster_N])


class FittedCombination(NamedTuple):
    """Parameters that were fitted to out-of-fold rows."""

    temperature: float
    how: How
    weights_M: Floats | None

    def values(self, labels: Labels, outputs_MXC: Floats, present_MX: Mask | None = None) -> Floats:
        """One prediction (X, C) of outputs."""
        calibrated_MXC = np.stack([labels.values(outputs_XC / self.temperature) for outputs_XC in outputs_MXC])
        how = "mean" if self.how == "greedy" else self.how
        return ensembles.merge(labels.kind, calibrated_MXC, how, weights_M=self.weights_M, present_MN=present_MX)


@dataclass(frozen=True)
class Combiner:
    """How outputs become one prediction."""

    calibrate: bool
    how: How

    def fit(self, known: OutOfFold, outputs_MNC: Floats, mask_N: Mask | None = None) -> FittedCombination:
        """Temperature and weights, from the rows of the mask, or from all."""
        mask_N = np.ones(len(known.targets_NC), dtype=bool) if mask_N is None else mask_N
        present_MX, outputs_MXC, targets_XC = (
            known.present_MN[:, mask_N],
            outputs_MNC[:, mask_N],
            known.targets_NC[mask_N],
        )
        fitted_temperature = (
            self.temperature(known.labels, outputs_MXC, targets_XC, present_MX) if self.calibrate else 1.0
        )
        if self.how != "greedy":
            return FittedCombination(fitted_temperature, self.how, None)
        calibrated_MXC = np.stack([known.labels.values(outputs_XC / fitted_temperature) for outputs_XC in outputs_MXC])
        weights_M = ensembles.greedy(known.labels, calibrated_MXC, targets_XC, present_MN=present_MX)
        return FittedCombination(fitted_temperature, self.how, weights_M)

    @staticmethod
    def temperature(labels: Labels, outputs_MXC: Floats, targets_XC: OneHot, present_MX: Mask) -> float:
        """Temperature of the predictions of all adapters, each on its own rows."""
        member, row = np.nonzero(present_MX)
        return calibration.temperature(labels, outputs_MXC[member, row], targets_XC[row])

    def out_of_fold(self, known: OutOfFold, outputs_MNC: Floats, shown_MNC: Floats | None = None) -> Floats:
        """Values (N, C) of the labelled rows, each part's by what was fitted on the others.

        Args:
            outputs_MNC: Fitted on.
            shown_MNC: Made one prediction, where that is another view of the rows.
        """
        said_MNC = outputs_MNC if shown_MNC is None else shown_MNC
        return calibration.cross_fitted(
            known.part_N,
            lambda mask_N: self.fit(known, outputs_MNC, mask_N),
            lambda fitted, mask_N: fitted.values(known.labels, said_MNC[:, mask_N], known.present_MN[:, mask_N]),
        )


def candidates(wanted: Literal["auto", "mean", "geometric", "rank", "greedy"], known: OutOfFold) -> tuple[How, ...]:
    """Alternatives to the mean; none where no row has two predictions, so that out-of-fold rows could not tell."""
    if wanted != "auto":
        return () if wanted == "mean" else (wanted,)
    several = bool((known.present_MN.sum(0) > 1).any())
    return ("geometric", "greedy") if several and known.labels.kind != "number" else ()
