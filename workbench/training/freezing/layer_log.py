"""Which layers of a run train, step by step, in layers.jsonl of its directory.

The first line has the parts of each layer; each further one the first step from which others train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from workbench.runs import files, metrics_log
from workbench.runs.run_directory import Run
from workbench.training.freezing.freezer import Freezer

FILE = "layers.jsonl"


class LayerLog:
    """Writes what a freezer decides. It may begin anew with a resumed run, once that is rewound to its checkpoint."""

    def __init__(self, run: Run, freezer: Freezer) -> None:
        self._run, self._freezer = run, freezer
        self._last: str | None = None
        """Layers that trained last, as they are written; None until the first step of this process."""
        if not _has_table(run.path / FILE):
            self._begin()
        freezer.on_plan = self._log

    def _begin(self) -> str:
        trains, parts = _written(self._freezer.plan.trains), [asdict(each) for each in self._freezer.parts]
        metrics_log.append(self._run.path / FILE, [{"step": 0, "trains": trains, "layers": parts}])
        return trains

    def _log(self, step: int, trains: Sequence[bool]) -> None:
        """Before a step, counted from 1."""
        now = _written(trains)
        if self._last is None:
            lines = files.json_lines((self._run.path / FILE).read_text(encoding="utf-8"))
            self._last = lines[-1]["trains"] if lines else self._begin()
        if now != self._last:
            metrics_log.append(self._run.path / FILE, [{"step": step, "trains": now}])
            self._last = now


def _has_table(path: Path) -> bool:
    """Whether the first line is whole; a process may have been killed while it wrote that."""
    if path.exists():
        with path.open("rb") as file:
            if file.readline().endswith(b"\n"):
                return True
        path.unlink()
    return False


def _written(trains: Sequence[bool]) -> str:
    """A digit for each layer: 1 where it trains."""
    return "".join("1" if each else "0" for each in trains)
