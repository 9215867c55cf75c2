"""Checkpoints of a run: safetensors and JSON only, written atomically, verified by digest before they are read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.adapters.method import TrainHook
from workbench.errors import ResumeError, out_of_memory
from workbench.runs import files


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

Tensors = Mapping[str, Mapping[str, Tensor]]
"""File stem (`trainable`, `optimizer`) to named tensors."""


def save(folder: Path, tensors: Tensors, progress: Progress, *, keep: int) -> Path:
    """Write checkpoint `step-N` into `folder` and drop all but the `keep` newest."""
    path = folder / _name(progress.step)
    write(path, tensors, progress)
    for old in _steps(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def write(path: Path, tensors: Tensors, progress: Progress) -> None:
    """Write one checkpoint; an older one of the same name survives until the new one is complete."""
    with files.new_folder(path) as aside:
        digests = {}
        for stem, named in tensors.items():
            file = aside / f"{stem}.safetensors"
            save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, file)
            digests[file.name] = files.digest(file)
        state = {"progress": asdict(progress), "sha256": digests}
        (aside / "state.json").write_text(json.dumps(state, indent=2))


def newest(folder: Path, *, at_most: float = math.inf) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint up to step `at_most`, and a sentence about each newer damaged one."""
    damaged = []
    for path in reversed(_steps(folder)):
        try:
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


def read_progress(path: Path) -> Progress:
    """The progress of a checkpoint whose files all match their digests; otherwise ResumeError."""
    try:
        state = json.loads((path / "state.json").read_text())
        progress = _PROGRESS.validate_python(state["progress"])
        broken = [name for name, digest in state["sha256"].items() if files.digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if out_of_memory(error):
            raise
        raise ResumeError(f"{path}: damaged checkpoint ({' '.join(str(error).split())}).") from None
    if broken:
        raise ResumeError(f"{path}: damaged checkpoint ({', '.join(broken)} does not match its digest).")
    return progress


def read_tensors(path: Path, stem: str) -> dict[str, Tensor]:
    """The named tensors of one file of a checkpoint; empty where it has no such file, as in another layout."""
    file = path / f"{stem}.safetensors"
    return load_file(file) if file.exists() else {}


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))
