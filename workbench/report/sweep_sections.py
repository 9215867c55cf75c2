"""The sections of a page on runs with many members: sweeps, searches, fleets and rounds, each as a table and plots.

A sweep's settings stand with mean and spread over seeds; a search's members by how far they came, with the settings
that explain their losses; a fleet's members with what they began and ended with.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.config.sections.search_config import shown
from workbench.report.plots import STEP, Axis, Floats, Plot, Series, Style, draw, floats
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

SEED = "seed"
SCORED = {"after": "held-out", "test": "test"}
"""Scored rows by their key in scores.json."""
ROUND_COLUMNS = ("round", "rows", "steps", "held-out reward", "95 %", "from the best before", "95 %", "time", "")
FLEET_COLUMNS = ("member", "rows", "rank", "trained", "steps", "loss before", "after", "time", "status")


@dataclass(frozen=True)
class Setting:
    """Members of a sweep that differ in nothing but their seed."""

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


class SweepTable(NamedTuple):
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
    score_columns: tuple[str, ...]
    scores: tuple[tuple[str, ...], ...]
    """One row for each setting, rows that are scored, and score: its mean over seeds, and how far seeds differ."""
    seeded: bool
    """Whether members differ in their seed."""


class MemberTable(NamedTuple):
    """The members of a search or a fleet, in words."""

    columns: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    """One row for each; of a search those that came farthest first, by loss."""
    notes: tuple[str, ...]
    """Cost of a search, and reasons why its best may be less good than it looks; or why members of a fleet failed."""
    shipped: int | None = None
    """Which of the rows a search ships."""
    settings: tuple[tuple[str, str], ...] = ()
    """Each setting of a search and the share of the differences that it explains; empty for few members."""


def plots(run: RunRecord) -> list[Plot]:
    """The plots of a sweep, a search or a fleet; none of another run."""
    return [*_sweep_plots(run), *_search_plots(run), *_fleet_plots(run)]


# Sweeps


def read_sweep(folder: Path) -> SweepTable | None:
    """The sweep in a run directory; None where the run is none."""
    table = files.read_json(folder / "sweep.json")
    if not table:
        return None
    rows: list[dict[str, Any]] = table["members"]
    keys = [key for key in rows[0]["settings"] if key != SEED]
    settings = tuple(
        Setting(
            values=values,
            losses=tuple(loss for row in group if (loss := _shipped_loss(row, table)) is not None),
            members=len(group),
            failed=sum(row["status"] == "failed" for row in group),
            ships=any(row["member"] == table["best"] for row in group),
        )
        for values, group in _grouped(rows, keys).items()
    )
    return SweepTable(
        columns=(*keys, "mean", "spread", "lowest", "members"),
        settings=settings,
        member_columns=(*rows[0]["settings"], "held-out loss", "lowest", "at step", "steps", "time", "status"),
        members=tuple(
            (
                *map(shown, row["settings"].values()),
                units.loss(row["held_out_loss"]),
                units.loss(row["best_held_out_loss"]),
                units.NOTHING if row["best_step"] is None else f"{row['best_step']:,}",
                f"{row['steps']:,}",
                units.duration(row["seconds"]),
                row["status"],
            )
            for row in rows
        ),
        shipped=_shipped(rows, table),
        notes=tuple(_sweep_notes(rows, settings, files.read_json(folder / "scores.json"), table)),
        score_columns=(*keys, "rows", "score", "mean", "sd", "95 %", "seeds"),
        scores=tuple(
            (*map(shown, group["settings"].values()), SCORED[split], name, *_over_seeds(each))
            for group in table.get("over_seeds", ())
            for split, scores in group["scores"].items()
            for name, each in scores.items()
        ),
        seeded=SEED in rows[0]["settings"],
    )


def _over_seeds(score: Mapping[str, Any]) -> tuple[str, ...]:
    interval = "" if score["low"] is None else f"{units.number(score['low'])} to {units.number(score['high'])}"
    return units.number(score["mean"]), units.number(score["sd"]), interval or units.NOTHING, str(score["seeds"])


def _shipped(rows: Sequence[Mapping[str, Any]], table: Mapping[str, Any]) -> int | None:
    return next((number for number, row in enumerate(rows) if row["member"] == table["best"]), None)


def _grouped(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(shown(row["settings"][key]) for key in keys), []).append(row)
    return groups


def _shipped_loss(row: Mapping[str, Any], table: Mapping[str, Any]) -> float | None:
    """Held-out loss of what a member would ship; None where it is not done."""
    name = "best_held_out_loss" if table["ship"] == "best" else "held_out_loss"
    return row[name] if row["status"] == "done" else None


def _sweep_notes(
    rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting], scores: Mapping[str, Any], table: Mapping[str, Any]
) -> list[str]:
    compared = sum(_shipped_loss(row, table) is not None for row in rows)
    if compared < 2:
        return []
    notes = [f"The best of {compared} on the same held-out rows flatters itself: expect more on new rows."]
    if "test" in scores:
        notes[0] += f" On the test rows, scored once, its loss is {units.loss(scores['test']['loss'])}."
    else:
        notes[0] += " data.test=FILE scores it once on rows that chose nothing."
    # Whether the best setting leads by more than what the choice of a seed makes.
    known = sorted((each.mean, each.spread) for each in settings if each.mean is not None and each.spread is not None)
    if len(known) > 1:
        (best, spread), (second, other) = known[:2]
        if (lead := second - best) <= (chance := max(spread, other)):
            notes.append(
                f"The best setting leads the second by {units.loss(lead)}, which is no more than seeds make "
                f"({units.loss(chance)}): either may be better. More seeds would tell."
            )
    # Numbers whose best value is the first or last that was tried.
    (chosen,) = (row["settings"] for row in rows if row["member"] == table["best"])
    for key in _numeric(rows):
        tried = sorted({row["settings"][key] for row in rows})
        if len(tried) > 2 and chosen[key] in (tried[0], tried[-1]):
            side = ("lowest", "lower") if chosen[key] == tried[0] else ("highest", "higher")
            notes.append(f"The best {key} is the {side[0]} that was tried: a {side[1]} one may be better.")
    return notes


def _sweep_plots(run: RunRecord) -> list[Plot]:
    """Held-out loss against the first swept number, and the curves of all members, one colour for each setting."""
    table = files.read_json(run.folder / "sweep.json")
    if not table:
        return []
    rows: list[dict[str, Any]] = table["members"]
    keys = [key for key in rows[0]["settings"] if key != SEED]
    series = []
    for colour, (values, group) in enumerate(_grouped(rows, keys).items()):
        for row in group:
            if (metrics := run.members.get(row["member"])) is not None:
                name = _values(keys, values) or "each member"
                series.append(Series(name, *_held_out(metrics), "marked", colour))
    curves = draw("Held-out loss of all members", series, x=STEP, y=Axis(run.unit), wide=True).once_each()
    return [*_dependence(rows, table, run.unit), curves]


def _dependence(rows: Sequence[Mapping[str, Any]], table: Mapping[str, Any], unit: str) -> list[Plot]:
    """A point for each member, a line for the mean over seeds; a colour for each combination of the other keys."""
    number = next((key for key in [*_numeric(rows), SEED] if key in rows[0]["settings"]), None)
    if number is None:
        return []
    others = [key for key in rows[0]["settings"] if key not in (number, SEED)]
    series = []
    for colour, (values, group) in enumerate(_grouped(rows, others).items()):
        named = _values(others, values)
        points = [
            (float(row["settings"][number]), loss) for row in group if (loss := _shipped_loss(row, table)) is not None
        ]
        if number != SEED:
            means = [(x, statistics.mean(loss for at, loss in points if at == x)) for x in sorted(dict(points))]
            series.append(Series(f"mean, {named}" if named else "mean over seeds", *_columns(means), "line", colour))
        series.append(Series(named or "each member", *_columns(points), "points", colour))
    at = sorted({float(row["settings"][number]) for row in rows if _shipped_loss(row, table) is not None})
    spans = bool(at) and at[0] > 0 and at[-1] >= 4 * at[0]
    failed = [row["member"] for row in rows if row["status"] == "failed"]
    caption = f"Failed, and not shown: {'; '.join(failed)}." if failed else ""
    axis = Axis(number, logarithmic=tuple(at) if spans else ())
    return [draw(f"Held-out loss against {number}", series, x=axis, y=Axis(unit), caption=caption, wide=True)]


def _numeric(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys, but the seed, whose values are numbers."""
    kinds = {key: {type(row["settings"][key]) for row in rows} for key in rows[0]["settings"]}
    return [key for key, types in kinds.items() if key != SEED and types <= {int, float}]


def _values(keys: Sequence[str], values: Sequence[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in zip(keys, values, strict=True))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    return floats([x for x, _ in points]), floats([y for _, y in points])


def _held_out(metrics: Any) -> tuple[Floats, Floats]:
    """Held-out loss of a member over its steps."""
    watched = metrics.dropna(subset=["held_out_loss"])
    return floats(watched["step"]), floats(watched["held_out_loss"])


# Searches


def read_search(folder: Path) -> MemberTable | None:
    """The search in a run directory; None where the run is none, or has no member yet."""
    table = files.read_json(folder / "search.json")
    if not table.get("members"):
        return None
    rows = sorted(table["members"], key=_standing)
    scores = files.read_json(folder / "scores.json")
    ended = sum(row["losses"][-1] is not None for row in rows)
    judges = "all held-out rows" if table["rows"] is None else f"up to {table['rows']:,} held-out rows"
    notes = [
        f"{len(rows)} settings took the steps of {table['trained']:.3g} trainings; {ended} came to the end. Before "
        f"that, members were compared on {judges}, at the end on all of them."
    ]
    if table["importances"]:
        notes.append(
            "What a setting explains is its share of the differences between the members' places after "
            f"{_share(table['shares'][0])} of their steps (functional analysis of variance): what matters early, among "
            f"{len(rows)} members, need not be what matters at the end."
        )
    caveat = "The best of many on the same held-out rows flatters itself: expect more on new rows."
    if "test" in scores:
        caveat += f" On the test rows, scored once, its loss is {scores['test']['loss']:.4f}."
    notes.append(caveat)
    # Numbers whose best value is near the lowest or highest that was tried.
    shipped = _shipped(rows, table)
    for key, best in {} if shipped is None else rows[shipped]["settings"].items():
        tried = [row["settings"][key] for row in rows]
        if not _numbers(tried) or len(set(tried)) < 3:
            continue
        place = _positions(tried)[tried.index(best)]
        if place <= 0.05 or place >= 0.95:
            side = ("low", "lower") if place < 0.5 else ("high", "higher")
            notes.append(f"The best {key} is at the {side[0]} end of what was tried: a {side[1]} one may be better.")
    failed = [row["member"] for row in rows if row["status"] == "failed"]
    return MemberTable(
        columns=(
            *rows[0]["settings"],
            *(f"{table['by']} after {_share(each)}" for each in table["shares"]),
            "steps",
            "status",
        ),
        members=tuple(
            (
                *map(shown, row["settings"].values()),
                *map(units.loss, row["losses"]),
                f"{row['steps']:,}",
                row["status"],
            )
            for row in rows
        ),
        shipped=_shipped(rows, table),
        settings=tuple((key, units.percent(value)) for key, value in table["importances"].items()),
        notes=tuple([*notes, *([f"Failed: {'; '.join(failed)}."] if failed else [])]),
    )


def _reached(row: Mapping[str, Any]) -> int:
    """The highest rung at which a member has a loss; -1 where it has none."""
    return max((rung for rung, loss in enumerate(row["losses"]) if loss is not None), default=-1)


def _standing(row: Mapping[str, Any]) -> tuple[int, float]:
    rung = _reached(row)
    return -rung, row["losses"][rung] if rung >= 0 else 0.0


def _share(share: float) -> str:
    """A share of a training: 1/16, or all."""
    return "all" if share == 1 else str(Fraction(share).limit_denominator(10**6))


def _search_plots(run: RunRecord) -> list[Plot]:
    """Parallel coordinates, the loss against each setting, and the losses along the way; none where it is no search."""
    table = files.read_json(run.folder / "search.json")
    rows = [row for row in table.get("members", ()) if row["losses"][0] is not None]
    if not rows:
        return []
    shares = [_share(each) for each in table["shares"]]
    by = table["by"]
    unit = run.unit if by == "loss" else by
    against = [_against(key, rows, shares, by, unit) for key in rows[0]["settings"]]
    series = []
    for row in sorted(rows, key=_reached):
        rungs = [rung for rung, loss in enumerate(row["losses"]) if loss is not None]
        x, y = floats([table["shares"][rung] for rung in rungs]), floats([row["losses"][rung] for rung in rungs])
        reached = _reached(row)
        series.append(Series(f"came to {shares[reached]}", x, y, "marked", reached))
    x_axis, y_axis = Axis("share of a training", logarithmic=tuple(table["shares"])), Axis(unit)
    along = draw(f"Held-out {by} at each comparison", series, x=x_axis, y=y_axis, wide=True).once_each()
    return [_coordinates(rows, shares, by, unit), *against, along]


def _coordinates(rows: Sequence[Mapping[str, Any]], shares: Sequence[str], by: str, unit: str) -> Plot:
    """A line for each member through all its settings and its loss after the first comparison."""
    names, heights = [], []
    for key in rows[0]["settings"]:
        column = [row["settings"][key] for row in rows]
        extent = f"{shown(min(column))} to {shown(max(column))}" if _numbers(column) else ", ".join(_named(column))[:30]
        names.append(f"{key.rpartition('.')[2]}\n{extent}")
        heights.append(_positions(column))
    # Of losses the place counts, so that one that exploded leaves the others apart.
    order = np.argsort(np.argsort([row["losses"][0] for row in rows])) / max(1, len(rows) - 1)
    names.append(f"{by} after {shares[0]}\nlowest to highest")
    heights.append(order.tolist())
    series = []
    for number, row in sorted(enumerate(rows), key=lambda each: _reached(each[1])):
        rung, y = _reached(row), np.array([height[number] for height in heights])
        style: Style = "faint" if rung == 0 else "line"
        series.append(Series(f"came to {shares[rung]}", np.arange(len(y), dtype=np.float64), y, style, rung))
    return draw(
        "Settings of all members, and how far they came",
        series,
        x=Axis(names=tuple(names)),
        y=Axis("lowest to highest", ticks="none"),
        caption=f"Each line is a member; {unit}.",
        wide=True,
    ).once_each()


def _against(key: str, rows: Sequence[Mapping[str, Any]], shares: Sequence[str], by: str, unit: str) -> Plot:
    """What is judged against one setting, at each rung."""
    every = [row["settings"][key] for row in rows]
    names = [] if _numbers(every) else _named(every)
    series = []
    for rung, share in enumerate(shares):
        there = [row for row in rows if row["losses"][rung] is not None]
        values = [row["settings"][key] for row in there]
        x = [names.index(shown(value)) for value in values] if names else values
        series.append(
            Series(f"after {share}", floats(x), floats([row["losses"][rung] for row in there]), "points", rung)
        )
    marks: tuple[float, ...] = ()
    if _spans(every):
        # Ticks at the powers of ten inside, or at both ends.
        low, high = min(every), max(every)
        tens = [10.0**power for power in range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1)]
        marks = tuple(map(float, tens if len(tens) > 1 else [low, high]))
    axis = Axis(key, logarithmic=marks, names=tuple(names))
    return draw(f"Held-out {by} against {key}", series, x=axis, y=Axis(unit))


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _spans(values: Sequence[Any]) -> bool:
    """Whether numbers span so much that their logarithms are to be shown."""
    return _numbers(values) and min(values) > 0 and max(values) >= 8 * min(values)


def _named(values: Sequence[Any]) -> list[str]:
    """The different values that are no numbers, in their order."""
    return list(dict.fromkeys(map(shown, values)))


def _positions(values: Sequence[Any]) -> list[float]:
    """Each value's place between the lowest (0) and the highest (1), or among the names."""
    if not _numbers(values):
        names = _named(values)
        return [names.index(shown(value)) / max(1, len(names) - 1) for value in values]
    scaled = np.log(values) if _spans(values) else floats(values)
    width = float(scaled.max() - scaled.min())
    return [float(each - scaled.min()) / width if width else 0.5 for each in scaled]


# Fleets


def read_fleet(folder: Path) -> MemberTable | None:
    """The fleet in a run directory; None where the run is none."""
    rows = _fleet_rows(folder)
    if not rows:
        return None
    members = tuple(
        (
            row["member"],
            units.NOTHING if row["rows"] is None else f"{row['rows']:,}",
            units.NOTHING if row["rank"] is None else shown(row["rank"]),
            units.NOTHING if row["trainable"] is None else units.count(row["trainable"]),
            f"{row['steps']:,}",
            units.loss(row["before"]),
            units.loss(row["after"] if row["after"] is not None else row["held_out_loss"]),
            units.duration(row["seconds"]),
            row["status"],
        )
        for row in rows
    )
    failed = tuple(f"{row['member']} failed: {row['reason']}" for row in rows if row["status"] == "failed")
    return MemberTable(FLEET_COLUMNS, members, failed)


def fleet_verdict(record: RunRecord) -> str:
    """Outcome of a fleet in one sentence."""
    rows = _fleet_rows(record.folder)
    done = [row for row in rows if row["before"] is not None and row["after"] is not None]
    fell = sum(row["after"] < row["before"] for row in done)
    failed = sum(row["status"] == "failed" for row in rows)
    more = f"; {failed} failed" if failed else ""
    return f"{len(done)} of {len(rows)} members are trained and scored; the held-out loss of {fell} fell{more}."


def _fleet_plots(run: RunRecord) -> list[Plot]:
    if not _fleet_rows(run.folder):
        return []
    series = [
        Series(name, *_held_out(metrics), "marked", colour)
        for colour, (name, metrics) in enumerate(run.members.items())
    ]
    return [draw("Held-out loss of all members", series, x=STEP, y=Axis("held-out loss"), wide=True)]


def _fleet_rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = files.read_json(folder / "fleet.json").get("members", [])
    return rows


# Rounds


def read_rounds(folder: Path) -> MemberTable | None:
    """The rounds in a run directory; None where the run has none."""
    table = files.read_json(folder / "rounds.json")
    if not table:
        return None
    rows: list[dict[str, Any]] = [{"member": "before", "steps": None, "seconds": None} | table["start"]]
    rows += table["members"]
    members = tuple(
        (
            row["member"],
            units.NOTHING if row.get("rows") is None else f"{row['rows']:,}",
            units.NOTHING if row["steps"] is None else f"{row['steps']:,}",
            units.number(row["reward"]),
            _between(row["interval"]),
            f"{row['difference']:+.3f}" if "difference" in row else units.NOTHING,
            _between(row.get("difference_interval")),
            units.duration(row["seconds"]),
            "shipped" if row["member"] == table["best"] else "worse" if row.get("worse") else "",
        )
        for row in rows
    )
    return MemberTable(ROUND_COLUMNS, members, (rounds_verdict(folder),))


def rounds_verdict(folder: Path) -> str:
    """Outcome of rounds in one sentence, a round that made answers worse first; empty where the run has none."""
    table = files.read_json(folder / "rounds.json")
    if not table:
        return ""
    rows, start = table["members"], table["start"]["reward"]
    best = next(row for row in rows if row["member"] == table["best"])
    worse = [row["member"] for row in rows if row["worse"]]
    warning = f"Worse than what was there before: {', '.join(worse)}. " if worse else ""
    moved = "rose" if best["reward"] > start else "fell" if best["reward"] < start else "stayed"
    return (
        f"{warning}The mean reward of answers to {best['prompts']:,} held-out prompts {moved} from {start:.3f} to "
        f"{best['reward']:.3f} ({_between(best['interval'])}) after {best['member']}, which is shipped."
    )


def _between(interval: Sequence[float] | None) -> str:
    return units.NOTHING if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
