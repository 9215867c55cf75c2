"""Whether one prediction is better than another one of the same rows, and how scores vary over folds.

Legend: N rows, G groups of rows that are not independent, K folds, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import chosen_metric, classification_scores
from workbench.evaluation.classification_scores import OneHot

SURE = 0.95
"""Confidence of an interval; each of its bounds is wrong in 2.5 of 100 samples."""
SWAPS = 400
"""Permutations by which the change of a metric is judged; each costs two calls."""


@dataclass(frozen=True)
class Gain:
    """Change of the loss of the same rows."""

    loss_before: float
    loss_after: float
    difference: float
    """Mean of after - before, so that below 0 is better."""
    low: float
    high: float
    """95 % interval of the difference over new rows, of these adapters; training them again is no part of it."""
    accuracy_before: float | None
    """Share of rows that are right; None for numbers."""
    accuracy_after: float | None
    accepted: bool
    reason: str = ""
    """Reason against it; empty where it is accepted."""
    sure: float = SURE
    """Confidence that was asked of it, above 0.95 where several stages are judged on the same rows."""
    kept: bool = False
    """Accepted against the reason, as the configuration names the stage."""
    score: str = ""
    """Change of the score of `evaluate.metric`, in words, where that was judged in place of the loss."""

    @property
    def sentence(self) -> str:
        """For a person."""
        moved = "falls" if self.difference < 0 else "rises" if self.difference > 0 else "stays"
        right = ""
        if self.accuracy_before is not None and self.accuracy_after is not None:
            right = f", accuracy {self.accuracy_before:.2%} -> {self.accuracy_after:.2%}"
        return (
            f"The loss {moved}, {self.loss_before:.4f} -> {self.loss_after:.4f} (difference {self.difference:+.4f}, "
            f"95 % interval {self.low:+.4f} to {self.high:+.4f}){right}. {self.verdict}"
        )

    @property
    def verdict(self) -> str:
        """The change of the metric, where one is named, and what was decided."""
        asked = f" at {self.sure:.1%} confidence, for one stage of several" if self.sure > SURE else ""
        if not self.reason and (self.accuracy_after or 0.0) < (self.accuracy_before or 0.0):
            asked += ", although fewer rows are right, by no more than chance explains"
        verdict = f"Refused{asked}: {self.reason}." if self.reason else f"Accepted{asked}."
        verdict += " Kept, as the configuration names it." if self.kept else ""
        return f"{self.score and f'{self.score}. '}{verdict}"


def gain(
    labels: Labels,
    before_NC: Floats,
    after_NC: Floats,
    targets_NC: OneHot,
    *,
    least: float = 0.0,
    sure: float = SURE,
    groups_N: NDArray[Any] | None = None,
) -> Gain:
    """Compare two predictions of the same rows, row by row, and decide whether the second one may stay.

    It stays if the mean loss falls by more than `least`, the whole interval of the difference is below 0, and
    the rows that became wrong do not outnumber those that became right by more than a fair coin explains (McNemar's
    exact test at 2.5 %, over groups). Where `labels` has a metric, its score decides alone: it is better, by more than
    swapping the two predictions in groups drawn at random explains (a permutation test, whose deviation also gives the
    interval). This judges two predictions, so of anything that was fitted they must come from `ensembles.cross_fitted`:
    then a stage that only overfits has a loss that does not fall.

    Args:
        labels: Their kind.
        before_NC: Values of the rows without the change, as Labels.values gives.
        after_NC: Values with it.
        targets_NC: What Labels.targets gives.
        least: How far the loss has to fall to be worth the change, nats a row (for numbers, of their variance).
        sure: Of the interval that has to be below 0; what is told is the 95 % one. 0: any fall is enough.
        groups_N: Rows of the same group, such as a cluster of duplicates, count as one witness.

    Raises:
        ValueError: All rows are of one group.
    """
    from scipy import stats  # 0.3 s, which the first step need not wait for

    group_N = np.arange(len(targets_NC)) if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    if group_N.max() == 0:
        raise ValueError("a gain takes rows of two groups or more")
    loss_before, loss_after = (float(row_losses(labels, each, targets_NC).mean()) for each in (before_NC, after_NC))
    difference = loss_after - loss_before
    # The difference of two losses is linear in the target for every kind, so a mean target does for all labels.
    blind_NC = np.full(targets_NC.shape, classification_scores.random_target(labels))
    change_N, blind_N = (
        row_losses(labels, after_NC, wanted_NC) - row_losses(labels, before_NC, wanted_NC)
        for wanted_NC in (targets_NC, blind_NC)
    )
    # Large groups count more; the spread of these numbers is that of the mean (Liang and Zeger 1986).
    mean, rows_G = float(change_N.mean()), np.bincount(group_N)
    change_G = mean + np.bincount(group_N, change_N - mean) / rows_G.mean()
    # Rows that are all right would let any confidence pass: the mistake that none of them shows has to fit in.
    changes = np.append(change_G, max(float(blind_N.mean()), 0.0))
    low, high = _interval(changes)
    _, most = _interval(changes, sure=sure)
    right_before_N, right_after_N = _right(labels, before_NC, targets_NC), _right(labels, after_NC, targets_NC)
    reason = ""
    if difference >= 0:
        reason = "the loss does not fall"
    elif difference >= -least:
        reason = f"the loss falls by no more than the {least:g} asked for"
    elif sure and most >= 0:
        # The interval shrinks with the root of the rows; the groups that it takes to end below 0.
        needed = len(rows_G) * (1 - most / difference) ** 2
        reason = f"chance may explain so small a fall (about {math.ceil(needed):,} rows would tell, were it to last)"
    else:
        # Do groups with fewer right rows outnumber those with more by what a fair coin shows in less than 2.5 %?
        net_G = np.bincount(group_N, right_after_N.astype(np.float64) - right_before_N)
        lost, moved = int((net_G < 0).sum()), int((net_G != 0).sum())
        if moved and float(stats.binomtest(lost, moved, alternative="greater").pvalue) < (1 - SURE) / 2:
            reason = "fewer rows are right, and chance does not explain that"
    counted = labels.kind != "number"
    score = ""
    if chosen_metric.judges(labels, targets_NC):
        score, reason = _of_metric(labels, before_NC, after_NC, targets_NC, group_N, sure=sure)
    return Gain(
        loss_before=loss_before,
        loss_after=loss_after,
        difference=difference,
        low=min(low, difference),
        high=max(high, difference),
        accuracy_before=float(right_before_N.mean()) if counted else None,
        accuracy_after=float(right_after_N.mean()) if counted else None,
        accepted=not reason,
        reason=reason,
        sure=sure,
        score=score,
    )


def _of_metric(
    labels: Labels, before_NC: Floats, after_NC: Floats, targets_NC: OneHot, group_N: NDArray[Any], *, sure: float
) -> tuple[str, str]:
    """The change of the score of `evaluate.metric` in words, and the reason against it; empty where it is better."""
    from scipy import stats

    assert labels.metric is not None
    title, sign = labels.metric.title, 1 if labels.metric.higher else -1
    before, after = (chosen_metric.of_targets(labels, each, targets_NC) for each in (before_NC, after_NC))
    chance, drawn = np.random.default_rng(0), np.empty(SWAPS)
    for swap in range(SWAPS):
        swapped_N1 = (chance.random(group_N.max() + 1) < 0.5)[group_N][:, None]
        pair = (np.where(swapped_N1, *each) for each in ((after_NC, before_NC), (before_NC, after_NC)))
        one, other = (chosen_metric.of_targets(labels, each_NC, targets_NC) for each_NC in pair)
        drawn[swap] = other - one
    spread = float(drawn.std())
    reach = float(stats.norm.ppf((1 + SURE) / 2)) * spread
    low, high = after - before - reach, after - before + reach
    by_chance = (1 + (sign * drawn >= sign * (after - before)).sum()) / (1 + SWAPS)
    change = f"{title} {before:.4f} -> {after:.4f} ({after - before:+.4f}, 95 % interval {low:+.4f} to {high:+.4f})"
    if sign * (after - before) <= 0:
        return change, f"{title} is no better"
    if not sure or by_chance <= (1 - sure) / 2:
        return change, ""
    # The spread shrinks with the root of the rows, as that of the loss.
    needed = math.ceil((group_N.max() + 1) * (float(stats.norm.ppf((1 + sure) / 2)) * spread / (after - before)) ** 2)
    enough = f" (about {needed:,} rows would tell, were it to last)" if needed > group_N.max() + 1 else ""
    return change, f"chance may explain so small a change of {title}{enough}"


def _interval(change_G: Floats, *, sure: float = SURE) -> tuple[float, float]:
    """Interval of the mean: each end is the farther one of Student's interval and of one corrected for skewness.

    Losses are skewed: many rows a little better, few much worse. Student's interval alone would accept five times too
    often; Hall's (1992, "On the removal of skewness by transformation") would alone where rows are few and a skewness
    is chance (scripts/bench/gates.py).
    """
    from scipy import stats

    mean, spread, groups = float(change_G.mean()), float(change_G.std()), len(change_G)
    if spread == 0:
        return mean, mean
    skew = float((((change_G - mean) / spread) ** 3).mean()) / math.sqrt(groups)
    error = spread / math.sqrt(groups - 1)
    bound = float(stats.t.ppf((1 + sure) / 2, groups - 1))
    # Where a bound of normal Student statistics stands among those of skewed sums: Hall's inverse.
    if abs(skew) >= 1e-6:
        low, high = (3 / skew * (float(np.cbrt(1 + skew * x - skew**2 / 6)) - 1) for x in (bound, -bound))
        return mean - error * max(low, bound), mean - error * min(high, -bound)
    return mean - error * bound, mean + error * bound


def _right(labels: Labels, values_NC: Floats, targets_NC: OneHot) -> NDArray[np.bool_]:
    """Rows whose class, or whose every class, is right (N,); all of them for numbers, which are never quite right."""
    if labels.kind == "several":
        return np.asarray(((values_NC >= 0.5) == (targets_NC > 0.5)).all(1))
    return np.asarray(values_NC.argmax(1) == targets_NC.argmax(1))


def fold_summary(
    per_fold: Sequence[Mapping[str, float]], *, train_rows: float, test_rows: float
) -> dict[str, dict[str, float]]:
    """Mean, spread (standard deviation) and 95 % interval (low, high) of each score that all folds have.

    Folds share most of their training rows, so that their scores vary less than those of new data would: Nadeau and
    Bengio 2003, "Inference for the generalization error", take the variance times 1 / folds + test rows / train rows.

    Args:
        per_fold: Scores of each fold, and of each repeat where there are several.
        train_rows: That a fold trains on, on average.
        test_rows: That a fold is measured on, on average.

    Raises:
        ValueError: Of one fold no spread is known.
    """
    from scipy import stats

    folds = len(per_fold)
    if folds < 2:
        raise ValueError("a summary takes two folds or more")
    reach = float(stats.t.ppf((1 + SURE) / 2, folds - 1)) * math.sqrt(1 / folds + test_rows / train_rows)
    summaries = {}
    for name in (name for name in per_fold[0] if all(name in scores for scores in per_fold)):
        score_K = np.array([scores[name] for scores in per_fold])
        mean, spread = float(score_K.mean()), float(score_K.std(ddof=1))
        summaries[name] = {"mean": mean, "spread": spread, "low": mean - reach * spread, "high": mean + reach * spread}
    return summaries


def row_losses(labels: Labels, values_NC: Floats, targets_NC: OneHot | Floats) -> Floats:
    """The loss of each row (N,), in nats; squared error in units of Labels.scale ** 2 for numbers."""
    return classification_scores.losses(labels, classification_scores.outputs_of_values(labels, values_NC), targets_NC)
