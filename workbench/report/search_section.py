"""The section of a page on a search: its members by how far they came, and which settings explain their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config.sections.sweep_config import shown
from workbench.report.plots import Axis, Plot, Series, Style, draw
from workbench.report.run_record import RunRecord
from workbench.runs import files, units


@dataclass(frozen=True)
class SearchTable:
    """A search's members and settings, in words."""

    columns: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    """One row for each, those that came farthest first, by loss."""
    shipped: int | None
    """Which of the rows the run ships."""
    settings: tuple[tuple[str, str], ...]
    """Each setting and the share of the differences that it explains; empty for few members."""
    notes: tuple[str, ...]
    """Cost of the search, and reasons why its best may be less good than it looks."""


def read(folder: Path) -> SearchTable | None:
    """The search in a run directory; None where the run is none, or has no member yet."""
    table = files.read_json(folder / "search.json")
    if not table.get("members"):
        return None
    rows = sorted(table["members"], key=_standing)
    best = [number for number, row in enumerate(rows) if row["member"] == table["best"]]
    shares = [_share(each) for each in table["shares"]]
    return SearchTable(
        columns=(*rows[0]["settings"], *(f"loss after {each}" for each in shares), "steps", "status"),
        members=tuple(map(_row, rows)),
        shipped=best[0] if best else None,
        settings=tuple((key, units.percent(value)) for key, value in table["importances"].items()),
        notes=tuple(_notes(rows, table, files.read_json(folder / "scores.json"))),
    )


def plots(run: RunRecord) -> list[Plot]:
    """Parallel coordinates, a slice through each setting, and the losses along the way; none where it is no search."""
    table = files.read_json(run.folder / "search.json")
    rows = [row for row in table.get("members", ()) if row["losses"][0] is not None]
    if not rows:
        return []
    shares = [_share(each) for each in table["shares"]]
    slices = [_slice(key, rows, shares, run.unit) for key in rows[0]["settings"]]
    return [_coordinates(rows, shares, run.unit), *slices, _climb(rows, table["shares"], shares, run.unit)]


def _reached(row: Mapping[str, Any]) -> int:
    """The highest rung at which a member has a loss; -1 where it has none."""
    return max((rung for rung, loss in enumerate(row["losses"]) if loss is not None), default=-1)


def _standing(row: Mapping[str, Any]) -> tuple[int, float]:
    rung = _reached(row)
    return -rung, row["losses"][rung] if rung >= 0 else 0.0


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    losses = map(units.loss, row["losses"])
    return (*map(shown, row["settings"].values()), *losses, f"{row['steps']:,}", row["status"])


def _share(share: float) -> str:
    """A share of a training: 1/16, or all."""
    return "all" if share == 1 else str(Fraction(share).limit_denominator(10**6))


def _notes(rows: Sequence[Mapping[str, Any]], table: Mapping[str, Any], scores: Mapping[str, Any]) -> list[str]:
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
    failed = [row["member"] for row in rows if row["status"] == "failed"]
    return [*notes, caveat, *_edges(rows, table), *([f"Failed: {'; '.join(failed)}."] if failed else [])]


def _edges(rows: Sequence[Mapping[str, Any]], table: Mapping[str, Any]) -> list[str]:
    """Numbers whose best value is near the lowest or highest that was tried."""
    best = [row["settings"] for row in rows if row["member"] == table["best"]]
    sentences = []
    for key in best[0] if best else ():
        tried = [row["settings"][key] for row in rows]
        if not _numbers(tried) or len(set(tried)) < 3:
            continue
        place = _positions(tried)[tried.index(best[0][key])]
        if place <= 0.05 or place >= 0.95:
            side = ("low", "lower") if place < 0.5 else ("high", "higher")
            sentences.append(
                f"The best {key} is at the {side[0]} end of what was tried: a {side[1]} one may be better."
            )
    return sentences


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
    scaled = np.log(values) if _spans(values) else np.asarray(values, dtype=np.float64)
    width = float(scaled.max() - scaled.min())
    return [float(each - scaled.min()) / width if width else 0.5 for each in scaled]


def _coordinates(rows: Sequence[Mapping[str, Any]], shares: Sequence[str], unit: str) -> Plot:
    """A line for each member through all its settings and its loss after the first comparison."""
    keys = list(rows[0]["settings"]) if rows else []
    columns = [[row["settings"][key] for row in rows] for key in keys]
    losses = [row["losses"][0] for row in rows]
    # Of losses the place counts, so that one that exploded leaves the others apart.
    order = np.argsort(np.argsort(losses)) / max(1, len(losses) - 1)
    heights = [*map(_positions, columns), order.tolist()]
    names = [*(f"{key.rpartition('.')[2]}\n{_extent(column)}" for key, column in zip(keys, columns, strict=True))]
    names.append(f"loss after {shares[0]}\nlowest to highest")
    series = []
    for number, row in sorted(enumerate(rows), key=lambda each: _reached(each[1])):
        rung = _reached(row)
        y = np.array([height[number] for height in heights])
        style: Style = "faint" if rung == 0 else "line"
        series.append(Series(f"came to {shares[rung]}", np.arange(len(y), dtype=np.float64), y, style, rung))
    plot = draw(
        "Settings of all members, and how far they came",
        series,
        x=Axis(names=tuple(names)),
        y=Axis("lowest to highest", ticks="none"),
        caption=f"Each line is a member; {unit}.",
        wide=True,
    )
    return plot.once_each()


def _extent(values: Sequence[Any]) -> str:
    if not _numbers(values):
        return ", ".join(_named(values))[:30]
    return f"{shown(min(values))} to {shown(max(values))}"


def _slice(key: str, rows: Sequence[Mapping[str, Any]], shares: Sequence[str], unit: str) -> Plot:
    """Loss against one setting, at each rung."""
    every = [row["settings"][key] for row in rows]
    numbers = _numbers(every)
    names = [] if numbers else _named(every)
    series = []
    for rung, share in enumerate(shares):
        there = [row for row in rows if row["losses"][rung] is not None]
        values = [row["settings"][key] for row in there]
        x = values if numbers else [names.index(shown(value)) for value in values]
        y = [row["losses"][rung] for row in there]
        series.append(Series(f"after {share}", np.array(x, dtype=np.float64), np.array(y, float), "points", rung))
    marks = tuple(float(each) for each in _marks(every)) if _spans(every) else ()
    axis = Axis(key, logarithmic=marks, names=tuple(names))
    return draw(f"Held-out loss against {key}", series, x=axis, y=Axis(unit))


def _marks(values: Sequence[float]) -> list[float]:
    """Values for ticks of a logarithmic axis: the powers of ten inside, or both ends."""
    low, high = min(values), max(values)
    tens = [10.0**power for power in range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1)]
    return tens if len(tens) > 1 else [low, high]


def _climb(rows: Sequence[Mapping[str, Any]], at: Sequence[float], shares: Sequence[str], unit: str) -> Plot:
    """Loss of each member at every comparison that it came to."""
    series = []
    for row in sorted(rows, key=_reached):
        rungs = [rung for rung, loss in enumerate(row["losses"]) if loss is not None]
        x = np.array([at[rung] for rung in rungs], dtype=np.float64)
        y = np.array([row["losses"][rung] for rung in rungs], dtype=np.float64)
        reached = _reached(row)
        series.append(Series(f"came to {shares[reached]}", x, y, "marked", reached))
    x_axis = Axis("share of a training", logarithmic=tuple(at))
    return draw("Held-out loss at each comparison", series, x=x_axis, y=Axis(unit), wide=True).once_each()
