"""metrics.jsonl of a run, a line a step, and its siblings samples.jsonl and layers.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import FileError
from workbench.runs import files

METRICS = "metrics.jsonl"
STEPPED = (METRICS, "samples.jsonl", "layers.jsonl")
"""Files whose every line belongs to a step: a resumed run drops those after its checkpoint."""


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to one of STEPPED; each record has a `step`."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl; raises FileError where one is damaged."""
    path = folder / METRICS
    try:
        return files.json_lines(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise FileError(f"{path}: damaged ({error}). Restore it, or start a new run.") from None


def rewind(folder: Path, step: int) -> None:
    """Drop the lines of STEPPED after `step`: these steps will be done again."""
    for path in (folder / name for name in STEPPED):
        if not path.exists():
            continue
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                logged_step = json.loads(line)["step"]
            except json.JSONDecodeError:  # the last line of a killed process may be half written
                break
            if logged_step <= step:
                kept.append(line)
        files.write_bytes(path, "".join(line + "\n" for line in kept).encode())
