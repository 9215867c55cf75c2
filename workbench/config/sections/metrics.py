"""Metrics that `evaluate.metric` names: what each computes, which direction is better, and the labels it applies to.

scikit-learn's functions where it has them, imported when one is called.

Legend: N rows, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from workbench.config.sections.classes_config import Kind
from workbench.schema import did_you_mean

Array: TypeAlias = npt.NDArray[Any]
CLASSES: frozenset[Kind] = frozenset({"one", "pair"})
ANY_CLASSES: frozenset[Kind] = CLASSES | {"several"}
NUMBERS: frozenset[Kind] = frozenset({"number"})


class JudgedRows(NamedTuple):
    """Rows as a metric sees them."""

    true: Array
    """Number of the class (N,), whether a row has each class (N, C), or numbers (N,)."""
    predicted: Array
    """The same, as predicted."""
    p_NC: Array
    """Probabilities of the classes; of numbers the predictions again."""
    steps: Array
    """Places of the classes on a scale (C,), where their names are numbers; else empty."""

    @property
    def classes(self) -> Array:
        """Numbers of the classes."""
        return np.arange(self.p_NC.shape[1])

    @property
    def hot_NC(self) -> Array:
        """Whether a row has each class."""
        return self.true if self.true.ndim == 2 else self.true[:, None] == self.classes


@dataclass(frozen=True)
class NamedMetric:
    """A metric, with what it needs."""

    title: str
    score: Callable[[JudgedRows], float]
    kinds: frozenset[Kind]
    higher: bool = True
    """Whether higher is better."""
    needs: Literal["", "every class", "scale", "variety"] = ""
    """Rows with and without each class; labels that are whole numbers; or labels that differ."""
    of_labels: bool = False
    """Whether it looks at predicted classes, and not at probabilities."""


def _of(name: str, **options: Any) -> Callable[[JudgedRows], float]:
    """A function of scikit-learn's that compares labels."""

    def score(rows: JudgedRows) -> float:
        import sklearn.metrics

        return float(getattr(sklearn.metrics, name)(rows.true, rows.predicted, **options))

    return score


def _f1(average: str) -> Callable[[JudgedRows], float]:
    return lambda rows: _of("f1_score", labels=rows.classes, average=average, zero_division=0.0)(rows)


def _one_against_rest(name: str) -> Callable[[JudgedRows], float]:
    """A function of scikit-learn's that ranks rows by a probability, as its mean over classes; of two classes that
    exclude each other the second one's."""

    def score(rows: JudgedRows) -> float:
        import sklearn.metrics

        binary = rows.true.ndim == 1 and len(rows.classes) == 2
        ranked = getattr(sklearn.metrics, name)
        return float(np.mean([ranked(rows.hot_NC[:, c], rows.p_NC[:, c]) for c in rows.classes[binary:]]))

    return score


def _log_loss(rows: JudgedRows) -> float:
    from sklearn.metrics import log_loss

    p_NC = np.minimum(rows.p_NC, 1.0)  # a mean of rounded values may be 1 + 2**-52
    if rows.true.ndim == 1:
        return float(log_loss(rows.true, p_NC, labels=rows.classes))
    return float(np.mean([log_loss(rows.true[:, c], p_NC[:, c], labels=[False, True]) for c in rows.classes]))


def _kappa(rows: JudgedRows) -> float:
    """Quadratic weighted kappa: 1 - observed / expected squared distance (Cohen 1968)."""
    of_number = not len(rows.steps)
    true_N, said_N = (np.rint(each) if of_number else rows.steps[each] for each in (rows.true, rows.predicted))
    expected = (true_N**2).mean() + (said_N**2).mean() - 2 * true_N.mean() * said_N.mean()
    return float(1 - ((true_N - said_N) ** 2).mean() / expected) if expected > 0 else float("nan")


def _spearman(rows: JudgedRows) -> float:
    from scipy import stats

    varies = np.ptp(rows.predicted) > 0  # one number for all rows orders nothing
    return float(stats.spearmanr(rows.true, rows.predicted).statistic) if varies else 0.0


def _map_at(k: int) -> NamedMetric:
    def score(rows: JudgedRows) -> float:
        order_NK = np.argsort(-rows.p_NC, axis=1, kind="stable")[:, :k]
        hit_NK = np.take_along_axis(rows.hot_NC, order_NK, axis=1)
        precision_NK = hit_NK.cumsum(1) / np.arange(1, order_NK.shape[1] + 1)
        most_N = np.clip(rows.hot_NC.sum(1), 1, k)
        return float(((precision_NK * hit_NK).sum(1) / most_N).mean())

    return NamedMetric(f"Mean average precision at {k}", score, ANY_CLASSES)


METRICS: Mapping[str, NamedMetric] = {
    "accuracy": NamedMetric("Accuracy", _of("accuracy_score"), ANY_CLASSES, of_labels=True),
    "macro_f1": NamedMetric("Macro-F1", _f1("macro"), ANY_CLASSES, of_labels=True),
    "micro_f1": NamedMetric("Micro-F1", _f1("micro"), ANY_CLASSES, of_labels=True),
    "weighted_f1": NamedMetric("Weighted F1", _f1("weighted"), ANY_CLASSES, of_labels=True),
    "roc_auc": NamedMetric("ROC-AUC", _one_against_rest("roc_auc_score"), ANY_CLASSES, needs="every class"),
    "average_precision": NamedMetric(
        "Average precision", _one_against_rest("average_precision_score"), ANY_CLASSES, needs="every class"
    ),
    "log_loss": NamedMetric("Log-loss", _log_loss, ANY_CLASSES, higher=False),
    "mcc": NamedMetric("Matthews correlation", _of("matthews_corrcoef"), CLASSES, of_labels=True),
    "qwk": NamedMetric("Quadratic weighted kappa", _kappa, CLASSES | NUMBERS, needs="scale", of_labels=True),
    "mae": NamedMetric("Mean absolute error", _of("mean_absolute_error"), NUMBERS, higher=False),
    "rmse": NamedMetric("Root mean squared error", _of("root_mean_squared_error"), NUMBERS, higher=False),
    "r2": NamedMetric("Explained variance", _of("r2_score"), NUMBERS, needs="variety"),
    "spearman": NamedMetric("Rank correlation", _spearman, NUMBERS, needs="variety"),
}
"""Every metric by its name, besides `map@K`."""


class Choice(NamedTuple):
    """The metric that a configuration names."""

    name: str
    """As scores are called: the name in METRICS, or of the user's function."""
    higher: bool
    file: Path | None = None
    """The user's file."""

    @property
    def metric(self) -> NamedMetric:
        """The metric of that name, where it is none of the user's."""
        found = named(self.name)
        assert found is not None, "a configuration has no other names"
        return found

    @property
    def of_labels(self) -> bool:
        """Whether it looks at predicted classes; a function of the user's is given them."""
        return self.file is not None or self.metric.of_labels

    @property
    def title(self) -> str:
        """For a page."""
        return self.name if self.file else self.metric.title


def named(name: str) -> NamedMetric | None:
    """The metric of a name; None where there is none."""
    if match := re.fullmatch(r"map@([1-9]\d{0,3})", name):
        return _map_at(int(match[1]))
    return METRICS.get(name)


def names(kind: str) -> str:
    """Names of the metrics for labels of a kind, for a sentence."""
    of_kind = [name for name, metric in METRICS.items() if kind in metric.kinds]
    return ", ".join([*of_kind, *(["map@3"] if kind != "number" else [])])


def is_code(text: object) -> bool:
    """Whether the value of `evaluate.metric` names a file of the user's."""
    return isinstance(text, str) and bool(re.search(r"\.py(:|$)", text))


def choice(text: str, better: Literal["higher", "lower"] | None) -> Choice:
    """The metric of `evaluate.metric` and `evaluate.better`; raises ValueError where there is none of that name."""
    file, _, function = text.rpartition(":")
    if is_code(text):
        if not file.endswith(".py") or not function.isidentifier():
            raise ValueError(f"`{text}` names a file without its function. Write FILE.py:FUNCTION.")
        if function == "loss" or named(function) is not None:
            raise ValueError(f"`{function}` names another score. Give the function another name.")
        return Choice(function, better != "lower", Path(file))
    if (metric := named(text)) is None:
        raise ValueError(
            f"`{text}` is no metric.{did_you_mean(text, [*METRICS, 'map@3'])} One of your own is FILE.py:FUNCTION."
        )
    return Choice(text, metric.higher)
