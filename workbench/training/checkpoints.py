"""Checkpoints of a run: safetensors and JSON only, written atomically, verified by digest before they are read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from workbench.adapters.method import TrainHook
from workbench.errors import ResumeError, out_of_memory
from workbench.runs import files
from workbench.runs.ranks import ALONE, Ranks
from workbench.training import checkpoint_parts
from workbench.training.checkpoint_parts import Background, SavedTensors, Tensors


@dataclass(frozen=True)
class Progress:
    """Progress of a run: everything besides tensors that its continuation depends on."""

    step: int = 0
    """Optimizer steps done."""
    share: float = 0.0
    """Share of the run that is done; 1 where it has ended."""
    tokens: int = 0
    """Tokens read in training."""
    elapsed_s: float = 0.0
    """Seconds spent in all processes that worked on the run."""
    best_loss: float | None = None
    """Lowest held-out loss so far, nats per token."""
    best_step: int | None = None
    best_averaged: bool = False
    """Whether the lowest loss was that of the average (`average.method`)."""
    averaged: bool = False
    """Whether at the last evaluation the average had the lower held-out loss."""
    evaluations_without_gain: int = 0
    drops: int = 0
    """Times that schedule `plateau` has lowered the learning rate."""
    dropped_at: int = 0
    """Evaluations without gain when it was last lowered, since the lowest loss."""


class Checkpointed(TrainHook):
    """Base of parts of a training that have a state in checkpoints, and no work between gradients and step."""

    def on_gradients(self) -> None:
        return

    def after_step(self, step: int) -> None:
        return


_PROGRESS = TypeAdapter(Progress)
_DIGESTS = TypeAdapter(dict[str, str])


def save(
    folder: Path,
    tensors: Tensors,
    progress: Progress,
    *,
    keep: int,
    ranks: Ranks = ALONE,
    background: Background | None = None,
) -> Path:
    """Write checkpoint `step-N` into `folder`, each process its own part, and drop all but the `keep` newest.

    Args:
        background: Writes it while training goes on.
    """
    path = folder / _name(progress.step)

    def drop_old() -> None:
        for old in _steps(folder)[:-keep]:
            shutil.rmtree(old)

    write(path, tensors, progress, ranks=ranks, background=background, then=drop_old)
    return path


def write(
    path: Path,
    tensors: Tensors,
    progress: Progress,
    *,
    ranks: Ranks = ALONE,
    background: Background | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write one checkpoint; an older one of the same name survives until the new one is complete."""

    def complete(aside: Path, digests: Mapping[str, str]) -> None:
        state = {"progress": asdict(progress), "sha256": digests}
        (aside / "state.json").write_text(json.dumps(state, indent=2))
        files.complete(aside, path)
        then()

    checkpoint_parts.save(path, tensors, ranks, complete, background=background)


def newest(folder: Path, *, at_most: float = math.inf, ranks: Ranks = ALONE) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint up to step `at_most`, and a sentence about each newer damaged one.

    The processes of `ranks` call it together, and each reads its share of the files.
    """
    damaged = []
    for path in reversed(ranks.agreed(_steps(folder))):
        try:
            verify(path, ranks)
            progress = read_progress(path)
        except ResumeError as error:
            damaged.append(str(error))
            continue
        if progress.step <= at_most:
            return path, damaged
    return None, damaged


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps, damaged ones too: those steps will be done again."""
    for path in _steps(folder):
        if path.name > _name(step):
            shutil.rmtree(path)


def verify(path: Path, ranks: Ranks = ALONE) -> None:
    """Raise ResumeError where a file of a checkpoint does not match its digest; each process reads a share of them."""
    problem, broken = None, list[str]()
    try:
        _, digests = _state(path)
        own = sorted(digests.items())[ranks.rank :: ranks.world]
        broken = [name for name, digest in own if files.digest(path / name) != digest]
    except (ResumeError, OSError) as error:
        problem = error if isinstance(error, ResumeError) else _damaged(path, error)
    found = ranks.gathered((problem, broken))
    for other, _ in found:
        if other is not None:
            raise other
    if names := [name for _, each in found for name in each]:
        raise ResumeError(f"{path}: damaged checkpoint ({', '.join(names)} does not match its digest).")


def read_progress(path: Path) -> Progress:
    """The progress of a checkpoint; ResumeError where its state.json is damaged."""
    return _state(path)[0]


def read_tensors(path: Path, stem: str) -> dict[str, Tensor]:
    """All named tensors of one kind of a checkpoint; empty where it has none, as in another layout."""
    return SavedTensors(path).whole(stem)


def _state(path: Path) -> tuple[Progress, dict[str, str]]:
    try:
        state = json.loads((path / "state.json").read_text())
        return _PROGRESS.validate_python(state["progress"]), _DIGESTS.validate_python(state["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if out_of_memory(error):
            raise
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ResumeError:
    return ResumeError(f"{path}: damaged checkpoint ({' '.join(str(error).split())}).")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))
