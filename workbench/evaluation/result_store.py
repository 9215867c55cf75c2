"""Scoring that can be stopped: results of rows are kept, and a resumed run computes the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.runs import files
from workbench.runs.deadline import Deadline
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.run_directory import Run
from workbench.training.distributed.placement import Placement

FILE = "scored_rows.json"
"""In a run directory, from a stop while it scored until its scores are written."""


class ResultStore:
    """Results of rows by model and set of rows.

    Args:
        folder: Where FILE is; None in a process that keeps nothing.
        stop_requested: Whether a person asked for an end.
        deadline: Of the run.
        ranks: Processes that score the same rows together, and stop together.
        dealt: Processes that score different rows, dealt to them, and tell each other.
    """

    def __init__(
        self,
        folder: Path | None,
        stop_requested: Callable[[], bool],
        deadline: Deadline | None = None,
        ranks: Ranks = ALONE,
        dealt: Ranks = ALONE,
    ) -> None:
        self.dealt = dealt
        self._folder, self._stop_requested, self._ranks = folder, stop_requested, ranks
        self._deadline = deadline or Deadline()
        kept: dict[str, list[tuple[int, Any]]] = {} if folder is None else files.read_json(folder / FILE)
        self._found = {name: dict(rows) for name, rows in ranks.agreed(kept).items()}

    def by(self, model: str) -> ModelResults:
        """Results of one model, by a name of its own in the run."""
        return ModelResults(self, model)

    def results(self, name: str) -> dict[int, Any]:
        """Results of a model for the rows of a set, by their numbers."""
        return self._found.setdefault(name, {})

    def clear(self) -> None:
        """Forget everything: the scores are written."""
        self._found.clear()
        if self._folder is not None:
            (self._folder / FILE).unlink(missing_ok=True)

    @property
    def stopping(self) -> bool:
        """Whether a person asked one of the processes for an end, or time is over; all have to call this together."""
        return self._ranks.any(self._stop_requested() or self._deadline.over)

    def stop_if_asked(self) -> None:
        """Raise Stopped where a person asked for it or time is over, with all results saved."""
        requested = self._ranks.any(self._stop_requested())
        if not requested and not self._ranks.any(self._deadline.over):
            return
        if self._folder is not None and any(self._found.values()):
            files.write_json(self._folder / FILE, {name: list(rows.items()) for name, rows in self._found.items()})
        if requested:
            raise Stopped("Stopped while scoring; what is scored so far is kept.")
        raise self._deadline.overrun()


@dataclass(frozen=True)
class ModelResults:
    """Results of one model."""

    store: ResultStore
    model: str

    def results(self, content: Iterable[np.ndarray[Any, Any]]) -> dict[int, Any]:
        """Results for a set of rows by their numbers, to be added to; they must survive JSON.

        Args:
            content: All arrays that the rows consist of, so that no set is taken for another.
        """
        digest = hashlib.sha256()
        for array in content:
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return self.store.results(f"{self.model} {digest.hexdigest()[:32]}")


def dealt_results(ranks: Ranks) -> ModelResults | None:
    """The scoring of rows that these processes deal among them; None where there is one process."""
    return None if ranks.alone else ResultStore(None, lambda: False, dealt=ranks).by("shipped")


def stored_results(
    config: RunConfig, run: Run, stop_requested: Callable[[], bool], *, model: str = "after"
) -> ModelResults:
    """The scoring of a run that may be stopped and resumed; by all processes together where they share weights."""
    together = run.ranks if Placement(config.distributed, run.ranks).cuts_weights else ALONE
    return ResultStore(run.path if run.ranks.first else None, stop_requested, run.deadline, together).by(model)
