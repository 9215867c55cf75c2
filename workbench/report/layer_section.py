"""The section of a report on which parts of each block trained, and in how many of the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from workbench.errors import FileError
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

FILE = "layers.jsonl"
FROZEN = "frozen"


class LayerTable(NamedTuple):
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
    layers = lines[0]["layers"]
    kinds = dict.fromkeys(kind for layer in layers for kind in layer["parts"])
    last = max(int(run.metrics["step"].max()) if len(run.metrics) else 1, int(lines[-1]["step"]), 1)
    begins = [max(1, int(line["step"])) for line in lines]
    spans = list(zip(lines, begins, [*begins[1:], last + 1], strict=True))

    def alike(layer: Mapping[str, Any]) -> tuple[str, float]:
        """The same for blocks that may share a row: those with the same parts that trained in as many steps."""
        trained = sum(end - begin for line, begin, end in spans if str(line["trains"])[int(layer["layer"])] == "1")
        name = str(layer["name"])
        parts = json.dumps([name.startswith("block ") or name, layer["parts"]])
        return parts, trained / last if any(layer["parts"].values()) else 0.0

    rows = []
    for (key, share), group in groupby(layers, alike):
        names, parts = [str(layer["name"]) for layer in group], json.loads(key)[1]
        each = " each" if len(names) > 1 else ""
        cells = [
            "" if (values := parts.get(kind)) is None else f"{units.count(values)}{each}" if values else FROZEN
            for kind in kinds
        ]
        first, last_name = (name.removeprefix("block ") for name in (names[0], names[-1]))
        name = f"blocks {first} to {last_name}" if each else names[0]
        rows.append((name, cells, units.percent(share) if any(parts.values()) else ""))
    return LayerTable(tuple(kinds), rows, changed=len(lines) > 1)
