"""Rewards of judged answers, and how well they tell the better answer of each pair.

Legend: S answers of a set (of a pair first the chosen and then the rejected one), P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.text.preference_pairs import PreferenceSet, answer_rows
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import class_scores
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows
from workbench.models.reward_model import RewardModel
from workbench.runs import units

Floats = npt.NDArray[np.float64]


def read(model: RewardModel, rows: TokenizedSet, *, scoring: ModelResults | None = None) -> Floats:
    """Reward (S,) of each answer.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[float]:
        batch_rewards: list[float] = model.rewards(rows.batch(numbers).to(device)).double().cpu().tolist()
        return batch_rewards

    reward_by_row = over_rows(model.model, rows.lengths, compute, scoring=scoring, content=_content(rows))
    return np.asarray([reward_by_row[row] for row in range(len(rows))], dtype=np.float64)


def _content(rows: TokenizedSet) -> Iterator[np.ndarray[Any, Any]]:
    for number in range(len(rows)):
        yield rows[number].input_ids


def summary(rows: PreferenceSet, reward_S: Floats, *, centre: float) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first, that of training without margins and weights.

    All but `loss` and `reward` are of pairs that are no ties; a set of ties alone has these two. `tie_gap` is the mean
    distance of the two rewards of a tie, and `ties` their share of the pairs. Equal rewards count half in the accuracy,
    which has Wilson's 95 % interval. `log_loss` (nats), `brier` and `calibration_error` (Guo et al. 2017) judge
    sigmoid(r_chosen - r_rejected) as the probability that the judgement falls so. `longer` is the share of pairs whose
    longer answer has the higher reward, `longer_chosen` that of those whose longer answer is the better one: a model
    that is far above it rewards length.
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
    """Scores of the differences of the rewards of pairs that are no ties."""
    right = float((gap_P > 0).mean() + (gap_P == 0).mean() / 2)
    hits = class_scores.accuracy_interval(right * len(gap_P), len(gap_P))
    p_P2 = np.stack([special.expit(gap_P), special.expit(-gap_P)], axis=1)
    return {
        "accuracy": right,
        "accuracy_low": hits.low,
        "accuracy_high": hits.high,
        "log_loss": float(-special.log_expit(gap_P).mean()),
        "brier": float((p_P2[:, 1] ** 2).mean()),
        "calibration_error": calibration_error(gap_P),
        "margin": float(gap_P.mean()),
    }


def of_sets(rows: PreferenceSet, reward_S: Floats, *, centre: float) -> dict[str, float]:
    """`summary` of all rows, and of each of several sets among them."""
    each = named_sets.scored(
        rows, lambda own: summary(rows.subset(own), reward_S[answer_rows(own, rows.each)], centre=centre)
    )
    return summary(rows, reward_S, centre=centre) | each


def calibration_error(gap_P: Floats) -> float:
    """Mean gap between confidence and accuracy of sigmoid of the difference, over equal bins of confidence."""
    p_P2 = np.stack([special.expit(gap_P), special.expit(-gap_P)], axis=1)
    return class_scores.calibration_error(p_P2, np.zeros(len(gap_P), dtype=np.int64))


def baseline(rows: PreferenceSet) -> dict[str, float]:
    """Scores of a model that gives all answers one reward: a fresh head says nothing to compare with."""
    even = of_sets(rows, np.zeros(2 * len(rows)), centre=0.0)
    wanted = ("loss", "log_loss", "brier", "longer_chosen", "accuracy")
    return {name: even[name] for name in even if name.partition("[")[0] in wanted}
