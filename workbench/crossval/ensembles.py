"""One prediction out of those of several members: adapters of a bank, or views of a row.

Legend: M members, N rows, C outputs (classes, or 1 for a number), O columns that tell the loss.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from workbench.config.sections.classes_config import Kind
from workbench.crossval import gains
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError
from workbench.evaluation.target_scores import OneHot, logits

How: TypeAlias = Literal["mean", "geometric", "rank", "max"]
Mask: TypeAlias = NDArray[np.bool_]


def merge(
    kind: Kind, values_MNC: Floats, how: How, *, weights_M: Floats | None = None, present_MN: Mask | None = None
) -> Floats:
    """Values (N, C) of the members together; classes of one row sum to 1 where they exclude each other.

    Args:
        kind: Of the labels.
        values_MNC: Probabilities, or numbers in their unit. What stands where a member is absent does not matter.
        how: The mean; the normalised geometric mean of probabilities; the mean of each member's ranks of the rows,
            class by class, which only means something beside other rows; or the largest probability.
        weights_M: How much members count in a mean, of any sum; all alike by default.
        present_MN: Which members say something of which row; by default all of every row.

    Raises:
        ConfigError: Numbers are to be merged as probabilities.
        ValueError: Of a row no member with a weight says anything, or weights are given where they have no meaning.
    """
    if kind == "number" and how != "mean":
        raise ConfigError(f"`{how}` merges probabilities of classes, and these labels are numbers. Write `mean`.")
    if weights_M is not None and how not in ("mean", "geometric"):
        raise ValueError(f"`{how}` takes no weights")
    weights_MN = _weights(values_MNC, weights_M, present_MN)
    present_MN1 = (weights_MN > 0)[:, :, None]
    # What an absent member left behind may be no number at all.
    values_MNC = np.where(present_MN1, values_MNC, 0.0)
    if how == "geometric":
        return _geometric(kind, values_MNC, weights_MN)
    if how == "max":
        return _shares(kind, values_MNC.max(0))
    if how == "rank":
        values_MNC = np.stack([_ranks(*each) for each in zip(values_MNC, present_MN1[:, :, 0], strict=True)])
    return _shares(kind, _mean(values_MNC, weights_MN))


def _weights(values_MNC: Floats, weights_M: Floats | None, present_MN: Mask | None) -> Floats:
    """The share of each member in each row, (M, N)."""
    given_M = np.ones(len(values_MNC)) if weights_M is None else weights_M
    if given_M.shape != values_MNC.shape[:1] or (given_M < 0).any():
        raise ValueError("weights must be one number of at least 0 for each member")
    heard_MN = np.ones(values_MNC.shape[:2]) if present_MN is None else present_MN
    weights_MN = given_M[:, None] * heard_MN
    sum_N = weights_MN.sum(0)
    if not (sum_N > 0).all():
        raise ValueError(f"no member with a weight says anything of row {int((sum_N <= 0).argmax())}")
    shares_MN: Floats = weights_MN / sum_N
    return shares_MN


def _mean(values_MNC: Floats, weights_MN: Floats) -> Floats:
    mean_NC: Floats = np.einsum("mn,mnc->nc", weights_MN, values_MNC)
    return mean_NC


def _geometric(kind: Kind, p_MNC: Floats, weights_MN: Floats) -> Floats:
    mean_NC = _mean(logits(kind, p_MNC), weights_MN)
    p_NC: Floats = special.expit(mean_NC) if kind == "several" else special.softmax(mean_NC, axis=1)
    return p_NC


def _ranks(values_NC: Floats, present_N: Mask) -> Floats:
    """Ranks of one member's rows in each class, from 1 / rows to 1; ties share theirs."""
    from scipy import stats  # 0.3 s, which the first step need not wait for

    ranks_NC = np.zeros_like(values_NC)
    ranks_NC[present_N] = stats.rankdata(values_NC[present_N], axis=0) / present_N.sum()
    return ranks_NC


def _shares(kind: Kind, values_NC: Floats) -> Floats:
    """Rows that sum to 1, where classes exclude each other."""
    return values_NC / values_NC.sum(1, keepdims=True) if kind in ("one", "pair") else values_NC


def greedy(
    labels: Labels, values_MNC: Floats, targets_NC: OneHot, *, present_MN: Mask | None = None, rounds: int = 50
) -> Floats:
    """Weights of a mean, of sum 1: in each round the member joins, once more, that lowers the mean loss most.

    It starts with every member in once and returns the best weights on its way, so that on these rows they are never
    worse than the plain mean. On other rows they may be: fit them on rows that no member was trained on.
    Caruana et al. 2004, "Ensemble selection from libraries of models", with replacement.

    Args:
        labels: Their kind.
        values_MNC: Probabilities, or numbers in their unit.
        targets_NC: What Labels.targets gives.
        present_MN: Which members say something of which row; by default all of every row.
        rounds: Members that join, at most.
    """
    members = len(values_MNC)
    even_M = np.full(members, 1 / members)
    heard_MN = np.ones(values_MNC.shape[:2], dtype=bool) if present_MN is None else present_MN
    if (heard_MN.sum(0) == 1).all():
        return even_M  # every row has one voice, so that no row tells members apart
    values_MNO, targets_NO = _telling(labels, values_MNC, targets_NC)
    voices_MNO = np.where(heard_MN[:, :, None], values_MNO, 0.0)
    sum_NO, heard_N, times_M = voices_MNO.sum(0), heard_MN.sum(0).astype(np.float64), np.ones(members)

    def loss(sum_NO: Floats, heard_N: Floats) -> float:
        return float(gains.row_losses(labels, sum_NO / heard_N[:, None], targets_NO).mean())

    lowest, best_M = loss(sum_NO, heard_N), even_M
    for _ in range(rounds):
        losses = [loss(sum_NO + voices_MNO[m], heard_N + heard_MN[m]) for m in range(members)]
        chosen = int(np.argmin(losses))
        sum_NO, heard_N = sum_NO + voices_MNO[chosen], heard_N + heard_MN[chosen]
        times_M[chosen] += 1
        if losses[chosen] < lowest:
            lowest, best_M = losses[chosen], times_M / times_M.sum()
    return best_M


def _telling(labels: Labels, values_MNC: Floats, targets_NC: OneHot) -> tuple[Floats, OneHot]:
    """Exclusive classes as two: the true one, and all others together, which have the same loss."""
    if labels.kind not in ("one", "pair"):
        return values_MNC, targets_NC
    true_MN1 = np.take_along_axis(values_MNC, targets_NC.argmax(1)[None, :, None], axis=2)
    first_N2 = np.tile(np.eye(2, dtype=np.float32)[0], (len(targets_NC), 1))
    return np.concatenate([true_MN1, 1 - true_MN1], axis=2), first_N2
