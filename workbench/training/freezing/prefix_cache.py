"""Caches outputs of the frozen first blocks where that pays, and follows the boundary between frozen and trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from workbench.adapters import Full
from workbench.config import TrainingSections
from workbench.config.freeze_config import UNKEPT
from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.data.batching import Examples
from workbench.data.text.tokenized import cache_folder
from workbench.runs import run_directory
from workbench.training.distributed import layout_settings
from workbench.training.freezing import cache_estimate
from workbench.training.freezing.cache_estimate import CacheDecision, DataProfile
from workbench.training.freezing.cached_prefix import CachedPrefix, reader
from workbench.training.freezing.freezer import Freezer
from workbench.training.freezing.hidden_state_store import DiskStore, HiddenStateStore, MemoryStore, fingerprint
from workbench.training.freezing.layer_map import stack
from workbench.training.freezing.prefix_batches import CPU_TOKENS, PrefixBatches

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class PrefixCache:
    """Outputs of the frozen blocks of a run's backbone; all its trainings and predictions may read them."""

    states: HiddenStateStore | None = None
    depth: int = 0
    trailing: int = 0
    batches: PrefixBatches | None = None
    """In which its rows are computed."""

    def cached_prefix(self, backbone: PreTrainedModel, blocks: Sequence[nn.Module]) -> CachedPrefix:
        """For a backbone with these blocks."""
        assert self.states is not None and self.batches is not None
        return CachedPrefix(
            backbone,
            blocks=blocks,
            depth=self.depth,
            states=self.states,
            trailing=self.trailing,
            batch_of=self.batches.of,
        )


@contextmanager
def reading(kept: PrefixCache, backbone: PreTrainedModel) -> Iterator[None]:
    """Inside the block a backbone, loaded again and without adapters in its frozen blocks, reads the cache."""
    if kept.states is None:
        yield
        return
    blocks = [backbone.get_submodule(path) for path in stack(backbone)]
    cached = kept.cached_prefix(backbone, blocks)
    cached.install()
    try:
        yield
    finally:
        cached.remove()


class PrefixForward(NamedTuple):
    """Forward pass of a model whose prefix is frozen."""

    rows: Sequence[Examples]
    """All sets that it reads, those that it trains on first."""
    passes: Callable[[], float | None]
    """Number of times that training computes each row; returns None while that is unknown."""
    tokens: Callable[[], int]
    """Padded tokens that fit into a forward pass of training; the same in a resumed run."""


class PrefixCacheManager:
    """The frozen first blocks of one model that trains.

    Args:
        compute: Precision of matrix products.
        folder: Place on disk for outputs that no other run can use.
        say: Tells a person the decision.
        trial_context: Inside it, the model may be called with rows of its own.
        kept: Cache of the same blocks in the same run; outputs are added to it, unless the boundary moves.
    """

    def __init__(
        self,
        freezer: Freezer,
        work: PrefixForward,
        config: TrainingSections,
        *,
        compute: torch.dtype,
        folder: Path,
        say: Callable[[str], None],
        trial_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        kept: PrefixCache | None = None,
    ) -> None:
        self._freezer, self._work, self._config = freezer, work, config
        self._dtype = compute if config.freeze.stored == "compute" else _DTYPES[config.freeze.stored]
        self._compute, self._folder, self._say, self._trial_context = compute, folder, say, trial_context
        self._kept = kept or PrefixCache()
        self.cached: CachedPrefix | None = None
        self._profile: DataProfile | None = None
        self._depth = 0

    def follow(self) -> None:
        """Look where the boundary is now; outputs that were cached for another one are dropped."""
        passes = self._work.passes()
        # Processes that share weights have a block whole only in a pass that all of them do.
        config = self._config
        changes = config.freeze.thaws or config.regularise.noisy or config.layer_drop.is_on or config.token_drop.is_on
        never = changes or layout_settings.cuts_weights(config.distributed)
        depth = 0 if never or passes is None else self._freezer.depth
        if depth == self._depth:
            return
        self.close()
        self._depth = depth
        if depth == 0 or passes is None:
            return
        choice = self._chosen(depth, passes)
        self._say(choice.sentence)
        if choice.where == "off":
            return
        assert self._profile is not None, "the choice was made by it"
        kept = self._kept
        if kept.states is None:
            kept.states = MemoryStore(self._dtype) if choice.where == "memory" else self._on_disk(depth)
            kept.depth, kept.trailing = depth, self._profile.trailing
        if kept.batches is None:
            # What is read last may hold the rest: all rows of a run, of which some training sets are a part.
            read = reader(self._freezer.backbone, trailing=kept.trailing)
            kept.batches = PrefixBatches(self._work.rows[::-1], read, tokens=self._tokens)
        self.cached = kept.cached_prefix(self._freezer.backbone, self._freezer.blocks)
        self.cached.install()

    def close(self) -> None:
        """Stop reading the cache."""
        if self.cached is not None:
            self.cached.remove()
            if not self._config.freeze.fixed:
                self._kept.states = None
                shutil.rmtree(self._folder, ignore_errors=True)
        self.cached = None

    def _chosen(self, depth: int, passes: float) -> CacheDecision:
        freezer, config = self._freezer, self._config
        backbone, blocks = freezer.backbone, freezer.blocks
        with self._trial_context():
            obstacle = cache_estimate.refusal(backbone, blocks=blocks, depth=depth)
        obstacle = (
            of_recipe(config)
            or obstacle
            or _drawing(config)
            or cache_estimate.nondeterministic(backbone, blocks=blocks, depth=depth, changing=_changing(config))
        )
        if self._profile is None:
            self._profile = cache_estimate.profile(self._work.rows, causal=backbone.can_generate())
        train = self._work.rows[0]
        estimated = cache_estimate.estimate(
            backbone,
            self._profile,
            blocks=blocks,
            depth=depth,
            itemsize=self._dtype.itemsize,
            passes=max(1.0, passes * freezer.lasts()),
            everything=isinstance(config.adapter, Full),
            supervised=min(1.0, float(train.supervised.sum() / train.lengths.sum())),
        )
        return cache_estimate.decide(
            estimated,
            config.freeze.cache,
            available_memory=psutil.virtual_memory().available,
            free_disk=shutil.disk_usage(self._folder.parent).free,
            obstacle=obstacle,
        )

    @property
    def _tokens(self) -> int:
        """Padded tokens of a batch that goes through the prefix: what memory lets training have, with gradients too."""
        return CPU_TOKENS if self._freezer.backbone.device.type == "cpu" else max(CPU_TOKENS, self._work.tokens())

    def _on_disk(self, depth: int) -> HiddenStateStore:
        freezer, model = self._freezer, self._config.model
        about = {"compute": str(self._compute), "weights": model.weights, "tokens": str(self._tokens)}
        about |= run_directory.versions()
        name = fingerprint(freezer.backbone, blocks=freezer.blocks, depth=depth, dtype=self._dtype, about=about)
        # What other runs can use is shared; a prefix that has trained is this run's alone.
        folder = cache_folder() / "prefixes" if self._config.freeze.fixed else self._folder
        return DiskStore(folder, fingerprint=name, dtype=self._dtype)


def of_recipe(config: TrainingSections) -> str | None:
    """Reason why no row of this recipe has outputs to keep; None where rows have."""
    return f"recipe={config.recipe} {UNKEPT[config.recipe]}" if config.recipe in UNKEPT else None


def _drawing(config: TrainingSections) -> str | None:
    """Reason why adapters that freeze during a run go on drawing numbers; None where they do not."""
    draws = not config.freeze.fixed and config.adapter.facts.draws
    return f"adapter.method={config.adapter.method} draws numbers each time" if draws else None


def _changing(config: TrainingSections) -> str | None:
    """Reason why rows change from epoch to epoch; None where they do not."""
    if config.reads_pictures and config.image.augment != AugmentConfig():
        return "image.augment"
    if config.data.augment.is_on:
        return "data.augment"
    if config.data.length_warm_up.start is not None:
        return "data.length_warm_up"
    return None
