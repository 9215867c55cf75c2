"""samples.jsonl and layers.jsonl of a run as a page shows them, also while they grow and where a line is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SAMPLES, LAYERS = "samples.jsonl", "layers.jsonl"
STEPS = 200
"""Newest steps whose answers are sent."""
CHANGES = 400
"""Changes of the layers that train that are sent; of more, evenly spaced ones."""
_TEXT = 4000
"""Most characters of a text that are sent."""
_BYTES = 2**23
"""Bytes of the end of a file that are read."""

Shown = dict[str, Any]


def marks(path: Path) -> dict[str, int]:
    """Sizes of the files that are there, which grow with each line; a page reads them again where they have changed."""
    sizes = {}
    for name in (SAMPLES, LAYERS):
        try:
            sizes[name.partition(".")[0]] = (path / name).stat().st_size
        except OSError:
            continue
    return sizes


def samples(path: Path) -> list[Shown]:
    """The prompts of a run's sample answers, each with its answers, those of the newest step first."""
    prompts: dict[str, Shown] = {}
    for line in _lines(path / SAMPLES):
        row = str(line.get("row", ""))
        own = prompts.setdefault(row, {"row": row, "prompt": "", "reference": "", "answers": []})
        own |= {"prompt": _cut(line.get("prompt")), "reference": _cut(line.get("reference"))}
        own["answers"].append({"step": line["step"], "answer": _cut(line.get("answer"))})
    for own in prompts.values():
        first, rest = own["answers"][:1], own["answers"][1:]
        own["answers"] = [*rest[: -STEPS - 1 : -1], *first]  # that before training is what others are compared with
    return list(prompts.values())


def layers(path: Path, manifest: Mapping[str, Any]) -> Shown:
    """The parts of each layer, and from which step on which layers train; empty where a run does not tell.

    Args:
        manifest: Of the run, where blocks that are not there yet are told.
    """
    lines = list(_lines(path / LAYERS, whole=True))
    table = lines[0].get("layers") if lines else None
    if not isinstance(table, list) or not all(_is_layer(each) for each in table):
        return {}
    changes = [[line["step"], str(line.get("trains", ""))] for line in lines]
    changes = _grown(manifest, len(changes[0][1])) or changes
    thinned = changes[:: -(-len(changes) // CHANGES)]
    changes = thinned if thinned[-1] is changes[-1] else [*thinned, changes[-1]]
    return {"layers": table, "changes": changes}


def _grown(manifest: Mapping[str, Any], count: int) -> list[list[Any]]:
    """The changes of a run whose blocks are stacked; empty for any other."""
    grow = manifest.get("grow")
    if not isinstance(grow, Mapping) or not isinstance(grow.get("first"), int):
        return []
    there = [(0, grow["first"]), *((each["step"] + 1, each["blocks"]) for each in grow.get("stackings", []))]
    return [[step, "1" + ("1" * blocks).ljust(count - 2, "0")[: count - 2] + "1"] for step, blocks in there]


def _is_layer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("parts"), dict) and isinstance(value.get("layer"), int)


def _cut(value: Any) -> str:
    text = str(value or "")
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} ... ({len(text) - _TEXT:,} more characters)"


def _lines(path: Path, *, whole: bool = False) -> Iterator[Shown]:
    """The JSON objects with a step in the lines of the end of a file, or of all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            first = 0 if whole else max(0, size - _BYTES)
            file.seek(first)
            text = file.read()
    except OSError:
        return
    for line in text.split(b"\n")[1 if first else 0 : -1]:  # a live run may be in the middle of its last line
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record
