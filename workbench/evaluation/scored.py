"""Scoring that ends on request: what was found out is kept, and a resumed run goes on from there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.distributed import layout_settings

FILE = "scored.json"
"""In a run directory, from a stop while it scored until its scores are written."""


@dataclass
class Scored:
    """Outputs of models for batches of rows so far.

    A batch is known by its content, so that nothing is taken for something else.
    """

    folder: Path | None
    """Where FILE stands; None in a process that keeps nothing."""
    stop_requested: Callable[[], bool]
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.folder is not None:
            self.found.update(files.read_json(self.folder / FILE))

    def by(self, model: str) -> Scoring:
        """For one model, by a name of its own in the run."""
        return Scoring(self, model)

    def clear(self) -> None:
        """Forget everything: the scores are written."""
        self.found.clear()
        if self.folder is not None:
            (self.folder / FILE).unlink(missing_ok=True)

    def stop(self) -> None:
        """Raise Stopped where that was asked for, with everything kept."""
        if not self.stop_requested():
            return
        if self.folder is not None and self.found:
            files.write_json(self.folder / FILE, self.found)
        raise Stopped("Stopped while scoring; what is scored so far is kept.")


@dataclass(frozen=True)
class Scoring:
    """Outputs of one model for batches of rows so far."""

    everything: Scored
    model: str

    def asked(
        self,
        inputs: Mapping[str, Tensor],
        labels: Tensor | None,
        say: Callable[[], Sequence[Any]],
        *,
        whole: Callable[[], bool] = lambda: True,
    ) -> list[Any]:
        """Outputs of the model for a batch: those that were kept, or those that `say` gives. They must survive JSON.

        Args:
            whole: Asked afterwards, whether it said all that it had to say.

        Raises:
            Stopped: a person asked for it.
        """
        self.everything.stop()
        name = self._name(inputs, labels)
        found = self.everything.found
        if name in found:
            return list(found[name])
        said = list(say())
        if whole():
            found[name] = said
        self.everything.stop()
        return said

    @property
    def stopping(self) -> bool:
        """Whether a person asked for an end."""
        return self.everything.stop_requested()

    def _name(self, inputs: Mapping[str, Tensor], labels: Tensor | None) -> str:
        content = hashlib.sha256()
        for part in (*inputs.values(), *([] if labels is None else [labels])):
            content.update(f"{tuple(part.shape)}".encode() + part.cpu().numpy().tobytes())
        return f"{self.model} {content.hexdigest()[:32]}"


def interruptible(
    config: RunConfig, run: Run, stop_requested: Callable[[], bool], *, model: str = "after"
) -> Scoring | None:
    """The scoring of a run that may be stopped, and is gone on with; None where processes score together."""
    if layout_settings.cuts_weights(config.distributed) and not run.ranks.alone:
        return None
    return Scored(run.path, stop_requested).by(model)
