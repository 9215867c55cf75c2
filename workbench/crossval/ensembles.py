"""One prediction out of those of several members: adapters of a cross-validation, or views of a row.

Merging, weights, temperatures, and fits that no row judges by itself: every fit uses out-of-fold rows.

Legend: M members or adapters, N rows, n rows of a fold, T test rows, X rows of any kind, C outputs (classes, or 1 for a
number), O columns that tell the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from workbench.config.sections.classes_config import Kind
from workbench.crossval import gains
from workbench.data.folds.duplicates import Ints
from workbench.data.folds.stratified_folds import Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError
from workbench.evaluation import chosen_metric, classification_scores
from workbench.evaluation.classification_scores import OneHot, logits

Merging: TypeAlias = Literal["mean", "geometric", "rank", "max"]
Combining: TypeAlias = Literal["mean", "geometric", "rank"]
Mask: TypeAlias = NDArray[np.bool_]
Fitted = TypeVar("Fitted")

COLDEST, HOTTEST = 0.05, 20.0
"""Bounds of a temperature."""
BLIND = 2
"""Rows that join the others as though labelled at random."""
PARTS = 5
"""Parts of the out-of-fold rows: a row is judged by fits on the other parts."""


def merge(
    kind: Kind, values_MNC: Floats, how: Merging, *, weights_M: Floats | None = None, present_MN: Mask | None = None
) -> Floats:
    """Values (N, C) of the members together; classes of one row sum to 1 where they exclude each other.

    Args:
        kind: Of the labels.
        values_MNC: Probabilities, or numbers in their unit; any value where a member is absent.
        how: The mean; the normalised geometric mean of probabilities; the mean of each member's ranks of the rows,
            class by class, which only means something beside other rows; or the largest probability.
        weights_M: Weights of the members in a mean, of any sum; equal by default.
        present_MN: Which members predict which row; by default all of them every row.

    Raises:
        ConfigError: Numbers are to be merged as probabilities.
        ValueError: No member with a weight predicts some row, or weights are given where they have no meaning.
    """
    if kind == "number" and how != "mean":
        raise ConfigError(f"`{how}` merges probabilities of classes, and these labels are numbers. Write `mean`.")
    if weights_M is not None and how not in ("mean", "geometric"):
        raise ValueError(f"`{how}` takes no weights")
    given_M = np.ones(len(values_MNC)) if weights_M is None else weights_M
    if given_M.shape != values_MNC.shape[:1] or (given_M < 0).any():
        raise ValueError("weights must be one number of at least 0 for each member")
    weights_MN = given_M[:, None] * (np.ones(values_MNC.shape[:2]) if present_MN is None else present_MN)
    sum_N = weights_MN.sum(0)
    if not (sum_N > 0).all():
        raise ValueError(f"no member with a weight says anything of row {int((sum_N <= 0).argmax())}")
    weights_MN = weights_MN / sum_N
    present_MN = weights_MN > 0
    # What an absent member left behind may be no number at all.
    values_MNC = np.where(present_MN[:, :, None], values_MNC, 0.0)
    if how == "geometric":
        values_MNC = logits(kind, values_MNC)
    elif how == "rank":
        from scipy import stats  # 0.3 s, which the first step need not wait for

        # Ranks of one member's rows in each class, from 1 / rows to 1; ties share theirs.
        for values_NC, present_N in zip(values_MNC, present_MN, strict=True):
            values_NC[present_N] = stats.rankdata(values_NC[present_N], axis=0) / present_N.sum()
    merged_NC: Floats = values_MNC.max(0) if how == "max" else np.einsum("mn,mnc->nc", weights_MN, values_MNC)
    if how == "geometric":
        return np.asarray(special.expit(merged_NC) if kind == "several" else special.softmax(merged_NC, axis=1))
    return merged_NC / merged_NC.sum(1, keepdims=True) if kind in ("one", "pair") else merged_NC


def cost(labels: Labels, values_NC: Floats, targets_NC: OneHot) -> float:
    """What weights make low: the mean loss, or where a metric is named its score, with the sign that makes it so."""
    if not chosen_metric.judges(labels, targets_NC):
        return float(gains.row_losses(labels, values_NC, targets_NC).mean())
    assert labels.metric is not None
    return (-1 if labels.metric.higher else 1) * chosen_metric.of_targets(labels, values_NC, targets_NC)


def binary(labels: Labels, values_MNC: Floats, targets_NC: OneHot) -> tuple[Floats, OneHot]:
    """Values and targets of exclusive classes as of two, the true one and all others together, for the same loss of
    means at less work; as they are for other labels, and where a metric decides."""
    if labels.kind not in ("one", "pair") or chosen_metric.judges(labels, targets_NC):
        return values_MNC, targets_NC
    true_MN1 = np.take_along_axis(values_MNC, targets_NC.argmax(1)[None, :, None], axis=2)
    return np.concatenate([true_MN1, 1 - true_MN1], axis=2), np.tile(
        np.eye(2, dtype=np.float32)[0], (len(targets_NC), 1)
    )


def greedy(labels: Labels, values_MNC: Floats, targets_NC: OneHot, *, rounds: int = 50) -> Floats:
    """Weights of a mean, of sum 1: each round adds once more the member that lowers the `cost` most.

    It starts with every member in once and returns the best weights on its way, so that on these rows they are never
    worse than the plain mean. On other rows they may be: fit them on rows that no member was trained on.
    Caruana et al. 2004, "Ensemble selection from libraries of models", with replacement.

    Args:
        labels: Their kind.
        values_MNC: Probabilities, or numbers in their unit.
        targets_NC: What Labels.targets gives.
        rounds: Members that join, at most.
    """
    values_MNO, targets_NO = binary(labels, values_MNC, targets_NC)
    sum_NO, times_M = values_MNO.sum(0), np.ones(len(values_MNC))
    best_M: Floats = times_M / times_M.sum()
    lowest = cost(labels, sum_NO / times_M.sum(), targets_NO)
    for _ in range(rounds):
        costs = [cost(labels, (sum_NO + own_NO) / (times_M.sum() + 1), targets_NO) for own_NO in values_MNO]
        chosen = int(np.argmin(costs))
        sum_NO = sum_NO + values_MNO[chosen]
        times_M[chosen] += 1
        if costs[chosen] < lowest:
            lowest, best_M = costs[chosen], times_M / times_M.sum()
    return best_M


def temperature(labels: Labels, outputs_NC: Floats, targets_NC: OneHot) -> float:
    """The number by which to divide logits so that their loss is lowest; 1 for numbers, which claim no confidence.

    Guo et al. 2017, arXiv:1706.04599, section 4.2. Two blind rows join the N ones, as in Platt 1999, because N rows
    that are all right would ask for a confidence without bound. Never a temperature with a higher loss than 1 has.
    """
    if labels.kind == "number":
        return 1.0
    rows = len(targets_NC)
    soft_NC = (rows * targets_NC.astype(np.float64) + BLIND * classification_scores.random_target(labels)) / (
        rows + BLIND
    )
    optimum = optimize.minimize_scalar(
        lambda log: classification_scores.loss(labels, outputs_NC / math.exp(log), soft_NC),
        bounds=(math.log(COLDEST), math.log(HOTTEST)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    best = math.exp(optimum.x)
    plain, tempered = (classification_scores.loss(labels, outputs_NC / each, targets_NC) for each in (1.0, best))
    return best if tempered < plain else 1.0


def tempered(labels: Labels, values_NC: Floats, temperature: float) -> Floats:
    """Values (N, C) whose logits are divided by a temperature."""
    if temperature == 1:
        return values_NC
    return labels.values(classification_scores.outputs_of_values(labels, values_NC) / temperature)


def confidence(kind: Kind, values_NC: Floats) -> float:
    """Mean probability of the likeliest class, or, where several may hold, of the likelier answer on each class."""
    return float((np.maximum(values_NC, 1 - values_NC) if kind == "several" else values_NC.max(1)).mean())


def matched_temperature(labels: Labels, merged_UC: Floats, outputs_MUC: Floats, single: float) -> float:
    """The temperature with which merged values are as sure, on average, as calibrated members are alone.

    Members are less sure together, by as much as they disagree. No labelled row shows by how much, because all but one
    member of each split have trained on it; rows without labels do. The mean is right at least as often as a member is,
    so that this claims too little rather than too much (`scripts/bench/calibration.py` compares other rules).

    Args:
        merged_UC: Merged values of U rows that no member trained on.
        outputs_MUC: Those of the members.
        single: Temperature of single members.
    """
    wanted = np.mean([confidence(labels.kind, labels.values(outputs_UC / single)) for outputs_UC in outputs_MUC])

    def excess(log: float) -> float:
        return confidence(labels.kind, tempered(labels, merged_UC, math.exp(log))) - float(wanted)

    coldest, hottest = math.log(COLDEST), math.log(HOTTEST)
    if excess(coldest) <= 0:
        return COLDEST
    return HOTTEST if excess(hottest) >= 0 else math.exp(optimize.brentq(excess, coldest, hottest, xtol=1e-6))


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


@dataclass(frozen=True)
class OutOfFold:
    """The labelled rows, and which adapters predict which: those that did not train on it."""

    labels: Labels
    targets_NC: OneHot
    present_MN: Mask
    part_N: Ints
    """Rows of one part are judged by what was fitted on the other parts. Parts cut across folds: an adapter predicts
    its own fold alone, so that nothing fitted without that fold could weigh it."""

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
    """Of the merged values: each member's own one would leave their mean too unsure."""
    how: Combining

    def values(self, labels: Labels, outputs_MXC: Floats, present_MX: Mask | None = None) -> Floats:
        """One prediction (X, C) of outputs."""
        values_MXC = np.stack([labels.values(outputs_XC) for outputs_XC in outputs_MXC])
        merged_XC = merge(labels.kind, values_MXC, self.how, present_MN=present_MX)
        return tempered(labels, merged_XC, self.temperature)


@dataclass(frozen=True)
class Combiner:
    """How outputs become one prediction."""

    calibrate: bool
    how: Combining

    def fit(
        self,
        known: OutOfFold,
        outputs_MNC: Floats,
        mask_N: Mask | None = None,
        *,
        unseen_MUC: Floats | None = None,
    ) -> FittedCombination:
        """A temperature, from the rows of the mask, or from all.

        Args:
            unseen_MUC: Outputs for rows that no adapter trained on, for a temperature of all adapters together.
                Without them it is that of the adapters that predict a row out of fold together, of which there is one
                where folds have neither seeds nor repeats.
        """
        mask_N = np.ones(len(known.targets_NC), dtype=bool) if mask_N is None else mask_N
        present_MX, outputs_MXC = known.present_MN[:, mask_N], outputs_MNC[:, mask_N]
        labels, targets_XC = known.labels, known.targets_NC[mask_N]
        plain = FittedCombination(1.0, self.how)
        if not self.calibrate:
            return plain
        if unseen_MUC is None:
            merged_XC = plain.values(labels, outputs_MXC, present_MX)
            heat = temperature(labels, classification_scores.outputs_of_values(labels, merged_XC), targets_XC)
        else:
            single = self.single_temperature(known, outputs_MNC, mask_N)
            heat = matched_temperature(labels, plain.values(labels, unseen_MUC), unseen_MUC, single)
        return plain._replace(temperature=heat)

    def single_temperature(self, known: OutOfFold, outputs_MNC: Floats, mask_N: Mask) -> float:
        """Temperature of adapters that answer alone, each fitted on its own rows of the mask."""
        member, row = np.nonzero(known.present_MN & mask_N)
        return temperature(known.labels, outputs_MNC[member, row], known.targets_NC[row]) if self.calibrate else 1.0

    def out_of_fold(self, known: OutOfFold, outputs_MNC: Floats, shown_MNC: Floats | None = None) -> Floats:
        """Values (N, C) of the labelled rows, each part's by what was fitted on the others.

        Args:
            outputs_MNC: Fitted on.
            shown_MNC: Made one prediction, where that is another view of the rows.
        """
        said_MNC = outputs_MNC if shown_MNC is None else shown_MNC
        return cross_fitted(
            known.part_N,
            lambda mask_N: self.fit(known, outputs_MNC, mask_N),
            lambda fitted, mask_N: fitted.values(known.labels, said_MNC[:, mask_N], known.present_MN[:, mask_N]),
        )


def candidates(wanted: Literal["auto", "mean", "geometric", "rank"], known: OutOfFold) -> tuple[Combining, ...]:
    """Alternatives to the mean; none where no row has two predictions, so that out-of-fold rows could not tell."""
    if wanted != "auto":
        return () if wanted == "mean" else (wanted,)
    several = bool((known.present_MN.sum(0) > 1).any())
    return ("geometric",) if several and known.labels.kind != "number" else ()
