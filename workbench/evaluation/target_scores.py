"""Scores of what a classifier says, whatever its labels are: one class, several, or a number.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats
from sklearn import metrics

from workbench.config.classes_config import Kind
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import class_scores

Hot = NDArray[np.float32]


def scores(labels: Labels, outputs_NC: Floats, targets_NC: Hot) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first.

    One class: mean negative log-likelihood in nats, accuracy with Wilson's 95 % interval, and the scores of
    `classes.scores`. Several classes: the same loss summed over classes, micro- and macro-F1, the share of rows whose
    every class is right, the mean ROC-AUC of the classes. A number: squared error in units of the training labels'
    variance (the loss), root mean squared and mean absolute error, explained variance, rank correlation.
    """
    return _scores(labels, loss(labels, outputs_NC, targets_NC), labels.values(outputs_NC), targets_NC)


def value_scores(labels: Labels, values_NC: Floats, targets_NC: Hot) -> dict[str, float]:
    """`scores` of probabilities or numbers, such as an ensemble's: what Labels.values gives, not outputs."""
    return _scores(labels, loss(labels, outputs(labels, values_NC), targets_NC), values_NC, targets_NC)


def _scores(labels: Labels, loss: float, values_NC: Floats, targets_NC: Hot) -> dict[str, float]:
    found = {"loss": loss}
    if labels.kind == "number":
        found |= number_scores(values_NC[:, 0], labels.values(targets_NC.astype(np.float64))[:, 0])
    elif labels.kind == "several":
        found |= several_scores(values_NC, targets_NC)
    else:
        found |= one_scores(values_NC, targets_NC.argmax(1))
    return {name: round(value, 6) for name, value in found.items()}


def loss(labels: Labels, outputs_NC: Floats, targets_NC: Hot | Floats) -> float:
    """Mean over rows of the plain training loss: no smoothing, no weights."""
    return float(losses(labels, outputs_NC, targets_NC).mean())


def losses(labels: Labels, outputs_NC: Floats, targets_NC: Hot | Floats) -> Floats:
    """The plain training loss of each row (N,); targets of classes may be shares of a row."""
    if labels.kind == "number":
        terms_NC = (outputs_NC - targets_NC) ** 2
    elif labels.kind == "several":
        terms_NC = -targets_NC * special.log_expit(outputs_NC) - (1 - targets_NC) * special.log_expit(-outputs_NC)
    else:
        terms_NC = -special.log_softmax(outputs_NC, axis=1) * targets_NC
    found: Floats = terms_NC.sum(1)
    return found


def outputs(labels: Labels, values_NC: Floats) -> Floats:
    """Outputs whose Labels.values these are, the other way round."""
    return (values_NC - labels.mean) / labels.scale if labels.kind == "number" else logits(labels.kind, values_NC)


def blind(labels: Labels) -> float:
    """The target, in every output, of a row that was labelled at random."""
    return {"number": 0.0, "several": 0.5}.get(labels.kind, 1 / len(labels.names))


def logits(kind: Kind, p_NC: Floats) -> Floats:
    """Logits of probabilities of classes, finite where one is 0 or 1; any leading axes."""
    tiny = np.finfo(np.float64).tiny
    found: Floats
    if kind == "several":
        # float64 knows numbers close to 0, but none between 1 - 2**-53 and 1.
        found = special.logit(np.clip(p_NC, tiny, 1 - 2.0**-53))
    else:
        found = np.log(np.maximum(p_NC, tiny))
    return found


def one_scores(p_NC: Floats, label_N: NDArray[np.int64]) -> dict[str, float]:
    """`classes.scores` without the log-loss, which is the loss, and with the interval of the accuracy."""
    found = class_scores.scores(p_NC, label_N)
    del found["log_loss"]
    sure = class_scores.accuracy_interval(int((p_NC.argmax(1) == label_N).sum()), len(label_N))
    return {"accuracy": found.pop("accuracy"), "accuracy_low": sure.low, "accuracy_high": sure.high, **found}


def several_scores(p_NC: Floats, targets_NC: Hot) -> dict[str, float]:
    """Micro- and macro-F1 at 0.5, rows that are right in every class, ROC-AUC over classes that have both kinds."""
    true_NC, said_NC = targets_NC > 0.5, p_NC >= 0.5
    both = [c for c in range(p_NC.shape[1]) if 0 < true_NC[:, c].sum() < len(true_NC)]
    found = {
        "exact_match": float((true_NC == said_NC).all(1).mean()),
        "micro_f1": float(metrics.f1_score(true_NC, said_NC, average="micro", zero_division=0.0)),
        "macro_f1": float(metrics.f1_score(true_NC, said_NC, average="macro", zero_division=0.0)),
        "brier": float(((p_NC - targets_NC) ** 2).sum(1).mean()),
    }
    if both:
        found["roc_auc"] = float(np.mean([metrics.roc_auc_score(true_NC[:, c], p_NC[:, c]) for c in both]))
    return found


def number_scores(said_N: Floats, true_N: Floats) -> dict[str, float]:
    """Errors in the label's unit, explained variance and rank correlation, where the labels are not all alike."""
    found = {
        "rmse": float(np.sqrt(((said_N - true_N) ** 2).mean())),
        "mae": float(np.abs(said_N - true_N).mean()),
    }
    if np.ptp(true_N) > 0:
        found["r2"] = float(metrics.r2_score(true_N, said_N))
        if np.ptp(said_N) > 0:
            found["spearman"] = float(stats.spearmanr(true_N, said_N).statistic)
    return found


def baseline(labels: Labels, targets_NC: Hot, *, rows: int) -> Floats:
    """Outputs (rows, C) that say the same of every row: the classes' shares in the training targets, or their mean."""
    mean_C = targets_NC.astype(np.float64).mean(0)
    if labels.kind == "number":
        outputs_C = mean_C
    elif labels.kind == "several":
        outputs_C = special.logit(np.clip(mean_C, 1e-6, 1 - 1e-6))
    else:
        outputs_C = np.log(mean_C)
    return np.tile(outputs_C, (rows, 1))
