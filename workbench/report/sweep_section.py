"""The section of a page on a sweep: its settings with mean and spread over seeds, and the loss against each of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config.sections.sweep_config import shown
from workbench.report.plots import Axis, Floats, Plot, Series, draw
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

SEED = "seed"


@dataclass(frozen=True)
class Setting:
    """Members that differ in nothing but their seed."""

    values: tuple[str, ...]
    """Value of each swept key but the seed."""
    losses: tuple[float, ...]
    """Held-out loss of what each member that is done would ship."""
    members: int
    failed: int
    ships: bool
    """Whether the sweep ships one of them."""

    @property
    def mean(self) -> float | None:
        """Mean of the losses."""
        return statistics.mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the losses over seeds; None for fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def row(self) -> tuple[str, ...]:
        """Values, mean, spread, lowest and members as a table shows them."""
        lowest = min(self.losses, default=None)
        done = f"{len(self.losses)} of {self.members}" if len(self.losses) < self.members else str(self.members)
        failed = f", {self.failed} failed" if self.failed else ""
        return (*self.values, *map(units.loss, (self.mean, self.spread, lowest)), f"{done}{failed}")


@dataclass(frozen=True)
class SweepTable:
    """A sweep's table, in words."""

    columns: tuple[str, ...]
    settings: tuple[Setting, ...]
    """In the order of the configuration."""
    member_columns: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    """One row for each member."""
    shipped: int | None
    """Which of the members the run ships."""
    notes: tuple[str, ...]
    """Reasons why the best member may be less good than it looks."""


def read(folder: Path) -> SweepTable | None:
    """The sweep in a run directory; None where the run is none."""
    table = files.read_json(folder / "sweep.json")
    if not table:
        return None
    rows: list[dict[str, Any]] = table["members"]
    keys = [key for key in rows[0]["settings"] if key != SEED]
    best = [number for number, row in enumerate(rows) if row["member"] == table["best"]]
    settings = tuple(_settings(rows, keys, table))
    return SweepTable(
        columns=(*keys, "mean", "spread", "lowest", "members"),
        settings=settings,
        member_columns=(*rows[0]["settings"], "held-out loss", "lowest", "at step", "steps", "time", "status"),
        members=tuple(map(_member, rows)),
        shipped=best[0] if best else None,
        notes=tuple(_notes(rows, settings, files.read_json(folder / "scores.json"), table)),
    )


def plots(run: RunRecord) -> list[Plot]:
    """Held-out loss against the first swept number, and the curves of all members; none where the run is no sweep."""
    table = files.read_json(run.folder / "sweep.json")
    return [*_dependence(table, run.unit), _curves(table, run)] if table else []


def _settings(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], table: Mapping[str, Any]) -> list[Setting]:
    return [
        Setting(
            values=values,
            losses=tuple(loss for row in group if (loss := _loss(row, table)) is not None),
            members=len(group),
            failed=sum(row["status"] == "failed" for row in group),
            ships=any(row["member"] == table["best"] for row in group),
        )
        for values, group in _grouped(rows, keys).items()
    ]


def _grouped(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(shown(row["settings"][key]) for key in keys), []).append(row)
    return groups


def _loss(row: Mapping[str, Any], table: Mapping[str, Any]) -> float | None:
    """Held-out loss of what a member would ship; None where it is not done."""
    name = "best_held_out_loss" if table["ship"] == "best" else "held_out_loss"
    return row[name] if row["status"] == "done" else None


def _member(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *map(shown, row["settings"].values()),
        units.loss(row["held_out_loss"]),
        units.loss(row["best_held_out_loss"]),
        units.NOTHING if row["best_step"] is None else f"{row['best_step']:,}",
        f"{row['steps']:,}",
        units.duration(row["seconds"]),
        row["status"],
    )


def _notes(
    rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting], scores: Mapping[str, Any], table: Mapping[str, Any]
) -> list[str]:
    compared = sum(_loss(row, table) is not None for row in rows)
    if compared < 2:
        return []
    notes = [f"The best of {compared} on the same held-out rows flatters itself: expect more on new rows."]
    if "test" in scores:
        notes[0] += f" On the test rows, scored once, its loss is {units.loss(scores['test']['loss'])}."
    else:
        notes[0] += " data.test=FILE scores it once on rows that chose nothing."
    return [*notes, *_lead(settings), *_edges(rows, table)]


def _lead(settings: Sequence[Setting]) -> list[str]:
    """Whether the best setting leads by more than what the choice of a seed makes."""
    known = [(each.mean, each.spread) for each in settings if each.mean is not None and each.spread is not None]
    if len(known) < 2:
        return []
    (best, spread), (second, other) = sorted(known)[:2]
    lead, chance = second - best, max(spread, other)
    if lead > chance:
        return []
    return [
        f"The best setting leads the second by {units.loss(lead)}, which is no more than seeds make "
        f"({units.loss(chance)}): either may be better. More seeds would tell."
    ]


def _edges(rows: Sequence[Mapping[str, Any]], table: Mapping[str, Any]) -> list[str]:
    """Numbers whose best value is the first or last that was tried."""
    notes = []
    (best,) = (row["settings"] for row in rows if row["member"] == table["best"])
    for key in _numeric(rows):
        tried = sorted({row["settings"][key] for row in rows})
        if len(tried) > 2 and best[key] in (tried[0], tried[-1]):
            side = ("lowest", "lower") if best[key] == tried[0] else ("highest", "higher")
            notes.append(f"The best {key} is the {side[0]} that was tried: a {side[1]} one may be better.")
    return notes


def _dependence(table: Mapping[str, Any], unit: str) -> list[Plot]:
    """A point for each member, a line for the mean over seeds; a colour for each combination of the other keys."""
    rows: list[dict[str, Any]] = table["members"]
    number = next((key for key in [*_numeric(rows), SEED] if key in rows[0]["settings"]), None)
    if number is None:
        return []
    others = [key for key in rows[0]["settings"] if key not in (number, SEED)]
    series = []
    for colour, (values, group) in enumerate(_grouped(rows, others).items()):
        named = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in zip(others, values, strict=True))
        points = [(float(row["settings"][number]), loss) for row in group if (loss := _loss(row, table)) is not None]
        if number != SEED:
            means = [(x, statistics.mean(loss for at, loss in points if at == x)) for x in sorted(dict(points))]
            series.append(Series(f"mean, {named}" if named else "mean over seeds", *_columns(means), "line", colour))
        series.append(Series(named or "each member", *_columns(points), "points", colour))
    at = sorted({float(row["settings"][number]) for row in rows if _loss(row, table) is not None})
    spans = bool(at) and at[0] > 0 and at[-1] >= 4 * at[0]
    failed = [row["member"] for row in rows if row["status"] == "failed"]
    caption = f"Failed, and not shown: {'; '.join(failed)}." if failed else ""
    axis = Axis(number, logarithmic=tuple(at) if spans else ())
    return [draw(f"Held-out loss against {number}", series, x=axis, y=Axis(unit), caption=caption, wide=True)]


def _curves(table: Mapping[str, Any], run: RunRecord) -> Plot:
    """Held-out loss of every member over its steps; members of one setting share a colour."""
    rows: list[dict[str, Any]] = table["members"]
    keys = [key for key in rows[0]["settings"] if key != SEED]
    series = []
    for colour, (values, group) in enumerate(_grouped(rows, keys).items()):
        named = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in zip(keys, values, strict=True))
        for row in group:
            metrics = run.members.get(row["member"])
            if metrics is not None:
                watched = metrics.dropna(subset=["held_out_loss"])
                x, y = (np.asarray(watched[column], dtype=np.float64) for column in ("step", "held_out_loss"))
                series.append(Series(named or "each member", x, y, "marked", colour))
    axis = Axis("step", "count")
    return draw("Held-out loss of all members", series, x=axis, y=Axis(run.unit), wide=True).once_each()


def _numeric(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys, but the seed, whose values are numbers."""
    kinds = {key: {type(row["settings"][key]) for row in rows} for key in rows[0]["settings"]}
    return [key for key, types in kinds.items() if key != SEED and types <= {int, float}]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    return np.array([x for x, _ in points], dtype=np.float64), np.array([y for _, y in points], dtype=np.float64)
