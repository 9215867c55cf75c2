"""The section of a page on a fleet: its members with what they began and ended with, and their curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.config.sections.sweep_config import shown
from workbench.report.plots import Axis, Plot, Series, draw
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

TABLE = "fleet.json"
COLUMNS = ("member", "rows", "rank", "trained", "steps", "loss before", "after", "time", "status")


class FleetTable(NamedTuple):
    """The table of a fleet, in words."""

    columns: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    """One row for each member."""
    notes: tuple[str, ...]
    """Why members failed."""


def read(folder: Path) -> FleetTable | None:
    """The fleet in a run directory; None where the run is none."""
    rows = _rows(folder)
    if not rows:
        return None
    failed = tuple(f"{row['member']} failed: {row['reason']}" for row in rows if row["status"] == "failed")
    return FleetTable(COLUMNS, tuple(map(_member, rows)), failed)


def verdict(record: RunRecord) -> str:
    """Outcome in one sentence."""
    rows = _rows(record.folder)
    done = [row for row in rows if row["before"] is not None and row["after"] is not None]
    fell = sum(row["after"] < row["before"] for row in done)
    failed = sum(row["status"] == "failed" for row in rows)
    more = f"; {failed} failed" if failed else ""
    return f"{len(done)} of {len(rows)} members are trained and scored; the held-out loss of {fell} fell{more}."


def plots(run: RunRecord) -> list[Plot]:
    """Held-out loss of each member over its steps; none where the run is no fleet."""
    if not _rows(run.folder):
        return []
    series = []
    for colour, (name, metrics) in enumerate(run.members.items()):
        watched = metrics.dropna(subset=["held_out_loss"])
        x, y = (np.asarray(watched[column], dtype=np.float64) for column in ("step", "held_out_loss"))
        series.append(Series(name, x, y, "marked", colour))
    return [draw("Held-out loss of all members", series, x=Axis("step", "count"), y=Axis("held-out loss"), wide=True)]


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = files.read_json(folder / TABLE).get("members", [])
    return rows


def _member(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["member"],
        units.NOTHING if row["rows"] is None else f"{row['rows']:,}",
        shown(row["rank"]) if row["rank"] is not None else units.NOTHING,
        units.NOTHING if row["trainable"] is None else units.count(row["trainable"]),
        f"{row['steps']:,}",
        units.loss(row["before"]),
        units.loss(row["after"] if row["after"] is not None else row["held_out_loss"]),
        units.duration(row["seconds"]),
        row["status"],
    )
