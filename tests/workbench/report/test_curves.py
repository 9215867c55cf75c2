"""Curves of a run say what happened in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from workbench.report import curves
from workbench.report.run_record import COLUMNS, OPENED, RunRecord, merged_records


@pytest.mark.parametrize(
    ("shares", "caption"),
    [
        ([0.5, 0.75, 1, 1], "All are open from step 3 on."),
        ([0.5, 0.75, 0.9, 0.95], "Not all are open at the end."),
        ([1, 0.5, 0.75, 1], "All are open from step 4 on."),
        ([1, 1, 0.5, 0.75], "Not all are open at the end."),
        ([1, 1, 1, 1], "All are open from step 1 on."),
    ],
    ids=["opens all", "ends before", "self-paced", "self-paced, ends before", "of no more"],
)
def test_the_caption_says_from_when_on_all_rows_are_open(shares: list[float], caption: str) -> None:
    """A self-paced curriculum begins with a pass over all rows, after which it closes some."""
    metrics = pd.DataFrame({"step": range(1, 5), "loss": 1.0, OPENED: shares}, dtype=float)
    metrics = metrics.reindex(columns=[*COLUMNS, OPENED])
    config = {"recipe": "classify", "data": {"format": "image"}}
    run = RunRecord(Path("run"), "run", "", config, {}, metrics, {}, pd.DataFrame())
    (plot,) = (plot for plot in curves.of_run(run) if plot.title == "Rows open by data.curriculum")
    assert plot.caption == f"Each step samples the open rows. {caption}"


def test_a_cross_validation_shows_the_rows_that_its_adapters_have_open() -> None:
    """Their mean, one round after another; the adapter of all rows has its own."""
    base = pd.DataFrame({"step": [1, 2], "loss": 1.0}, dtype=float).reindex(columns=COLUMNS)
    shares = {"round-0/fold-0": [0.5, 1.0], "round-0/fold-1": [0.6, 1.0], "refit": [0.25, 0.75]}
    members = {name: base.assign(**{OPENED: share}) for name, share in shares.items()}
    found = merged_records(members)
    assert found["step"].tolist() == [1, 2, 3, 4] and found[OPENED].tolist() == pytest.approx([0.55, 1, 0.25, 0.75])
    config = {"recipe": "crossval", "data": {"format": "image"}}
    run = RunRecord(Path("run"), "run", "", config, {}, found, {}, pd.DataFrame(), members)
    titles = [plot.title for plot in curves.of_run(run)]
    assert "Rows open by data.curriculum" in titles
    without = replace(run, metrics=merged_records({name: base for name in shares}))
    assert "Rows open by data.curriculum" not in [plot.title for plot in curves.of_run(without)]
