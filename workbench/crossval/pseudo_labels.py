"""Pseudo-labels: which unlabelled rows a fold's own models are sure of, and what each is worth in training.

Whether they help is no question for this file: out-of-fold rows decide (gains.py).

Legend: M adapters, T teachers, U unlabelled rows, n chosen ones, N rows of any kind, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.crossval import ensembles
from workbench.crossval.ensembles import Combiner, Mask, OutOfFold
from workbench.crossval.fold_adapters import FoldAdapter, FoldContext, RoundOutputs
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation.classification_scores import OneHot

Ints: TypeAlias = NDArray[np.int64]
ROUNDING = 1e-9
"""Shares and multiples are products of rounded numbers: 0.29 * 100 is less than 29."""


@dataclass(frozen=True)
class PseudoLabels:
    """Rows to train on beside a fold's labelled ones."""

    rows: Ints
    """Numbers (n,) of unlabelled rows, ascending."""
    targets_nC: OneHot
    """Each sums to 1."""
    weights_n: Floats
    facts: dict[str, Any]
    """Counts, shares and thresholds, for a JSON file; `summary` takes their means over folds."""
    reason: str
    """Why no row was chosen and what to write instead; empty where one was."""


def choose(
    config: PseudoLabelConfig,
    labels: Labels,
    values_TUC: Floats,
    *,
    labelled_C: Floats,
    round_number: int,
    temperature: float = 1.0,
) -> PseudoLabels:
    """Label the rows whose likeliest class is probable enough and agreed upon; of each class the surest stay.

    The order of the unlabelled rows changes nothing but their numbers, save for which of two rows with the same
    probabilities a cap keeps.

    Args:
        values_TUC: Probabilities. For out-of-fold scores to stay true, only of models that never saw the
            fold's validation rows: those of the same repeat and fold.
        labelled_C: Labelled rows of each class among the fold's training rows.
        round_number: From 1.
        temperature: Of the teachers' mean.
    """
    assert labels.kind in ("one", "pair")
    merged_UC = ensembles.tempered(labels, ensembles.merge(labels.kind, values_TUC, "mean"), temperature)
    if config.align:
        prior_C = labelled_C / labelled_C.sum()
        merged_UC, values_TUC = align(merged_UC, prior_C), align(values_TUC, prior_C)
    class_U = merged_UC.argmax(1)
    threshold_C = thresholds(config, merged_UC)
    agrees_U = (values_TUC.argmax(2) == class_U).mean(0) >= config.agreement - ROUNDING
    sure_U = merged_UC.max(1) >= threshold_C[class_U]
    passed_U = sure_U & agrees_U
    kept_U = passed_U if config.cap is None else passed_U & capped(merged_UC, passed_U, config.cap * labelled_C)
    rows = np.flatnonzero(kept_U)
    kept_nC, class_n = merged_UC[rows], class_U[rows]
    weight = config.weight_in(round_number)
    return PseudoLabels(
        rows=rows,
        targets_nC=(kept_nC if config.labels == "soft" else np.eye(len(labelled_C))[class_n]).astype(np.float32),
        weights_n=np.full(len(rows), weight),
        facts={
            "unlabelled": len(merged_UC),
            "rows": len(rows),
            "share": float(kept_U.mean()),
            "confidence": float(kept_nC.max(1).mean()) if len(rows) else None,
            "classes": dict(zip(labels.names, np.bincount(class_n, minlength=len(threshold_C)).tolist(), strict=True)),
            "thresholds": dict(zip(labels.names, threshold_C.tolist(), strict=True)),
            "teachers": len(values_TUC),
            "sure": float(sure_U.mean()),
            "agreed": float(agrees_U.mean()),
            "capped": int(passed_U.sum() - len(rows)),
            "weight": weight,
        },
        reason="" if len(rows) else _why_none(config, merged_UC, threshold_C, sure_U, passed_U),
    )


def align(values_NC: Floats, prior_C: Floats) -> Floats:
    """Probabilities times prior / mean prediction, made to sum to 1 again: nearer to the prior, rarely on it.

    Berthelot et al. 2020 (ReMixMatch), arXiv:1911.09785, section 3.1. The mean prediction's L1 distance to the prior
    never grows. A row whose every class has prior 0 stays as it is.

    Args:
        values_NC: (N, C), or (T, N, C), where each teacher's rows are aligned on their own.
        prior_C: Shares that the classes are taken to have among these very rows.
    """
    mean_C = values_NC.mean(-2, keepdims=True)
    # Divided first: a value is at most N times its mean, where prior / mean may overflow.
    scaled_NC = np.divide(values_NC, mean_C, out=np.zeros_like(values_NC), where=mean_C > 0) * prior_C
    total_N = scaled_NC.sum(-1, keepdims=True)
    aligned_NC: Floats = np.divide(scaled_NC, total_N, out=values_NC.copy(), where=total_N > 0)
    return aligned_NC


def thresholds(config: PseudoLabelConfig, merged_UC: Floats) -> Floats:
    """Probability (C,) from which a row is taken for a class.

    Adaptive: threshold * b / (2 - b), where b is how many rows reach `threshold` in the class, beside the class that
    most do; never below `floor`. Zhang et al. 2021 (FlexMatch), arXiv:2110.08263, section 3. They go down to 0 and
    may take a wrong label back at the next step; a round here keeps it to the end, which is what the floor is for.
    """
    fixed_C = np.full(merged_UC.shape[1], config.threshold)
    confident_UC = merged_UC[merged_UC.max(1) >= config.threshold]
    if not config.adaptive or not len(confident_UC):
        return fixed_C
    learnt_C = np.bincount(confident_UC.argmax(1), minlength=len(fixed_C))
    share_C = learnt_C / learnt_C.max()
    lowered_C: Floats = np.maximum(fixed_C * share_C / (2 - share_C), config.floor)
    return lowered_C


def capped(merged_UC: Floats, passed_U: Mask, most_C: Floats) -> Mask:
    """The surest of the rows that passed, at most `most` of each class, rounded down."""
    class_U = merged_UC.argmax(1)
    # Rows of one probability stand by their other ones, so that the order of rows decides only between equal rows.
    surest = np.lexsort((*-merged_UC.T, -merged_UC.max(1)))
    kept_U = np.zeros_like(passed_U)
    for number, most in enumerate(most_C):
        of_class = surest[(passed_U & (class_U == number))[surest]]
        kept_U[of_class[: int(most + ROUNDING)]] = True
    return kept_U


def summary(chosen: Sequence[PseudoLabels]) -> dict[str, Any]:
    """The facts of several folds as one: the mean of every number; None where no fold has one."""

    def means(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: means([each[key] for each in values]) for key in values[0]}
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    merged: dict[str, Any] = means([each.facts for each in chosen])
    return merged


def consensus(values_NC: Floats, cluster_N: Ints) -> Floats:
    """Each row's values replaced by the mean of its cluster, such as near-duplicates of the test set.

    Args:
        cluster_N: Cluster of each row; a row of its own stays as it is.
    """
    _, cluster_N, size = np.unique(cluster_N, return_inverse=True, return_counts=True)
    sums = np.zeros((len(size), values_NC.shape[1]))
    np.add.at(sums, cluster_N, values_NC)
    means_NC: Floats = (sums / size[:, None])[cluster_N]
    return means_NC


def choices(
    context: FoldContext,
    data: FoldData,
    members: Sequence[FoldAdapter],
    known: OutOfFold,
    outputs: RoundOutputs,
    *,
    calibrate: bool,
    round_number: int = 1,
) -> list[PseudoLabels]:
    """The pseudo-labels of each adapter, of its fold's own adapters: all others have trained on the fold's rows.

    Args:
        round_number: Of pseudo-labels, from 1.
        outputs: By the adapters of the round before.
        calibrate: Give the teachers' mean a temperature, which is fitted without the fold's rows as well.
    """
    assert outputs.unlabelled_MUC is not None
    labels_by_fold: dict[tuple[int, int], PseudoLabels] = {}
    for each in members:
        repeat, fold, train_N, _ = each.split
        if (repeat, fold) not in labels_by_fold:
            same_M = np.asarray([other.split.repeat == repeat for other in members])
            mine_M = same_M & np.asarray([other.split.fold == fold for other in members])
            # Of each other fold's rows as many adapters speak out of fold as there are teachers here.
            fitted = Combiner(calibrate, "mean").fit(known.only(same_M), outputs.oof_MNC, train_N)
            mine_MUC = outputs.unlabelled_MUC[mine_M]
            labels_by_fold[repeat, fold] = _choose(context, data, mine_MUC, train_N, round_number, fitted.temperature)
    return [labels_by_fold[each.split.repeat, each.split.fold] for each in members]


def all_choices(
    context: FoldContext,
    data: FoldData,
    known: OutOfFold,
    outputs: RoundOutputs,
    *,
    calibrate: bool,
    round_number: int = 1,
) -> PseudoLabels:
    """The pseudo-labels of all adapters together, for one that trains on all rows and is validated on none."""
    assert outputs.unlabelled_MUC is not None
    every_N = np.ones(len(data.rows), dtype=bool)
    fitted = Combiner(calibrate, "mean").fit(known, outputs.oof_MNC, unseen_MUC=outputs.unseen_MUC)
    return _choose(context, data, outputs.unlabelled_MUC, every_N, round_number, fitted.temperature)


def added_rows(data: FoldData, chosen: PseudoLabels) -> LabelledSet | None:
    """Chosen rows as training rows."""
    assert data.unlabelled is not None
    if not len(chosen.rows):
        return None
    return data.unlabelled.subset(chosen.rows).with_targets(chosen.targets_nC).reweighted(chosen.weights_n)


def _choose(
    context: FoldContext, data: FoldData, outputs_MUC: Floats, train_N: Mask, number: int, temperature: float
) -> PseudoLabels:
    return choose(
        context.config.pseudo_label,
        data.labels,
        np.stack([data.labels.values(outputs_UC) for outputs_UC in outputs_MUC]),
        labelled_C=data.rows.targets_NC[train_N].astype(np.float64).sum(0),
        round_number=number,
        temperature=temperature,
    )


def _why_none(config: PseudoLabelConfig, merged_UC: Floats, threshold_C: Floats, sure_U: Mask, passed_U: Mask) -> str:
    if passed_U.any():
        return (
            f"{passed_U.sum()} unlabelled rows would do, but pseudo_label.cap={config.cap:g} times a class's labelled "
            "rows is less than one row. Raise pseudo_label.cap."
        )
    if sure_U.any():
        return (
            f"{sure_U.sum()} of {len(sure_U)} unlabelled rows are sure enough, but about none do "
            f"{config.agreement:.0%} of the models agree. Lower pseudo_label.agreement, or give more labelled rows."
        )
    nearest = (merged_UC.max(1) - threshold_C[merged_UC.argmax(1)]).argmax()
    return (
        f"No unlabelled row is sure enough: the nearest has {merged_UC[nearest].max():.3f} where "
        f"{threshold_C[merged_UC[nearest].argmax()]:.3f} is asked for. Lower pseudo_label.threshold, or give more "
        "labelled rows."
    )
