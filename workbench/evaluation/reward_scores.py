"""Rewards of preference pairs and ratings of the steps of answers, and how well they tell the better answer or step.

Legend: S answers of a set (of a pair first the chosen and then the rejected one) or steps of a set, P pairs, R answers
that have steps, T steps of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import numpy.typing as npt
from scipy import special

from workbench.config.sections.rewards_config import Aggregate
from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.text.conversation_views import ConversationView
from workbench.data.text.preference_pairs import PreferenceSet, answer_rows
from workbench.data.text.stepwise import RIGHT, StepSet
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import metrics
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.evaluation.metrics import Interval
from workbench.models.reward_model import RewardModel
from workbench.runs import score_files, units

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
AGGREGATES: dict[Aggregate, Callable[[Floats], float]] = {
    "min": lambda p_T: float(p_T.min()),
    "product": lambda p_T: float(p_T.prod()),
    "mean": lambda p_T: float(p_T.mean()),
    "last": lambda p_T: float(p_T[-1]),
}  # the reward of an answer from the probabilities that its steps are right


def read_rewards(
    model: RewardModel, rows: TokenizedSet | ConversationView, *, scoring: ModelResults | None = None
) -> Floats:
    """Reward (S,) of each answer; `scoring` keeps results where the run may be stopped."""
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[float]:
        batch_rewards: list[float] = model.rewards(rows.batch(numbers).to(device)).double().cpu().tolist()
        return batch_rewards

    content = (rows[number].input_ids for number in range(len(rows)))
    return np.asarray(over_rows(model.model, rows.lengths, compute, scoring=scoring, content=content), dtype=np.float64)


def reward_scores(rows: PreferenceSet, reward_S: Floats, *, centre: float) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first, the training loss without margins and weights.

    Ties count in `loss`, `reward`, `ties` (their share of the pairs) and `tie_gap` (the mean distance of their two
    rewards) alone. Equal rewards count half in the accuracy, which has Wilson's 95 % interval. `log_loss` (nats),
    `brier` and `calibration_error` (Guo et al. 2017) judge sigmoid(r_chosen - r_rejected) as the probability of the
    preference. `longer` is the share of pairs whose longer answer has the higher reward, `longer_chosen` the share
    whose longer answer is the chosen one: a model with a much higher `longer` rewards length.
    """
    chosen_P, rejected_P = reward_S.reshape(-1, 2).T
    every_P, tie_P = chosen_P - rejected_P, rows.ties
    right_P, wrong_P = special.log_expit(every_P), special.log_expit(-every_P)
    loss_P = -np.where(tie_P, (right_P + wrong_P) / 2, right_P)
    score_by_name = {"loss": float((loss_P + centre * (chosen_P + rejected_P) ** 2).mean())}
    if not tie_P.all():
        score_by_name |= of_gaps(every_P[~tie_P])
    score_by_name["reward"] = float(reward_S.mean())
    longer_P = np.diff(rows.answer_tokens.reshape(-1, 2))[:, 0] * -1.0
    if (unlike_P := (longer_P != 0) & ~tie_P).any():
        agrees_P = (1 + np.sign(longer_P[unlike_P]) * np.sign(every_P[unlike_P])) / 2
        score_by_name |= {"longer": float(agrees_P.mean()), "longer_chosen": float((longer_P[unlike_P] > 0).mean())}
    if tie_P.any():
        score_by_name |= {"ties": float(tie_P.mean()), "tie_gap": float(np.abs(every_P[tie_P]).mean())}
    return units.rounded(score_by_name)


def of_gaps(gap_P: Floats) -> dict[str, float]:
    """Scores of the reward differences of pairs that are no ties."""
    right = float((gap_P > 0).mean() + (gap_P == 0).mean() / 2)
    hits = metrics.accuracy_interval(right * len(gap_P), len(gap_P))
    p_P2 = np.stack([special.expit(gap_P), special.expit(-gap_P)], axis=1)
    return {
        **hits.scores("accuracy"),
        "log_loss": float(-special.log_expit(gap_P).mean()),
        "brier": float((p_P2[:, 1] ** 2).mean()),
        "calibration_error": metrics.calibration_error(p_P2, np.zeros(len(gap_P), dtype=np.int64)),
        "margin": float(gap_P.mean()),
    }


def reward_scores_by_set(rows: PreferenceSet, reward_S: Floats, *, centre: float) -> dict[str, float]:
    """`reward_scores` of all rows, and of each named set among them."""
    each = named_sets.scored(
        rows, lambda own: reward_scores(rows.subset(own), reward_S[answer_rows(own, rows.each)], centre=centre)
    )
    return reward_scores(rows, reward_S, centre=centre) | each


def reward_baseline(rows: PreferenceSet) -> dict[str, float]:
    """Scores of a model that gives all answers the same reward; a fresh head is no baseline."""
    even = reward_scores_by_set(rows, np.zeros(2 * len(rows)), centre=0.0)
    wanted = ("loss", "log_loss", "brier", "longer_chosen", "accuracy")
    return {name: even[name] for name in even if name.partition("[")[0] in wanted}


def read_step_logits(model: RewardModel, rows: StepSet, *, scoring: ModelResults | None = None) -> Floats:
    """Logit (S,) that each step is right, answer by answer; `scoring` keeps results where the run may be stopped."""
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        logits = model.step_logits(rows.batch(numbers).to(device)).double().cpu()
        return [each.tolist() for each in logits.split(rows.steps[numbers].tolist())]

    answers = (rows.answers[number] for number in range(len(rows)))
    content = (array for each in answers for array in (each.input_ids, each.supervised))
    by_row = over_rows(model.model, rows.lengths, compute, scoring=scoring, content=content)
    return np.asarray([logit for logits in by_row for logit in logits], dtype=np.float64)


def aggregated(rows: StepSet, p_S: Floats, how: Aggregate) -> Floats:
    """The reward (R,) of each answer from the probabilities of its steps."""
    return np.asarray([AGGREGATES[how](part) for part in np.split(p_S, np.cumsum(rows.steps)[:-1])], dtype=np.float64)


def step_scores(rows: StepSet, logit_S: Floats) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first, the mean over steps, without weights.

    A step counts as right from a probability, or a soft label, of 0.5 on. accuracy is over steps, with Wilson's 95 %
    interval for the effective number of steps, as those of one answer are not independent (Kish 1965). error_found is
    the share of answers with a wrong step whose first wrong step is found, and all_right the share of answers without
    one in which none is found; `f1` is their harmonic mean (Zheng et al. 2024, arXiv:2412.06559), with an interval by
    bootstrap over answers. `auc_min` and the like measure how well the aggregate of an answer's steps separates answers
    without a wrong step from the others.
    """
    p_S, label_S = special.expit(logit_S), rows.labels
    hit_S = (p_S >= RIGHT) == (label_S >= RIGHT)
    entropy_S = -label_S * special.log_expit(logit_S) - (1 - label_S) * special.log_expit(-logit_S)
    p_S2 = np.stack([1 - p_S, p_S], axis=1)
    score_by_name = {
        "loss": float(entropy_S.mean()),
        **clustered_interval(hit_S, rows.row_of_step).scores("accuracy"),
        "brier": float(((p_S - label_S) ** 2).mean()),
        "calibration_error": metrics.calibration_error(p_S2, (label_S >= RIGHT).astype(np.int64)),
    }
    first_R, found_R = first_wrong(rows, label_S < RIGHT), first_wrong(rows, p_S < RIGHT)
    shares = []
    for name, own_R in (("error_found", first_R >= 0), ("all_right", first_R < 0)):
        if own_R.any():
            interval = metrics.accuracy_interval(int((found_R == first_R)[own_R].sum()), int(own_R.sum()))
            score_by_name |= interval.scores(name)
            shares.append(interval.mean)
    if len(shares) == 2:
        score_by_name["f1"] = 2 * shares[0] * shares[1] / sum(shares) if sum(shares) else 0.0
        low, high = _f1_bounds(first_R >= 0, found_R == first_R)
        score_by_name |= {"f1_low": low, "f1_high": high}
        from sklearn.metrics import roc_auc_score  # 0.5 s, with scipy.stats

        for how in get_args(Aggregate):
            score_by_name[f"auc_{how}"] = float(roc_auc_score(first_R < 0, aggregated(rows, p_S, how)))
    return units.rounded(score_by_name)


def step_scores_by_set(rows: StepSet, logit_S: Floats) -> dict[str, float]:
    """`step_scores` of all rows, and of each named set among them."""
    each = named_sets.scored(rows, lambda own: step_scores(rows.subset(own), logit_S[rows.steps_of(own)]))
    return step_scores(rows, logit_S) | each


def step_baseline(train: StepSet, rows: StepSet) -> dict[str, float]:
    """Scores of the mean label of the training steps as the probability of every step; a fresh head is no baseline."""
    share = float(np.clip(train.labels.mean(), 1e-6, 1 - 1e-6))
    scores = step_scores_by_set(rows, np.full(len(rows.labels), special.logit(share)))
    return {name: value for name, value in scores.items() if not score_files.is_bound(name)}


def first_wrong(rows: StepSet, wrong_S: Bools) -> Indices:
    """Number of the first wrong step of each answer (R,), -1 where all are right."""
    starts = np.cumsum(rows.steps) - rows.steps
    place_S = np.where(wrong_S, np.arange(len(wrong_S)) - starts[rows.row_of_step], np.iinfo(np.int64).max)
    first_R: Indices = np.minimum.reduceat(place_S, starts)
    return np.where(first_R == np.iinfo(np.int64).max, -1, first_R)


def clustered_interval(hit_S: Bools, row_of_step: Indices) -> Interval:
    """Share of hits with Wilson's interval for the effective number of steps; steps of one answer are correlated.

    The variance of the share is that of a ratio of sums over answers; its quotient by that of independent steps is the
    design effect, at least 1.
    """
    count, share = len(hit_S), float(hit_S.mean())
    rest_R = np.bincount(row_of_step, weights=hit_S - share)
    answers, independent = len(rest_R), share * (1 - share) / count
    variance = float((rest_R**2).sum()) / count**2 * answers / max(1, answers - 1)
    effect = max(1.0, variance / independent) if independent else 1.0
    effective = max(1.0, count / effect)
    return metrics.accuracy_interval(share * effective, effective)


def _f1_bounds(wrong_R: Bools, right_R: Bools) -> tuple[float, float]:
    """The interval of `f1` (bootstrap over answers); resamples that lack either kind of answers are left out."""
    # Kinds: without a wrong step and missed, found; with one and missed, found.
    drawn_RK = np.concatenate(list(metrics.resampled(np.bincount(2 * wrong_R + right_R, minlength=4))))
    with np.errstate(invalid="ignore"):
        all_right_R, error_found_R = (drawn_RK[:, n + 1] / drawn_RK[:, n : n + 2].sum(1) for n in (0, 2))
        f1_R = 2 * all_right_R * error_found_R / (all_right_R + error_found_R)
    f1_R[all_right_R + error_found_R == 0] = 0.0
    (interval,) = metrics.percentile_bounds(f1_R[:, None])
    return interval
