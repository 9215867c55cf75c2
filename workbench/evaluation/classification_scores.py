"""Outputs of a classifier and their scores, for labels that are one class, several classes, or a number.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import special
from torch import Tensor, nn

from workbench.config.sections.basic_sections import ID
from workbench.config.sections.classes_config import Kind
from workbench.data import named_sets
from workbench.data.batching import Indices, MicroBatch
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Label, Labels
from workbench.data.labelled.records import RowReader
from workbench.data.stored_files import StoredFile
from workbench.evaluation import chosen_metric, metrics
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.runs import units
from workbench.training import early_stopping

if TYPE_CHECKING:
    import pandas as pd

OneHot = NDArray[np.float32]  # 1 where a row has a class, 0 elsewhere; or standardised numbers


def scores(labels: Labels, outputs_NC: Floats, targets_NC: OneHot) -> dict[str, float]:
    """The scores by name, as scores.json holds them; `loss` first.

    One class: the mean negative log-likelihood in nats, and the scores of `single_label_scores`. Several classes: the
    same loss summed over classes, and `multi_label_scores`. A number: squared error in units of the training labels'
    variance (the loss), and `regression_scores`.
    """
    return _scores(labels, loss(labels, outputs_NC, targets_NC), labels.values(outputs_NC), targets_NC)


def scores_of(labels: Labels, outputs_NC: Floats, rows: LabelledSet) -> dict[str, float]:
    """`scores` of all rows, with the interval of the metric, and of each named set among them."""
    of_sets = _of_sets(rows, outputs_NC, lambda own_NC, targets_NC: scores(labels, own_NC, targets_NC))
    return _metric_bounds(labels, labels.values(outputs_NC), rows) | of_sets


def loss_of_sets(labels: Labels, outputs_NC: Floats, rows: LabelledSet) -> dict[str, float]:
    """The `loss` of `scores_of` alone, of all rows and of each named set."""
    return _of_sets(rows, outputs_NC, lambda own_NC, own: units.rounded({"loss": loss(labels, own_NC, own)}))


def value_scores_of(labels: Labels, values_NC: Floats, rows: LabelledSet) -> dict[str, float]:
    """`value_scores` of all rows, with the interval of the metric, and of each named set among them."""
    of_sets = _of_sets(rows, values_NC, lambda own_NC, targets_NC: value_scores(labels, own_NC, targets_NC))
    return _metric_bounds(labels, values_NC, rows) | of_sets


def metric_of(labels: Labels, outputs_NC: Floats, rows: LabelledSet) -> dict[str, float]:
    """What decides in place of the loss, by `early_stopping.METRIC`; empty where the loss does.

    Raises:
        DataError: The metric is not defined on these rows.
    """
    if labels.metric is None:
        return {}
    score = chosen_metric.score(labels, labels.values(outputs_NC), labels.true(rows.targets_NC))
    return {early_stopping.METRIC: score}


def require_metric(labels: Labels, **sets: LabelledSet | None) -> None:
    """Refuse a metric that cannot be computed on the rows of a set; see `chosen_metric.require`."""
    for name, rows in sets.items():
        if rows is not None:
            chosen_metric.require(labels, labels.true(rows.targets_NC), rows=name.replace("_", "-"))


def _metric_bounds(labels: Labels, values_NC: Floats, rows: LabelledSet) -> dict[str, float]:
    return units.rounded(chosen_metric.bounds(labels, values_NC, labels.true(rows.targets_NC)))


def _of_sets(
    rows: LabelledSet, found_NC: Floats, judge: Callable[[Floats, OneHot], dict[str, float]]
) -> dict[str, float]:
    of_each = named_sets.scored_apart(rows, lambda own: judge(found_NC[own], rows.targets_NC[own]))
    return judge(found_NC, rows.targets_NC) | of_each


def value_scores(labels: Labels, values_NC: Floats, targets_NC: OneHot) -> dict[str, float]:
    """`scores` of probabilities or numbers as `Labels.values` returns them (such as an ensemble's), not of outputs."""
    return _scores(labels, loss(labels, outputs_of_values(labels, values_NC), targets_NC), values_NC, targets_NC)


def _scores(labels: Labels, loss: float, values_NC: Floats, targets_NC: OneHot) -> dict[str, float]:
    score_by_name = {"loss": loss}
    if labels.kind == "number":
        score_by_name |= regression_scores(values_NC[:, 0], labels.values(targets_NC.astype(np.float64))[:, 0])
    elif labels.kind == "several":
        score_by_name |= multi_label_scores(values_NC, targets_NC)
    else:
        score_by_name |= single_label_scores(values_NC, targets_NC.argmax(1))
    if labels.shift:
        moved = replace(labels, shift=()), labels.moved(values_NC, labels.shift), targets_NC
        score_by_name |= of_labels(labels, value_scores(*moved))
    return units.rounded(score_by_name | chosen_metric.defined(labels, values_NC, labels.true(targets_NC)))


def of_labels(labels: Labels, found: Mapping[str, float]) -> dict[str, float]:
    """The scores that look at labels alone, not at probabilities, with their bounds."""
    names = ("accuracy", "macro_f1", "micro_f1", "exact_match", *([labels.metric.name] if labels.metric else ()))
    bare = {name: name.partition("[")[0].removesuffix("_low").removesuffix("_high") for name in found}
    return {name: value for name, value in found.items() if bare[name] in names}


def loss(labels: Labels, outputs_NC: Floats, targets_NC: OneHot | Floats) -> float:
    """Mean of `losses` over rows."""
    return float(losses(labels, outputs_NC, targets_NC).mean())


def losses(labels: Labels, outputs_NC: Floats, targets_NC: OneHot | Floats) -> Floats:
    """Training loss of each row (N,) without label smoothing and weights; class targets may be soft."""
    if labels.kind == "number":
        terms_NC = (outputs_NC - targets_NC) ** 2
    elif labels.kind == "several":
        terms_NC = -targets_NC * special.log_expit(outputs_NC) - (1 - targets_NC) * special.log_expit(-outputs_NC)
    else:
        terms_NC = -special.log_softmax(outputs_NC, axis=1) * targets_NC
    loss_N: Floats = terms_NC.sum(1)
    return loss_N


def outputs_of_values(labels: Labels, values_NC: Floats) -> Floats:
    """Outputs for which `Labels.values` returns these values: the inverse of it."""
    return (values_NC - labels.mean) / labels.scale if labels.kind == "number" else logits(labels.kind, values_NC)


def random_target(labels: Labels) -> float:
    """Expected target, for every output, of a row that was labelled at random."""
    return {"number": 0.0, "several": 0.5}.get(labels.kind, 1 / len(labels.names))


def logits(kind: Kind, p_NC: Floats) -> Floats:
    """Logits (..., C) of class probabilities, finite where one is 0 or 1."""
    tiny = np.finfo(np.float64).tiny
    logits_NC: Floats
    if kind == "several":
        # float64 has numbers close to 0, but none between 1 - 2**-53 and 1.
        logits_NC = special.logit(np.clip(p_NC, tiny, 1 - 2.0**-53))
    else:
        logits_NC = np.log(np.maximum(p_NC, tiny))
    return logits_NC


def single_label_scores(p_NC: Floats, label_N: NDArray[np.int64]) -> dict[str, float]:
    """`class_scores.scores` with intervals of accuracy and macro-F1, and without the log-loss, which is the loss."""
    score_by_name = metrics.probability_scores(p_NC, label_N)
    del score_by_name["log_loss"]
    interval = metrics.accuracy_interval(int((p_NC.argmax(1) == label_N).sum()), len(label_N))
    classes = np.arange(p_NC.shape[1])
    f1 = metrics.f1_intervals(label_N[:, None] == classes, p_NC.argmax(1)[:, None] == classes)
    return metrics.with_bounds(score_by_name, {"accuracy": (interval.low, interval.high), **f1})


def multi_label_scores(p_NC: Floats, targets_NC: OneHot) -> dict[str, float]:
    """F1 at a threshold of 0.5 with intervals, share of rows right in every class, mean ROC-AUC."""
    from sklearn.metrics import f1_score, roc_auc_score  # 0.5 s, with scipy.stats

    true_NC, predicted_NC = targets_NC > 0.5, p_NC >= 0.5
    scorable = [c for c in range(p_NC.shape[1]) if 0 < true_NC[:, c].sum() < len(true_NC)]
    score_by_name = {
        "exact_match": float((true_NC == predicted_NC).all(1).mean()),
        "micro_f1": float(f1_score(true_NC, predicted_NC, average="micro", zero_division=0.0)),
        "macro_f1": float(f1_score(true_NC, predicted_NC, average="macro", zero_division=0.0)),
        "brier": float(((p_NC - targets_NC) ** 2).sum(1).mean()),
    }
    if scorable:
        score_by_name["roc_auc"] = float(np.mean([roc_auc_score(true_NC[:, c], p_NC[:, c]) for c in scorable]))
    return metrics.with_bounds(score_by_name, metrics.f1_intervals(true_NC, predicted_NC))


def regression_scores(predicted_N: Floats, true_N: Floats) -> dict[str, float]:
    """Errors in the label's unit; explained variance and rank correlation where the labels differ."""
    score_by_name = {
        "rmse": float(np.sqrt(((predicted_N - true_N) ** 2).mean())),
        "mae": float(np.abs(predicted_N - true_N).mean()),
    }
    if np.ptp(true_N) > 0:
        from scipy import stats
        from sklearn.metrics import r2_score

        score_by_name["r2"] = float(r2_score(true_N, predicted_N))
        if np.ptp(predicted_N) > 0:
            score_by_name["spearman"] = float(stats.spearmanr(true_N, predicted_N).statistic)
    return score_by_name


def baseline(labels: Labels, targets_NC: OneHot, *, rows: int) -> Floats:
    """Outputs (rows, C) of a constant prediction: class frequencies of the training targets, or their mean."""
    mean_C = targets_NC.astype(np.float64).mean(0)
    if labels.kind == "number":
        outputs_C = mean_C
    elif labels.kind == "several":
        outputs_C = special.logit(np.clip(mean_C, 1e-6, 1 - 1e-6))
    else:
        outputs_C = np.log(mean_C)
    return np.tile(outputs_C, (rows, 1))


def predict_outputs(
    model: nn.Module, predict: Callable[[MicroBatch], Tensor], rows: LabelledSet, *, scoring: ModelResults | None = None
) -> Floats:
    """Outputs (N, C) of rows in their order; `scoring` keeps results where the run may be stopped."""
    device = next(model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        outputs_BC: list[list[float]] = predict(rows.batch(numbers).to(device)).double().cpu().tolist()
        return outputs_BC

    return np.asarray(over_rows(model, rows.lengths, compute, scoring=scoring, content=rows.inputs.arrays()))


def predictions_table(
    labels: Labels, rows: LabelledSet, values_NC: Floats, reader: RowReader, *, labelled: bool
) -> pd.DataFrame:
    """The table of predictions: place, content, prediction, and a column `p_CLASS` for each class; if `labelled`, also
    label, the id that `data.columns` names or else the place, and of a picture the digest of its pixels.

    Labels of several classes are lists. `values_NC`: probabilities of the classes, or numbers, as `Labels.values`
    returns them.
    """
    import pandas as pd  # 0.2 s, which the first step need not wait for

    def cell(label: Label | None) -> object:
        return list(label) if isinstance(label, tuple) else label

    columns: dict[str, object] = {
        "row": [record.place for record in rows.records],
        reader.title: [reader.describe(record) for record in rows.records],
    }
    if labelled:
        columns[ID] = columns["row"]
        if (named := reader.data.columns.get(ID)) is not None:
            cells = (record.row.columns.get(named) for record in rows.records)
            columns[ID] = [cell.name if isinstance(cell, StoredFile) else str(cell) for cell in cells]
        columns["label"] = [cell(label) for label in rows.labels]
        if any(digests := [record.digest for record in rows.records]):
            columns["digest"] = digests
    columns["predicted"] = [cell(label) for label in labels.predicted(values_NC)]
    if labels.kind != "number":
        columns |= {f"p_{name}": values_NC[:, number] for number, name in enumerate(labels.names)}
    return pd.DataFrame(columns)
