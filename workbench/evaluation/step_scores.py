"""Ratings of the steps of answers, and how well they find what is wrong.

Legend: S steps of a set, R its answers, T steps of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from scipy import special

from workbench.config.sections.reward_config import Aggregate
from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.text.stepwise import RIGHT, StepSet
from workbench.evaluation import bootstrap, class_scores
from workbench.evaluation.class_scores import Interval
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows
from workbench.models.reward_model import RewardModel
from workbench.runs import units

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
AGGREGATES: dict[Aggregate, Callable[[Floats], float]] = {
    "min": lambda p_T: float(p_T.min()),
    "product": lambda p_T: float(p_T.prod()),
    "mean": lambda p_T: float(p_T.mean()),
    "last": lambda p_T: float(p_T[-1]),
}
"""The reward of an answer from the probabilities that its steps are right."""


def read(model: RewardModel, rows: StepSet, *, scoring: ModelResults | None = None) -> Floats:
    """Logit (S,) that each step is right, answer by answer.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        logits = model.step_logits(rows.batch(numbers).to(device)).double().cpu()
        return [each.tolist() for each in logits.split(rows.steps[numbers].tolist())]

    by_row = over_rows(model.model, rows.lengths, compute, scoring=scoring, content=_content(rows))
    return np.asarray([logit for row in range(len(rows)) for logit in by_row[row]], dtype=np.float64)


def _content(rows: StepSet) -> Iterator[np.ndarray[Any, Any]]:
    for number in range(len(rows)):
        yield from (rows.answers[number].input_ids, rows.answers[number].supervised)


def aggregated(rows: StepSet, p_S: Floats, how: Aggregate) -> Floats:
    """The reward (R,) of each answer from the probabilities of its steps."""
    parts = np.split(p_S, np.cumsum(rows.steps)[:-1])
    return np.asarray([AGGREGATES[how](part) for part in parts], dtype=np.float64)


def summary(rows: StepSet, logit_S: Floats) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first, the mean over steps, without weights.

    A step counts as right from a probability, or a soft label, of 0.5 on. accuracy is over steps, with Wilson's 95 %
    interval for as many steps as would be independent, since those of one answer are not (Kish 1965). error_found is
    the share of answers with a wrong step of which the first one is found, and all_right the share of answers without
    one in which none is found; `f1` is their harmonic mean (Zheng et al. 2024, arXiv:2412.06559), with an interval by
    bootstrap over answers. `auc_min` and the like tell how well the aggregate of an answer's steps parts answers
    without a wrong step from the others.
    """
    p_S, label_S = special.expit(logit_S), rows.labels
    hit_S = (p_S >= RIGHT) == (label_S >= RIGHT)
    entropy_S = -label_S * special.log_expit(logit_S) - (1 - label_S) * special.log_expit(-logit_S)
    accuracy = clustered_interval(hit_S, rows.row_of_step)
    p_S2 = np.stack([1 - p_S, p_S], axis=1)
    score_by_name = {
        "loss": float(entropy_S.mean()),
        "accuracy": accuracy.mean,
        "accuracy_low": accuracy.low,
        "accuracy_high": accuracy.high,
        "brier": float(((p_S - label_S) ** 2).mean()),
        "calibration_error": class_scores.calibration_error(p_S2, (label_S >= RIGHT).astype(np.int64)),
    }
    first_R, found_R = first_wrong(rows, label_S < RIGHT), first_wrong(rows, p_S < RIGHT)
    shares = []
    for name, own_R in (("error_found", first_R >= 0), ("all_right", first_R < 0)):
        if own_R.any():
            interval = class_scores.accuracy_interval(int((found_R == first_R)[own_R].sum()), int(own_R.sum()))
            score_by_name |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            shares.append(interval.mean)
    if len(shares) == 2:
        score_by_name["f1"] = 2 * shares[0] * shares[1] / sum(shares) if sum(shares) else 0.0
        low, high = _f1_bounds(first_R >= 0, found_R == first_R)
        score_by_name |= {"f1_low": low, "f1_high": high}
        for how in get_args(Aggregate):
            score_by_name[f"auc_{how}"] = _auc(aggregated(rows, p_S, how), first_R < 0)
    return units.rounded(score_by_name)


def of_sets(rows: StepSet, logit_S: Floats) -> dict[str, float]:
    """`summary` of all rows, and of each of several sets among them."""
    each = named_sets.scored(rows, lambda own: summary(rows.subset(own), logit_S[rows.steps_of(own)]))
    return summary(rows, logit_S) | each


def baseline(train: StepSet, rows: StepSet) -> dict[str, float]:
    """Scores of one probability for all steps, the mean label of the training steps: a fresh head says nothing."""
    share = float(np.clip(train.labels.mean(), 1e-6, 1 - 1e-6))
    scores = of_sets(rows, np.full(len(rows.labels), special.logit(share)))
    return {name: value for name, value in scores.items() if not name.partition("[")[0].endswith(("_low", "_high"))}


def first_wrong(rows: StepSet, wrong_S: Bools) -> Indices:
    """Number of the first wrong step of each answer (R,), -1 where all are right."""
    starts = np.cumsum(rows.steps) - rows.steps
    place_S = np.where(wrong_S, np.arange(len(wrong_S)) - starts[rows.row_of_step], np.iinfo(np.int64).max)
    first_R: Indices = np.minimum.reduceat(place_S, starts)
    return np.where(first_R == np.iinfo(np.int64).max, -1, first_R)


def clustered_interval(hit_S: Bools, row_of_step: Indices) -> Interval:
    """Share of hits with Wilson's interval for the effective number of steps, of which those of an answer are alike.

    The variance of the share is that of a ratio of sums over answers; by how much it is above that of independent
    steps is the design effect, 1 at least.
    """
    count, share = len(hit_S), float(hit_S.mean())
    rest_R = np.bincount(row_of_step, weights=hit_S - share)
    answers, independent = len(rest_R), share * (1 - share) / count
    variance = float((rest_R**2).sum()) / count**2 * answers / max(1, answers - 1)
    effect = max(1.0, variance / independent) if independent else 1.0
    effective = max(1.0, count / effect)
    return class_scores.accuracy_interval(share * effective, effective)


def _f1_bounds(wrong_R: Bools, right_R: Bools) -> tuple[float, float]:
    """The interval of `f1` (bootstrap over answers); resamples without one of the two sorts have none."""
    # Kinds: without a wrong step and missed, found; with one and missed, found.
    count_K = np.bincount(2 * wrong_R + right_R, minlength=4)
    drawn_RK = np.concatenate(list(bootstrap.resampled(count_K)))
    with np.errstate(invalid="ignore"):
        all_right_R, error_found_R = (drawn_RK[:, n + 1] / drawn_RK[:, n : n + 2].sum(1) for n in (0, 2))
        f1_R = 2 * all_right_R * error_found_R / (all_right_R + error_found_R)
    f1_R[all_right_R + error_found_R == 0] = 0.0
    (interval,) = bootstrap.bounds(f1_R[:, None])
    return interval


def _auc(reward_R: Floats, right_R: Bools) -> float:
    from sklearn import metrics

    return float(metrics.roc_auc_score(right_R, reward_R))
