"""Identity of a teacher cache: everything that its content depends on, and the comparison with another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from workbench.config import ModelConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data import starter
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.runs import files

FORMAT = "1"
"""Version of the files' format: raise it when they are written otherwise."""


class CacheIdentity(NamedTuple):
    """Everything that a cache depends on; None where that is unknown or irrelevant, and so is not compared."""

    teacher: str | None
    """A digest of its weights, or where on the hub they are."""
    tokenizer: str
    """A digest."""
    temperature: str
    k: str
    dtype: str | None
    """Type of the log-probabilities; None for sampled tokens, which have none."""
    kind: Literal["likeliest", "draws"]
    name: str | None = None
    """The teacher, as the configuration names it: told, but not compared."""

    def made_by(self) -> dict[str, str]:
        """The identity as metadata of a file."""
        return {"format": FORMAT, **{name: value for name, value in self._asdict().items() if value is not None}}


def identity(config: DistillConfig, source: TeacherSource | None, tokenizer: PreTrainedTokenizerBase) -> CacheIdentity:
    """The cache that a configuration asks for.

    Args:
        source: The teacher; None where a server teaches, or nobody says who made the cache.
        tokenizer: The student's, which wrote the rows.
    """
    sampled, k = config.cache.sampled, config.cache.k
    words = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    teacher = name = None
    if config.teacher.url is not None:
        # Its weights are not known, and the same server may have another address tomorrow.
        teacher, name = _digest(["served", config.teacher.id]), str(config.teacher.id)
    elif source is not None:
        teacher, name = _digest([_backbone(source.model), sorted(map(_files, source.adapters))]), source.name
    return CacheIdentity(
        teacher=teacher,
        tokenizer=_digest(words),
        temperature=str(config.temperature),
        k=str(k if sampled else min(k, len(tokenizer))),
        dtype=None if sampled else config.cache.dtype,
        kind="draws" if sampled else "likeliest",
        name=name,
    )


def require_same(folder: Path, identity: Mapping[str, str], wanted: CacheIdentity) -> None:
    """Raise ConfigError, which names what differs, where `found` was said by the files of another cache."""
    makers = wanted.made_by()
    makers.pop("name", None)
    if wrong := [name for name, value in makers.items() if identity.get(name) != value]:
        lines = [
            f"{name}: {_shown(name, identity)} there, {_shown(name, wanted.made_by())} asked for" for name in wrong
        ]
        raise ConfigError(
            "\n  ".join([f"distill.cache.folder={folder} holds the cache of another configuration:", *lines])
            + "\n  Write another distill.cache.folder, or delete this one to have it made anew."
        )


def _shown(name: str, makers: Mapping[str, str]) -> str:
    value = makers.get(name, "none")
    if name == "teacher":
        return f"{makers.get('name', 'unnamed')} (digest {value})"
    return f"digest {value}" if name == "tokenizer" else value


def _backbone(model: ModelConfig) -> list[Any]:
    """Which weights, and how they are stored: a quantised teacher is another one."""
    folder = Path(starter.resolve(model.id)).expanduser()
    if folder.is_dir():
        return [model.values, _files(folder)]
    commit = getattr(backbones.hub_config(model), "_commit_hash", None)
    return [model.values, model.id, commit or model.revision or "main"]


def _files(folder: Path) -> list[str]:
    """Digests of a folder's weights and of what says how they are used."""
    candidates = [*folder.glob("*.safetensors"), folder / "config.json", folder / "adapter_config.json"]
    stats = [(path, path.stat()) for path in sorted(candidates) if path.is_file()]
    return [_digest_of(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


@lru_cache(maxsize=256)
def _digest_of(path: Path, size: int, changed_ns: int) -> str:
    """`files.digest`, read once in a process: weights are large."""
    return files.digest(path)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
