"""Files of rows and of runs, as tests write and read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import workbench


def write_lines(path: Path | str, rows: Iterable[Any]) -> Path:
    """Each row as a line of JSON."""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The figures of each step of a run."""
    return read_lines(run / "metrics.jsonl")


def read_losses(run: Path) -> list[float]:
    """The training loss of each step."""
    return [step["loss"] for step in read_metrics(run)]


def read_scores(run: Path) -> dict[str, Any]:
    """The scores of a run: `before`, `after` and what else there is."""
    return dict(json.loads((run / "scores.json").read_text(encoding="utf-8")))


def trains_rows(folder: Path, recipe: str, *known: str) -> Callable[..., Path]:
    """Trains a shipped recipe on rows, or on a file of them, with overrides; gives the run directory."""

    def run(name: str, rows: Iterable[Any] | Path, *words: str, resume: bool = False) -> Path:
        source = rows if isinstance(rows, Path) else write_lines(folder / f"{name}.jsonl", rows)
        overrides = [f"data.train={source}", *known, *words]
        return workbench.run(recipe, overrides, out=folder / name, resume=resume, quiet=True)

    return run
