"""Keeps what the frozen first blocks give, where that pays, and follows the line between frozen and trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from workbench import runs
from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.data.batching import Examples
from workbench.data.tokens import cache_folder
from workbench.freezing import predicting
from workbench.freezing.freezer import Freezer
from workbench.freezing.layers import stack
from workbench.freezing.predicting import Choice, Survey
from workbench.freezing.states import DiskStates, MemoryStates, States, fingerprint
from workbench.freezing.trunk import Trunk

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Kept:
    """What the frozen blocks of a run's backbone gave: all its trainings and predictions may read it."""

    states: States | None = None
    depth: int = 0
    trailing: int = 0


@contextmanager
def reading(kept: Kept, backbone: PreTrainedModel) -> Iterator[None]:
    """Inside the block a backbone, loaded again and without adapters in its frozen blocks, reads what was kept."""
    if kept.states is None:
        yield
        return
    blocks = [backbone.get_submodule(path) for path in stack(backbone)]
    trunk = Trunk(backbone, blocks=blocks, depth=kept.depth, states=kept.states, trailing=kept.trailing)
    trunk.install()
    try:
        yield
    finally:
        trunk.remove()


class Work(NamedTuple):
    """What a model does while the prefix is frozen."""

    rows: Sequence[Examples]
    """All sets that it reads, those that it trains on first."""
    passes: float
    """How often training computes each row."""


class Prefix:
    """The frozen first blocks of one model that trains.

    Args:
        compute: What matrix products run in.
        folder: Where outputs are kept on disk that no other run can use.
        say: Tells a person what was decided.
        trying: Inside it, the model may be called with rows of its own.
        kept: By the same blocks of the same run; what this keeps is put there too, unless the line moves.
    """

    def __init__(
        self,
        freezer: Freezer,
        work: Work,
        config: RunConfig,
        *,
        compute: torch.dtype,
        folder: Path,
        say: Callable[[str], None],
        trying: Callable[[], AbstractContextManager[object]] = nullcontext,
        kept: Kept | None = None,
    ) -> None:
        self._freezer, self._work, self._config = freezer, work, config
        self._dtype = compute if config.freeze.stored == "compute" else _DTYPES[config.freeze.stored]
        self._compute, self._folder, self._say, self._trying = compute, folder, say, trying
        self._kept = kept or Kept()
        self.trunk: Trunk | None = None
        self._survey: Survey | None = None
        self._depth = 0

    def follow(self, *, share: float) -> None:
        """Look where the line is now; where it moved, what was kept of it is worth nothing any more.

        Args:
            share: Share of the run that is done.
        """
        depth = self._freezer.depth
        if depth == self._depth:
            return
        self.close()
        self._depth = depth
        if depth == 0:
            return
        choice = self._chosen(depth, share)
        self._say(choice.sentence)
        if choice.where == "off":
            return
        assert self._survey is not None, "the choice was made by it"
        kept = self._kept
        if kept.states is None:
            kept.states = MemoryStates(self._dtype) if choice.where == "memory" else self._on_disk(depth)
            kept.depth, kept.trailing = depth, self._survey.trailing
        self.trunk = Trunk(
            self._freezer.backbone,
            blocks=self._freezer.blocks,
            depth=depth,
            states=kept.states,
            trailing=kept.trailing,
        )
        self.trunk.install()

    def close(self) -> None:
        """Compute as ever from now on."""
        if self.trunk is not None:
            self.trunk.remove()
            if not self._config.freeze.fixed:
                self._kept.states = None
                shutil.rmtree(self._folder, ignore_errors=True)
        self.trunk = None

    def _chosen(self, depth: int, share: float) -> Choice:
        freezer, config = self._freezer, self._config
        backbone, blocks = freezer.backbone, freezer.blocks
        with self._trying():
            obstacle = predicting.refusal(backbone, blocks=blocks, depth=depth)
        obstacle = obstacle or predicting.nondeterministic(
            backbone, blocks=blocks, depth=depth, changing=_changing(config)
        )
        if self._survey is None:
            self._survey = predicting.survey(self._work.rows, causal=backbone.can_generate())
        train = self._work.rows[0]
        prediction = predicting.predict(
            backbone,
            self._survey,
            blocks=blocks,
            depth=depth,
            itemsize=self._dtype.itemsize,
            passes=max(1.0, self._work.passes * (1 - share)),
            everything=isinstance(config.adapter, Full),
            supervised=min(1.0, float(train.supervised.sum() / train.lengths.sum())),
        )
        return predicting.choose(
            prediction,
            config.freeze.cache,
            available_memory=psutil.virtual_memory().available,
            free_disk=shutil.disk_usage(self._folder.parent).free,
            obstacle=obstacle,
        )

    def _on_disk(self, depth: int) -> States:
        freezer = self._freezer
        about = {"compute": str(self._compute), "weights": self._config.model.weights, **runs.versions()}
        name = fingerprint(freezer.backbone, blocks=freezer.blocks, depth=depth, dtype=self._dtype, about=about)
        # What other runs can use is shared; a prefix that has trained is this run's alone.
        folder = cache_folder() / "trunks" if self._config.freeze.fixed else self._folder
        return DiskStates(folder, fingerprint=name, dtype=self._dtype)


def _changing(config: RunConfig) -> str | None:
    """What changes the rows from epoch to epoch."""
    if config.recipe == "mlm":
        return "masking"
    return "distill.on_policy" if config.recipe == "distill" and config.distill.on_policy.share else None
