"""The score that `evaluate.metric` names, on rows with labels: one of the table, or a function of the user's.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.config import plugins
from workbench.config.sections.metrics import Choice, JudgedRows
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.rows import finite
from workbench.data.time_limit import time_limit
from workbench.errors import ConfigError, DataError
from workbench.evaluation import metrics
from workbench.evaluation.comparison import PairedScore

KEY = "evaluate.metric"
SIGNATURE = "def {name}(labels, predicted): return a number"
SECONDS = 10.0
"""Longest call of a user's function, by the clock on the wall; a gate of a cross-validation calls it 800 times."""
RESAMPLES = 200
"""Of rows, for an interval; each costs a call."""


def score(labels: Labels, values_NC: Floats, true_NC: Floats) -> float:
    """The score.

    Args:
        values_NC: Probabilities, or numbers in their unit.
        true_NC: Which classes a row has, or its number.

    Raises:
        DataError: It is not defined on these rows, such as for want of a class.
        ConfigError: The user's function fails.
    """
    if (why := undefined(labels, true_NC)) is not None:
        assert labels.metric is not None
        raise DataError(f"{KEY}={labels.metric.name}: {why}")
    return _value(labels, values_NC, true_NC)


def of_targets(labels: Labels, values_NC: Floats, targets_NC: npt.NDArray[Any]) -> float:
    """`score` of rows whose labels are what Labels.targets gives."""
    return score(labels, values_NC, labels.true(targets_NC))


def judges(labels: Labels, targets_NC: npt.NDArray[Any]) -> bool:
    """Whether a metric is named, and defined on rows with these targets, so that it decides in place of the loss."""
    return labels.metric is not None and undefined(labels, labels.true(targets_NC)) is None


def defined(labels: Labels, values_NC: Floats, true_NC: Floats) -> dict[str, float]:
    """`score` by its name; empty where no metric is named, or where it is not defined on these rows."""
    if labels.metric is None or undefined(labels, true_NC) is not None:
        return {}
    return {labels.metric.name: _value(labels, values_NC, true_NC)}


def bounds(labels: Labels, values_NC: Floats, true_NC: Floats) -> dict[str, float]:
    """The 95 % interval of the score as NAME_low and NAME_high, by the percentile bootstrap over rows.

    Resamples on which it is not defined are left out; none where these are most of them, or where a user's function
    takes too long for RESAMPLES calls.
    """
    if labels.metric is None or undefined(labels, true_NC) is not None:
        return {}
    if (found := _resampled(labels, true_NC, values_NC)) is None:
        return {}
    low, high = found
    return {f"{labels.metric.name}_low": low, f"{labels.metric.name}_high": high}


def paired(labels: Labels, first_NC: Floats, second_NC: Floats, true_NC: Floats) -> PairedScore:
    """The scores of two predictions of the same rows, on which the metric is defined; the interval of their difference
    as `bounds` has it, None where it has none or no resample differs."""
    assert labels.metric is not None
    first, second = (_value(labels, each, true_NC) for each in (first_NC, second_NC))
    interval = _resampled(labels, true_NC, second_NC, first_NC)
    interval = None if interval is None or interval[0] == interval[1] else interval
    return PairedScore(labels.metric.name, len(true_NC), first, second, interval, None)


def _resampled(
    labels: Labels, true_NC: Floats, values_NC: Floats, without_NC: Floats | None = None
) -> tuple[float, float] | None:
    """The 95 % interval of the score over resamples of rows, or of how far it is above that of `without_NC`."""
    generator, found = np.random.default_rng(0), list[float]()

    def endless() -> Exception:
        return TimeoutError()

    try:
        with time_limit(endless, seconds=6 * SECONDS, clock="wall"):
            for _ in range(RESAMPLES):
                drawn = generator.integers(len(true_NC), size=len(true_NC))
                if undefined(labels, true_NC[drawn]) is None:
                    other = 0.0 if without_NC is None else _plain(labels, without_NC[drawn], true_NC[drawn])
                    found.append(_plain(labels, values_NC[drawn], true_NC[drawn]) - other)
    except Exception:  # a user's function may not bear a resample
        return None
    known = [each for each in found if math.isfinite(each)]
    if len(known) < RESAMPLES / 2:
        return None
    (interval,) = metrics.percentile_bounds(np.asarray(known)[:, None])
    return interval


def require(labels: Labels, true_NC: Floats, *, rows: str) -> None:
    """Score predictions by chance, so that a metric that cannot be computed is refused before anything trains.

    Args:
        rows: Names the rows in messages, such as `held-out`.

    Raises:
        DataError: The metric is not defined on these rows.
        ConfigError: The user's function fails.
    """
    if labels.metric is None:
        return
    if (why := undefined(labels, true_NC)) is not None:
        raise DataError(f"{KEY}={labels.metric.name} on the {rows} rows: {why}")
    chance_NC = np.random.default_rng(0).normal(size=true_NC.shape)
    _value(labels, labels.values(chance_NC), true_NC)


def undefined(labels: Labels, true_NC: Floats) -> str | None:
    """Why the metric is not defined on rows, and what to do, in a sentence; None where it is."""
    assert labels.metric is not None
    needs = "" if labels.metric.file else labels.metric.metric.needs
    if needs == "every class":
        having_C = (true_NC > 0.5).sum(0)
        for name, rows in zip(labels.names, having_C, strict=True):
            if rows in (0, len(true_NC)):
                return (
                    f"{'no' if rows == 0 else 'every'} row has the class `{name}`, so that nothing ranks it. Give more "
                    "rows, or write a metric that needs no ranks, such as evaluate.metric=macro_f1."
                )
    if needs == "scale" and labels.kind != "number" and not len(_steps(labels)):
        return (
            f"the classes {', '.join(f'`{name}`' for name in labels.names[:3])} are no whole numbers, and it compares "
            "places on a scale. Name them 0, 1, 2 ... (data.label_names), or write evaluate.metric=mcc."
        )
    if needs == "scale" and labels.kind == "number" and (np.rint(true_NC) != true_NC).any():
        return "it takes labels that are whole numbers. Write evaluate.metric=rmse."
    if needs in ("scale", "variety") and (true_NC == true_NC[0]).all():
        return "all rows have the same label, so that it is not defined. Give more rows, or evaluate.metric=rmse."
    return None


def _steps(labels: Labels) -> Floats:
    numbers = [finite(name) for name in labels.names]
    whole = all(number is not None and number == int(number) for number in numbers)
    return np.asarray(numbers if whole else [], dtype=np.float64)


def _value(labels: Labels, values_NC: Floats, true_NC: Floats) -> float:
    """The score; what a user's function does wrong is told in one line."""
    choice = labels.metric
    assert choice is not None
    if choice.file is None:
        return float(_plain(labels, values_NC, true_NC))

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{KEY}: {choice.name} in {choice.file} {what}. Correct the function.")

    try:
        with time_limit(lambda: wrong(f"took more than {SECONDS:.0f} s"), seconds=SECONDS, clock="wall"):
            found = _plain(labels, values_NC, true_NC)
    except ConfigError:
        raise
    except Exception as error:  # a user's code: whatever it raises, it cannot be used
        raise plugins.failed(choice.file, error, key=KEY) from error
    number = None if isinstance(found, (bool, str)) or np.ndim(found) else finite(found)
    if number is None:
        raise wrong(f"returned {found!r:.60}, and a metric is a finite number")
    return float(number)


def _plain(labels: Labels, values_NC: Floats, true_NC: Floats) -> Any:
    choice = labels.metric
    assert choice is not None
    if choice.file is not None:
        return _own(choice, labels, values_NC, true_NC)
    if labels.kind == "number":
        rows = JudgedRows(true_NC[:, 0], values_NC[:, 0], values_NC, np.empty(0))
    elif labels.kind == "several":
        rows = JudgedRows(true_NC > 0.5, labels.moved(values_NC, labels.shift) >= 0.5, values_NC, np.empty(0))
    else:
        said_N = labels.moved(values_NC, labels.shift).argmax(1)
        rows = JudgedRows(true_NC.argmax(1), said_N, values_NC, _steps(labels))
    return choice.metric.score(rows)


def _own(choice: Choice, labels: Labels, values_NC: Floats, true_NC: Floats) -> Any:
    """A user's function takes labels and predicted labels, and as a third argument, if it has one, what the model
    says: probabilities with a column for each class in the order of their names."""
    assert choice.file is not None
    function = plugins.function(choice.file, choice.name, SIGNATURE.format(name=choice.name), key=KEY)
    true, predicted = (np.asarray(labels.predicted(each), dtype=_dtype(labels)) for each in (true_NC, values_NC))
    takes = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return function(true, predicted, values_NC) if len(takes) > 2 else function(true, predicted)


def _dtype(labels: Labels) -> Any:
    return {"number": np.float64, "several": object}.get(labels.kind)
