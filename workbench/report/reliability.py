"""Reliability diagram (accuracy by predicted probability) of out-of-fold rows, with and without a temperature.

Legend: N rows, C classes, P predictions, B bins of probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from workbench.evaluation.class_scores import BINS
from workbench.evaluation.prediction_table import class_names, hot
from workbench.report.plots import Axis, Floats, Plot, Series, draw
from workbench.report.run_record import RunRecord
from workbench.runs import units


def diagram(run: RunRecord) -> Plot | None:
    """Confidence against the share that is right; None for numbers, and empty before there are out-of-fold rows.

    out_of_fold.parquet holds the outputs after all stages, so a temperature that was kept is undone for the other
    line. That is exact where one adapter speaks for a row, and nearly so for a mean of several.
    """
    kind = run.config.get("classes", {}).get("kind", "one")
    if kind == "number":
        return None
    predictions = run.labelled
    if predictions.empty:
        return draw("Calibration", [], x=Axis(), y=Axis())
    names = class_names(predictions)
    p_NC, true_NC = predictions[[f"p_{name}" for name in names]].to_numpy(np.float64), hot(predictions["label"], names)
    lines = [("as it stands", p_NC)]
    stage = _stage(run)
    temperature = (stage.get("facts") or {}).get("temperature")
    if temperature is not None:
        kept = bool(stage.get("accepted"))
        other_NC = tempered(p_NC, 1 / temperature if kept else temperature, several=kind == "several")
        label = "without the temperature" if kept else "with the temperature that was not kept"
        lines.append((f"{label}, {units.number(temperature)}", other_NC))
    drawn = [(label, *_reliability(each_NC, true_NC, several=kind == "several")) for label, each_NC in lines]
    diagonal = Series("always keeps its word", np.array([0.0, 1.0]), np.array([0.0, 1.0]), "faint", 7)
    gaps = "; ".join(f"{units.number(gap)} {label}" for label, _, _, gap in drawn)
    return draw(
        "Calibration",
        [diagonal, *(Series(label, x, y, "marked", colour) for colour, (label, x, y, _) in enumerate(drawn))],
        x=Axis("probability of a class" if kind == "several" else "probability of the likeliest class"),
        y=Axis("share that is right"),
        caption=f"Mean distance to the diagonal, in {BINS} bins: {gaps}.",
        wide=True,
    )


def tempered(p_NC: Floats, temperature: float, *, several: bool) -> Floats:
    """The probabilities that outputs divided by `temperature` would give."""
    tiny = np.finfo(np.float64).tiny
    if several:
        scaled_NC: Floats = special.expit(
            (np.log(np.maximum(p_NC, tiny)) - np.log(np.maximum(1 - p_NC, tiny))) / temperature
        )
    else:
        scaled_NC = special.softmax(np.log(np.maximum(p_NC, tiny)) / temperature, axis=1)
    return scaled_NC


def bins(p_P: Floats, right_P: NDArray[np.bool_]) -> tuple[Floats, Floats, float]:
    """Mean probability and share that is right of each bin that has predictions, and their mean gap over predictions.

    The gap is the expected calibration error of Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    bin_P = np.minimum((p_P * BINS).astype(np.int64), BINS - 1)
    count_B = np.bincount(bin_P, minlength=BINS)
    sums = [np.bincount(bin_P, weights=values, minlength=BINS)[count_B > 0] for values in (p_P, right_P)]
    said_B, right_B = (total / count_B[count_B > 0] for total in sums)
    return said_B, right_B, float(np.abs(sums[0] - sums[1]).sum() / max(1, len(p_P)))


def _reliability(p_NC: Floats, true_NC: NDArray[np.bool_], *, several: bool) -> tuple[Floats, Floats, float]:
    """`bins` of every class of every row, or of the likeliest class."""
    if several:
        return bins(p_NC.ravel(), true_NC.ravel())
    return bins(p_NC.max(1), true_NC[np.arange(len(p_NC)), p_NC.argmax(1)])


def _stage(run: RunRecord) -> Mapping[str, Any]:
    matches = (stage for stage in run.stages.get("stages") or [] if stage.get("name") == "calibration")
    return next(matches, {})
