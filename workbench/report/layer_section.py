"""The section of a report on which parts of each block trained, and in how many of the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from workbench.errors import FileError
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

FILE = "layers.jsonl"
FROZEN = "frozen"


@dataclass(frozen=True)
class LayerTable:
    """Parts of blocks by kind, neighbouring blocks that are alike in one row."""

    kinds: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str], str]]
    """Name, a cell for each kind (empty where there is no such part), share of the steps in which it trained."""
    changed: bool
    """Whether a freezing policy changed what trained."""


def layers(run: RunRecord) -> LayerTable | None:
    """The table of a run; None where the run does not tell."""
    path = run.folder / FILE
    try:
        lines = files.whole_lines(path)
        return _table(lines, run) if lines else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FileError(f"{path}: damaged ({error}). Restore it, or delete it: the report does without.") from None


def _table(lines: Sequence[Mapping[str, Any]], run: RunRecord) -> LayerTable:
    layer_records = lines[0]["layers"]
    last = max(int(run.metrics["step"].max()) if len(run.metrics) else 1, int(lines[-1]["step"]), 1)
    shares = [_share(lines, int(each["layer"]), last) if any(each["parts"].values()) else 0.0 for each in layer_records]
    kinds = dict.fromkeys(kind for each in layer_records for kind in each["parts"])
    rows = []
    for (key, share), group in groupby(
        zip(layer_records, shares, strict=True), lambda pair: (_alike(pair[0]), pair[1])
    ):
        names = [str(each["name"]) for each, _ in group]
        parts = json.loads(key)[1]
        cells = [_cell(parts.get(kind), several=len(names) > 1) for kind in kinds]
        rows.append((_named(names), cells, units.percent(share) if any(parts.values()) else ""))
    return LayerTable(tuple(kinds), rows, changed=len(lines) > 1)


def _alike(layer: Mapping[str, Any]) -> str:
    """The same for layers that may share a row: blocks with the same parts."""
    name = str(layer["name"])
    return json.dumps([name.startswith("block ") or name, layer["parts"]])


def _share(lines: Sequence[Mapping[str, Any]], layer: int, last: int) -> float:
    """Share of the steps 1 to `last` in which a layer trained."""
    done = sum(end - begin for begin, end, trains in _spans(lines, last) if trains[layer] == "1")
    return done / last


def _spans(lines: Sequence[Mapping[str, Any]], last: int) -> Iterator[tuple[int, int, str]]:
    """First step, step after the last one, and layers of each time in which the same ones trained."""
    begins = [max(1, int(line["step"])) for line in lines]
    for line, begin, end in zip(lines, begins, [*begins[1:], last + 1], strict=True):
        yield begin, end, str(line["trains"])


def _cell(values: int | None, *, several: bool) -> str:
    if values is None:
        return ""
    return f"{units.count(values)}{' each' if several else ''}" if values else FROZEN


def _named(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    return first if len(names) == 1 else f"blocks {first.removeprefix('block ')} to {last.removeprefix('block ')}"
