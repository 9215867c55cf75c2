"""The teacher cache: what a teacher says of every supervised token of the training rows, asked once and kept on disk.

Rows are known by what they hold: they may be dealt or ordered otherwise, one that comes twice is kept once, and what is
lost, or new, is asked again without the rest.

Legend: N positions, k tokens kept of each, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices, MicroBatch, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import cache_packing, cache_shards
from workbench.distillation.cache_identity import CacheIdentity, identity
from workbench.distillation.cache_packing import Packed
from workbench.distillation.cache_shards import Keys, Shard
from workbench.distillation.teacher_signals import Teacher, TeacherLogits, TeacherSignal
from workbench.errors import ConfigError, Stopped
from workbench.losses.chunked import chunks
from workbench.runs import files
from workbench.runs.ranks import ALONE, Ranks
from workbench.training.callbacks import Callback

__all__ = [
    "CacheIdentity",
    "CachedTeacher",
    "LiveQuestions",
    "Questions",
    "identity",
    "made_by",
    "missing",
    "require_usable",
    "write",
]

SHARD_POSITIONS = 2**18
"""Positions after which a shard is full: at 64 likeliest tokens of each, 65 MiB."""


class CachedTeacher:
    """Teacher distributions for the rows of `train`, read from a finished cache.

    Raises:
        ConfigError: there is none, it is another configuration's, it lacks rows, or a file of it is lost or damaged.
    """

    def __init__(self, folder: Path, train: TokenizedSet, config: DistillConfig, wanted: CacheIdentity) -> None:
        index, self._shards = cache_shards.opened(folder, wanted)
        self._config = config
        self._known = int(index.made_by["vocabulary"])
        self._shard_R, self._start_R, self._count_R = self._find(folder, train)
        positions = sum(int(shard.counts.sum()) for shard in self._shards)
        self.facts: dict[str, Any] = {
            "folder": str(folder),
            "kind": wanted.kind,
            "k": int(wanted.k),
            "dtype": wanted.dtype,
            "tokens": positions,
            "bytes_per_token": round(sum(index.shards.values()) / positions, 1),
            "shards": len(self._shards),
        }

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherSignal:
        """Teacher signal at the batch's supervised positions; `temperature` is that of the cache."""
        assert batch.rows_B is not None and temperature == self._config.temperature
        packed = _joined([self._row(int(row)) for row in batch.rows_B])
        assert len(packed["ids"]) == len(batch.labels_N), "the batch has other positions than its rows"
        device = batch.labels_N.device
        if config.cache.sampled:
            drawn = [tensor.to(device) for tensor in cache_packing.unpack_draws(packed)]
            return cache_packing.SampledTokens(drawn, self._known, temperature)
        likeliest = [tensor.to(device) for tensor in cache_packing.unpack_likeliest(packed)]
        return cache_packing.TopTokens(likeliest, self._known, config, temperature)

    def _row(self, row: int) -> Packed:
        start = int(self._start_R[row])
        return self._shards[int(self._shard_R[row])].read(start, start + int(self._count_R[row]))

    def _find(self, folder: Path, train: TokenizedSet) -> tuple[Indices, Indices, Indices]:
        """Shard, first position there, and number of positions of each row of `train`."""
        keys_R, counts_R = cache_shards.rows(train)
        keys = np.concatenate([shard.keys for shard in self._shards])
        starts = np.concatenate([np.cumsum(shard.counts) - shard.counts for shard in self._shards])
        numbers = np.repeat(np.arange(len(self._shards)), [len(shard.keys) for shard in self._shards])
        order = np.argsort(keys)
        at_R = order[np.searchsorted(keys, keys_R, sorter=order).clip(max=len(keys) - 1)]
        if (unknown := np.flatnonzero(keys[at_R] != keys_R)).size:
            raise ConfigError(
                f"distill.cache.folder={folder} knows nothing of {len(unknown)} of {len(train)} training rows, such as "
                f"{train.place(int(unknown[0]))}: it was made of other data, or with another data.max_tokens or chat "
                f"template.\n  Write another folder, or add these rows to it: {cache_shards.again(folder)}"
            )
        return numbers[at_R], starts[at_R], counts_R


def missing(folder: Path) -> bool:
    """Whether there is no finished cache."""
    return not (folder / cache_shards.INDEX).exists()


def made_by(folder: Path) -> str | None:
    """The teacher that a finished cache was made by, as its configuration named it."""
    teacher_name = files.read_json(folder / cache_shards.INDEX).get("made_by", {}).get("name")
    return None if teacher_name is None else str(teacher_name)


def require_usable(config: DistillConfig, train: TokenizedSet, wanted: CacheIdentity) -> None:
    """Refuse, before a teacher is asked, a cache that could not be used, or could not be made.

    Raises:
        ConfigError: what `CachedTeacher` or `write` would raise, or nobody is named who could be asked.
    """
    folder = config.cache.folder
    assert folder is not None
    if not missing(folder):
        CachedTeacher(folder, train, config, wanted)
    elif wanted.teacher is None:
        raise ConfigError(
            f"distill.cache.folder={folder} holds no finished cache. Name who is to be asked: distill.teacher.id."
        )
    else:
        cache_shards.intact(folder, wanted)


class Questions(Protocol):
    """A way to ask a teacher about training rows."""

    def ask(self, share: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        """Rows in the order of the cache, their packed distributions, and how many tokens the teacher knows.

        Args:
            share: Rows to ask about.
            keys_R: Digest of every training row.
            counts_R: Supervised positions of every training row.
        """


def write(
    folder: Path,
    train: TokenizedSet,
    questions: Questions,
    wanted: CacheIdentity,
    *,
    callback: Callback,
    ranks: Ranks = ALONE,
) -> None:
    """Ask a teacher about the rows of `train` that no shard in `folder` has, and finish the cache.

    The same rows in the same order make the same files, whether it was interrupted in between or not, and however many
    processes ask.

    Args:
        ranks: The processes that ask together; the first of them writes.

    Raises:
        ConfigError: `folder` holds the cache of another configuration, or something else.
        Stopped: the callback asked for it; finished shards are kept.
    """
    assert wanted.teacher is not None, "who asks a teacher knows which"
    shard_by_path = cache_shards.intact(folder, wanted) if ranks.first else {}
    if ranks.first:
        files.require_writable(folder / cache_shards.INDEX)
        files.remove_unfinished(folder)
    keys_R, counts_R = cache_shards.rows(train)
    shares = ranks.agreed(list(_shares(keys_R, counts_R, [shard.keys for shard in shard_by_path.values()])))
    names = (folder / f"shard-{number:05d}.safetensors" for number in count())
    for done, share in enumerate(shares, start=1):
        order, packed, known = questions.ask(share, keys_R, counts_R)
        if ranks.first:
            made_by = {**wanted.made_by(), "vocabulary": str(known)}
            path = next(name for name in names if name not in shard_by_path)
            cache_shards.write(path, packed, keys_R[order], counts_R[order], made_by)
            shard_by_path[path] = Shard(path)
        callback.say(f"{folder}: shard {done} of {len(shares)} is done, {len(packed['ids']):,} positions.")
        if ranks.any(callback.stop_requested()) and done < len(shares):
            raise Stopped(f"Stopped after shard {done} of {len(shares)} of {folder}. Run again to go on there.")
    if ranks.first:
        cache_shards.finish(folder, shard_by_path)
    ranks.wait()


@dataclass(frozen=True)
class LiveQuestions:
    """Asks a teacher that is loaded here."""

    train: TokenizedSet
    teacher: Teacher
    """Its signals are `TeacherLogits`."""
    config: DistillConfig
    vocabulary: int
    """Tokens that count."""
    tokens: int
    """In one forward pass, padding included."""
    device: torch.device
    ranks: Ranks = ALONE
    """The processes that each ask a teacher of their own about a part of the rows; all get what all were told."""

    @torch.no_grad()
    def ask(self, share: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        """See Questions."""
        passes = list(micro_batches(share, self.train.lengths, tokens=self.tokens))
        own = [self._answer(indices, keys_R, counts_R) for indices in self.ranks.share(passes)]
        packed, known = zip(*self.ranks.collected(own), strict=True)
        return np.concatenate(passes), _joined(list(packed)), min(known)

    def _answer(self, indices: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Packed, int]:
        """Packed distributions of the rows of one forward pass, and how many tokens the teacher knows."""
        assert isinstance(self.config.temperature, float)
        batch = self.train.batch(indices).to(self.device)
        signal = self.teacher.signal(batch, self.config, temperature=self.config.temperature)
        assert isinstance(signal, TeacherLogits) and len(batch.labels_N) == counts_R[indices].sum()
        known = min(self.vocabulary, *signal.vocabularies)
        return _joined(self._pack(signal, keys_R[indices], counts_R[indices])), known

    def _pack(self, signal: TeacherLogits, keys_B: Keys, counts_B: Indices) -> list[Packed]:
        """Packed distributions of a micro-batch, chunk by chunk."""
        cache, size = self.config.cache, signal.vocabulary
        if not cache.sampled:
            return [
                cache_packing.pack_likeliest(
                    signal.log_probs(hidden, vocabulary=self.vocabulary), k=cache.k, dtype=cache.dtype
                )
                for hidden in chunks(size, *signal.tensors)
            ]
        # A row's draws depend on the row alone, and not on those beside it.
        uniform_Nk = np.concatenate(
            [np.random.default_rng(int(key)).random((n, cache.k)) for key, n in zip(keys_B, counts_B, strict=True)]
        )
        placed_Nk = torch.from_numpy(uniform_Nk).to(self.device)
        return [
            cache_packing.pack_draws(signal.log_probs(hidden, vocabulary=self.vocabulary), uniform)
            for *hidden, uniform in chunks(size, *signal.tensors, placed_Nk)
        ]


def _shares(keys_R: Keys, counts_R: Indices, known: list[Keys]) -> Iterator[Indices]:
    """The rows of each shard that is to be made: those of no known key, each once, in their order."""
    _, first = np.unique(keys_R, return_index=True)
    new = np.sort(first[~np.isin(keys_R[first], np.concatenate([np.empty(0, np.uint64), *known]))])
    start, positions = 0, 0
    for stop, row in enumerate(new, start=1):
        positions += int(counts_R[row])
        if positions >= SHARD_POSITIONS or stop == len(new):
            yield new[start:stop]
            start, positions = stop, 0


def _joined(parts: list[Packed]) -> Packed:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
