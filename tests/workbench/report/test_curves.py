"""Curves of a run say what happened in it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from workbench.report import curves
from workbench.report.run_record import COLUMNS, OPENED, RunRecord


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([0.5, 0.75, 1, 1], "All are open from step 3 on."),
        ([0.5, 0.75, 0.9, 0.95], "Not all are open at the end."),
        ([1, 0.5, 0.75, 1], "All are open from step 4 on."),
        ([1, 1, 0.5, 0.75], "Not all are open at the end."),
        ([1, 1, 1, 1], "All are open from step 1 on."),
    ],
    ids=["opens all", "ends before", "self-paced", "self-paced, ends before", "of no more"],
)
def test_the_caption_says_from_when_on_all_rows_are_open(shares: list[float], told: str) -> None:
    """A self-paced curriculum begins with a pass over all rows, after which it closes some."""
    metrics = pd.DataFrame({"step": range(1, 5), "loss": 1.0, OPENED: shares}, dtype=float)
    metrics = metrics.reindex(columns=[*COLUMNS, OPENED])
    config = {"recipe": "classify", "data": {"format": "image"}}
    run = RunRecord(Path("run"), "run", "", config, {}, metrics, {}, pd.DataFrame())
    (plot,) = (plot for plot in curves.of_run(run) if plot.title == "Rows open by data.curriculum")
    assert plot.caption == f"Each step draws among those that are open. {told}"
