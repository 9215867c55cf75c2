"""The files of a teacher cache: shards that know their rows, and cache.json, which is written last and names them.

Legend: N positions, R rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from workbench.data.batching import Indices
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.cache_identity import CacheIdentity, require_same
from workbench.distillation.cache_packing import Packed
from workbench.errors import ConfigError, WorkbenchError
from workbench.runs import files

Keys = npt.NDArray[np.uint64]
"""Digests of rows. Among a million rows two are alike with a chance of 3e-8."""

INDEX = "cache.json"
_SHARDS = "shard-*.safetensors"
_DAMAGED = (OSError, ValueError, SafetensorError)


class Shard:
    """One file, memory-mapped: only what is asked for is read. Raises one of `_DAMAGED` where it is none."""

    def __init__(self, path: Path) -> None:
        file = _mapped(path)
        self.made_by: dict[str, str] = json.loads((file.metadata() or {}).get("made_by", "{}"))
        names = file.keys()
        self._arrays: dict[str, npt.NDArray[Any]] = {name: file.get_tensor(name).numpy() for name in names}
        self.keys: Keys = self._arrays.pop("keys")
        self.counts: Indices = self._arrays.pop("counts").astype(np.int64)
        """Positions of each row; rows stand one after the other."""

    def read(self, start: int, stop: int) -> Packed:
        """Packed distributions of some positions, as views of the file."""
        return {name: array[start:stop] for name, array in self._arrays.items()}


class Index(NamedTuple):
    """Content of cache.json: the identity of the cache, and the bytes of each shard."""

    made_by: Mapping[str, str]
    shards: Mapping[str, int]


def write(path: Path, packed: Packed, keys_R: Keys, counts_R: Indices, made_by: Mapping[str, str]) -> None:
    """A shard, whole or not at all."""
    tensors = {**packed, "keys": keys_R, "counts": counts_R.astype(np.uint32)}
    # One entry, because several come in another order each time.
    files.write_bytes(path, save(tensors, metadata={"made_by": json.dumps(made_by)}))


def finish(folder: Path, shards: Mapping[Path, Shard]) -> None:
    """Write cache.json, which says that these shards are all."""
    sizes = {path.name: path.stat().st_size for path in sorted(shards)}
    files.write_json(folder / INDEX, Index(shards[min(shards)].made_by, sizes)._asdict())


def opened(folder: Path, wanted: CacheIdentity) -> tuple[Index, list[Shard]]:
    """The index and the shards of a finished cache.

    Raises:
        ConfigError: there is none, it is another configuration's, or a file of it is lost or damaged.
    """
    path = folder / INDEX
    try:
        raw_index = files.read_json(path)
        index = Index(dict(raw_index["made_by"]), {name: int(size) for name, size in raw_index["shards"].items()})
    except (OSError, WorkbenchError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"distill.cache.folder={folder}: {path} is no finished teacher cache's. Write another folder, or "
            f"{again(folder)}"
        ) from None
    require_same(folder, index.made_by, wanted)
    return index, [_named(folder / name, size) for name, size in index.shards.items()]


def intact(folder: Path, wanted: CacheIdentity) -> dict[Path, Shard]:
    """The shards in a folder that need not be made.

    Raises:
        ConfigError: they are another configuration's, or the folder holds something else, or cannot be written.
    """
    there = list(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    others = [path.name for path in there if path.name != INDEX and not path.match(_SHARDS)]
    if strange := [name for name in others if not name.startswith(".")]:
        raise ConfigError(f"distill.cache.folder={folder}: {min(strange)} is no part of a cache. Write a new folder.")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"distill.cache.folder={folder}: nothing can be written in {nearest}. Write another folder.")
    shard_by_path = {}
    for path in sorted(folder.glob(_SHARDS)):
        try:
            shard_by_path[path] = Shard(path)
        except _DAMAGED:
            continue
        require_same(folder, shard_by_path[path].made_by, wanted)
    return shard_by_path


def rows(train: TokenizedSet) -> tuple[Keys, Indices]:
    """Digest and supervised positions of each row: its tokens, which of them carry loss, and what an encoder reads."""
    keys, counts = [], []
    for row in map(train.__getitem__, range(len(train))):
        read = np.append(row.input_ids, row.source).astype(np.int32).tobytes() + row.supervised.tobytes()
        keys.append(int.from_bytes(blake2b(read, digest_size=8).digest(), "little"))
        counts.append(np.count_nonzero(row.supervised[row.source + 1 :]))
    return np.asarray(keys, dtype=np.uint64), np.asarray(counts, dtype=np.int64)


def again(folder: Path) -> str:
    """How to have made what a cache lacks."""
    return f"delete {folder / INDEX} and run once more with distill.teacher.id: only what is missing is made."


def _mapped(path: Path) -> Any:
    """A safetensors file, whose methods have no types. Tensors of torch are views of it; arrays would be copies."""
    return safe_open(path, framework="pt")


def _named(path: Path, size: int) -> Shard:
    """The shard that a cache.json names."""
    try:
        if (actual_size := path.stat().st_size) == size:
            return Shard(path)
        why = f"has {actual_size:,} bytes instead of {size:,}"
    except FileNotFoundError:
        why = "is not there"
    except _DAMAGED as error:
        why = f"is damaged ({error})"
    raise ConfigError(f"distill.cache.folder: {path} {why}. Restore it, or {again(path.parent)}")
