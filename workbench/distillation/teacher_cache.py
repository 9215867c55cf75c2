"""The teacher cache: the teacher's distribution at every supervised token, computed once and kept on disk.

Rows are known by what they hold: they may be sharded or ordered otherwise, one that comes twice is kept once, and what
is lost, or new, is asked again without the rest. Files are shards that know their rows, and cache.json, which is
written last and names them.

Of a distribution its k likeliest tokens are kept, or k samples. Of a token's number its low 16 bits are kept, in rising
order of the numbers; how many of a position's tokens lie below each multiple of 65,536 gives the rest. With k = 64 and
float16 that is 260 bytes a position, and 3 more for 262,144 tokens.

Legend: N positions, n of them, k tokens kept of each, V vocabulary, H multiples of 65,536 below V, R rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices, MicroBatch, Row, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.student_loss import Teacher, TeacherLogits, TeacherSignal, divergence
from workbench.distillation.teacher_sources import TeacherSource
from workbench.distillation.token_alignment import TeacherReading, predicted
from workbench.errors import ConfigError, Stopped, WorkbenchError
from workbench.losses.chunked_loss import Follows, chunks
from workbench.losses.divergences import log_probs, sampled_forward_kl, top_k_and_rest
from workbench.models import backbone_source, backbones
from workbench.runs import files
from workbench.runs.ranks import ALONE, Ranks
from workbench.training.callbacks import Callback

Packed = Mapping[str, npt.NDArray[Any]]  # arrays (N, ...) by name

DTYPES = {"float16": torch.float16, "float32": torch.float32}
_LOW = 2**16
FORMAT = "1"  # version of the files' format: raise it when they are written otherwise
Keys = npt.NDArray[np.uint64]  # Digests of rows. Among a million rows two are alike with a chance of 3e-8.
INDEX = "cache.json"
_SHARDS = "shard-*.safetensors"
_DAMAGED = (OSError, ValueError, SafetensorError)
SHARD_POSITIONS = 2**18  # positions after which a shard is full: at 64 likeliest tokens of each, 65 MiB


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens of each position, and all others as one event.

    Attributes:
        tensors: Tokens (N, k) int64, and log-probabilities (N, k + 1) float32, the last one of all other tokens.
        vocabulary: Tokens that the teacher knows, V; and as many numbers the loss makes of each position.
    """

    tensors: Sequence[Tensor]
    vocabulary: int
    config: DistillConfig
    temperature: float
    follows: Follows = None

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The configured divergence over the k tokens and the rest."""
        ids_nk, teacher_nE = tensors
        student_nE = top_k_and_rest(log_probs(logits_nV[:, : self.vocabulary], self.temperature), ids_nk)
        return divergence(self.config, self.temperature)(student_nE, teacher_nE)


@dataclass(frozen=True)
class SampledTokens:
    """Samples of the teacher's distribution: an unbiased estimate of forward_kl (Anshumann et al. 2025).

    Attributes:
        tensors: Tokens (N, k) int64, the share of the samples that are this token (N, k) float32 (0 where a token
            is repeated), and the teacher's sum p log p (N,) float32.
        vocabulary: Tokens that the teacher knows, V; and as many numbers the loss makes of each position.
    """

    tensors: Sequence[Tensor]
    vocabulary: int
    temperature: float
    follows: Follows = None

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The estimate, times the square of the temperature."""
        student_nV = log_probs(logits_nV[:, : self.vocabulary], self.temperature)
        return sampled_forward_kl(student_nV, *tensors) * self.temperature**2


def likeliest(log_probs_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens (N, k), or all where there are fewer, and what `top_k_and_rest` says of them."""
    ids_Nk = log_probs_NV.topk(min(k, log_probs_NV.shape[1])).indices.sort(-1).values
    return ids_Nk, top_k_and_rest(log_probs_NV, ids_Nk)


def pack_likeliest(log_probs_NV: Tensor, *, k: int, dtype: str) -> Packed:
    """The `k` likeliest tokens, or all where there are fewer; the mass of the others in float32."""
    ids_Nk, said_NE = likeliest(log_probs_NV, k)
    return {
        **pack_ids(ids_Nk.cpu().numpy(), log_probs_NV.shape[1]),
        "log_probs": said_NE[:, :-1].to(DTYPES[dtype]).cpu().numpy(),
        "rest": said_NE[:, -1].float().cpu().numpy(),
    }


def unpack_likeliest(packed: Packed) -> tuple[Tensor, Tensor]:
    """`tensors` of `TopTokens`."""
    said_NE = np.concatenate([packed["log_probs"].astype(np.float32), packed["rest"][:, None]], 1)
    # Rounded to float16 they do not quite add up to one.
    return torch.from_numpy(unpack_ids(packed)), torch.from_numpy(said_NE).log_softmax(-1)


def pack_draws(log_probs_NV: Tensor, uniform_Nk: Tensor) -> Packed:
    """The tokens at which the cumulative probability passes each of `uniform_Nk`, numbers in [0, 1) in float64."""
    probs_NV = log_probs_NV.double().exp()
    passed_NV = probs_NV.cumsum(-1)
    ids_Nk = torch.searchsorted(passed_NV, uniform_Nk * passed_NV[:, -1:], right=True)
    ids_Nk = ids_Nk.clamp(max=log_probs_NV.shape[1] - 1).sort(-1).values
    negative_entropy_N = torch.special.entr(probs_NV).sum(-1).neg().float()
    return {
        **pack_ids(ids_Nk.cpu().numpy(), log_probs_NV.shape[1]),
        "negative_entropy": negative_entropy_N.cpu().numpy(),
    }


def unpack_draws(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """`tensors` of `SampledTokens`."""
    ids_Nk = unpack_ids(packed)
    # The first of each run of equal tokens has the weight of all: gradients of one token that are added in any order
    # would differ in their last bits.
    first_Nk = np.diff(ids_Nk, axis=1, prepend=-1) != 0
    starts = np.flatnonzero(first_Nk)
    weights_Nk = np.zeros(ids_Nk.shape, dtype=np.float32)
    weights_Nk.flat[starts] = np.diff(starts, append=ids_Nk.size) / ids_Nk.shape[1]
    return torch.from_numpy(ids_Nk), torch.from_numpy(weights_Nk), torch.from_numpy(packed["negative_entropy"])


def pack_ids(ids_Nk: Indices, vocabulary: int) -> Packed:
    """Tokens below `vocabulary`, rising in each row, as their low 16 bits and how many lie below each multiple."""
    below_NH = (ids_Nk[:, None] < np.arange(_LOW, vocabulary, _LOW)[:, None]).sum(-1)
    return {"ids": (ids_Nk % _LOW).astype(np.uint16), "below": below_NH.astype(np.min_scalar_type(ids_Nk.shape[1]))}


def unpack_ids(packed: Packed) -> Indices:
    """The tokens (N, k)."""
    ids_Nk: Indices = packed["ids"].astype(np.int64)
    for below_N in packed["below"].T:
        ids_Nk += _LOW * (np.arange(ids_Nk.shape[1]) >= below_N[:, None])
    return ids_Nk


class CacheIdentity(NamedTuple):
    """Everything that a cache depends on; None where that is unknown or irrelevant, and so is not compared."""

    teacher: str | None  # a digest of its weights, or where on the hub they are
    tokenizer: str  # a digest
    temperature: str
    k: str | None  # None: whatever meets `distill.cache.gap`
    dtype: str | None  # type of the log-probabilities; None where there are none
    kind: Literal["likeliest", "draws", "spans", "likelihoods"]
    """What is kept: the likeliest tokens, samples, the likeliest tokens and the log-probabilities of those that stand
    in the rows, or these alone."""
    name: str | None = None  # the teacher, as the configuration names it: told, but not compared

    def made_by(self) -> dict[str, str]:
        """The identity as metadata of a file."""
        return {"format": FORMAT, **{name: value for name, value in self._asdict().items() if value is not None}}


def identity(config: DistillConfig, source: TeacherSource | None, tokenizer: PreTrainedTokenizerBase) -> CacheIdentity:
    """The cache that a configuration asks for. `source`: the teacher; None where a server teaches, or nobody says who
    made the cache. `tokenizer`: the one that wrote the rows: the student's, or a teacher's that reads other tokens."""
    sampled, k = config.cache.sampled, config.cache.kept
    chosen = str(k if sampled else min(k, len(tokenizer)))
    words = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    teacher = name = None
    if config.teacher.url is not None:
        # Its weights are not known, and the same server may have another address tomorrow.
        teacher, name = _digest(["served", config.teacher.id]), str(config.teacher.id)
    elif source is not None:
        digests = [_weights(each) for each in source.each]
        said: list[Any] = digests[0] if len(digests) == 1 else digests
        teacher, name = _digest([said, config.teacher.shares] if config.teacher.shares else said), source.name
    rows_alone = config.loss == "alm"
    return CacheIdentity(
        teacher=teacher,
        tokenizer=_digest(words),
        temperature="1.0" if rows_alone else str(config.temperature),
        k=None if rows_alone or (config.cache.gap is not None and config.cache.k is None) else chosen,
        dtype=None if rows_alone or sampled else config.cache.dtype,
        kind="likelihoods" if rows_alone else "spans" if config.across else "draws" if sampled else "likeliest",
        name=name,
    )


def _weights(source: TeacherSource) -> list[Any]:
    """Which weights one teacher has, and how they are stored: when quantised it is another one."""
    folder = Path(backbone_source.located(source.model.id)).expanduser()
    weights: list[Any] = [source.model.values]
    if folder.is_dir():
        weights.append(_files(folder))
    else:
        commit = getattr(backbones.hub_config(source.model), "_commit_hash", None)
        weights += [source.model.id, commit or source.model.revision or "main"]
    return [weights, sorted(map(_files, source.adapters))]


def require_same(folder: Path, identity: Mapping[str, str], wanted: CacheIdentity) -> None:
    """Raise ConfigError, which names what differs, where the files are those of another cache."""
    asked = wanted.made_by()

    def shown(name: str, makers: Mapping[str, str]) -> str:
        value = makers.get(name, "none")
        if name == "teacher":
            return f"{makers.get('name', 'unnamed')} (digest {value})"
        return f"digest {value}" if name == "tokenizer" else value

    if wrong := [name for name, value in asked.items() if name != "name" and identity.get(name) != value]:
        lines = [f"{name}: {shown(name, identity)} there, {shown(name, asked)} asked for" for name in wrong]
        raise ConfigError(
            "\n  ".join([f"distill.cache.folder={folder} holds the cache of another configuration:", *lines])
            + "\n  Write another distill.cache.folder, or delete this one to have it made anew."
        )


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


class Shard:
    """One file, memory-mapped: only what is asked for is read. Raises one of `_DAMAGED` where it is none."""

    def __init__(self, path: Path) -> None:
        # Its methods have no types. Tensors of torch are views of the file; arrays would be copies.
        file: Any = safe_open(path, framework="pt")
        self.made_by: dict[str, str] = json.loads((file.metadata() or {}).get("made_by", "{}"))
        names = file.keys()
        self._arrays: dict[str, npt.NDArray[Any]] = {name: file.get_tensor(name).numpy() for name in names}
        self.keys: Keys = self._arrays.pop("keys")
        self.counts: Indices = self._arrays.pop("counts").astype(np.int64)
        """Positions of each row; rows follow one another."""

    def read(self, start: int, stop: int) -> Packed:
        """Packed distributions of some positions, as views of the file."""
        return {name: array[start:stop] for name, array in self._arrays.items()}


def opened(folder: Path, wanted: CacheIdentity) -> tuple[Mapping[str, str], dict[Path, Shard]]:
    """What made a finished cache, and its shards. Raises ConfigError: there is none, it is another configuration's, or
    a file of it is lost or damaged."""
    path = folder / INDEX
    try:
        index = files.read_json(path)
        made_by, sizes = dict(index["made_by"]), {folder / name: int(size) for name, size in index["shards"].items()}
    except (OSError, WorkbenchError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"distill.cache.folder={folder}: {path} is no finished teacher cache's. Write another folder, or "
            f"{again(folder)}"
        ) from None
    require_same(folder, made_by, wanted)
    shards = {}
    for path, size in sizes.items():
        try:
            if (actual_size := path.stat().st_size) == size:
                shards[path] = Shard(path)
                continue
            why = f"has {actual_size:,} bytes instead of {size:,}"
        except FileNotFoundError:
            why = "is not there"
        except _DAMAGED as error:
            why = f"is damaged ({error})"
        raise ConfigError(f"distill.cache.folder: {path} {why}. Restore it, or {again(folder)}")
    return made_by, shards


def intact(folder: Path, wanted: CacheIdentity) -> dict[Path, Shard]:
    """The shards in a folder that need not be made. Raises ConfigError: they are another configuration's, or the folder
    holds something else, or cannot be written."""
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


def row_keys(train: TokenizedSet) -> tuple[Keys, Indices]:
    """Digest and supervised positions of each row: its tokens, which of them carry loss, and what an encoder reads."""
    keys, counts = [], []
    for row in map(train.__getitem__, range(len(train))):
        read = np.append(row.input_ids, row.source).astype(np.int32).tobytes() + row.supervised.tobytes()
        keys.append(int.from_bytes(blake2b(read, digest_size=8).digest(), "little"))
        counts.append(np.count_nonzero(row.supervised[row.source + 1 :]))
    return np.asarray(keys, dtype=np.uint64), np.asarray(counts, dtype=np.int64)


def again(folder: Path) -> str:
    """What to do about rows that a cache lacks."""
    return f"delete {folder / INDEX} and run once more with distill.teacher.id: only what is missing is made."


class CachedTeacher:
    """Teacher distributions for the rows of `train`, read from a finished cache. Raises ConfigError: there is none, it
    is another configuration's, it lacks rows, or a file of it is lost or damaged."""

    def __init__(self, folder: Path, train: TokenizedSet, config: DistillConfig, wanted: CacheIdentity) -> None:
        made_by, shards = opened(folder, wanted)
        self._config, self._shards = config, list(shards.values())
        self._known = int(made_by["vocabulary"])
        keys_R, counts_R = row_keys(train)
        keys = np.concatenate([shard.keys for shard in self._shards])
        starts = np.concatenate([np.cumsum(shard.counts) - shard.counts for shard in self._shards])
        numbers = np.repeat(np.arange(len(self._shards)), [len(shard.keys) for shard in self._shards])
        order = np.argsort(keys)
        at_R = order[np.searchsorted(keys, keys_R, sorter=order).clip(max=len(keys) - 1)]
        if (unknown := np.flatnonzero(keys[at_R] != keys_R)).size:
            raise ConfigError(
                f"distill.cache.folder={folder} knows nothing of {len(unknown)} of {len(train)} training rows, such as "
                f"{train.place(int(unknown[0]))}: it was made of other data, or with another data.max_tokens or chat "
                f"template.\n  Write another folder, or add these rows to it: {again(folder)}"
            )
        self._shard_R, self._start_R, self._count_R = (numbers[at_R], starts[at_R], counts_R)
        positions = sum(int(shard.counts.sum()) for shard in self._shards)
        self.facts: dict[str, Any] = {
            "folder": str(folder),
            "kind": wanted.kind,
            **({"k": int(made_by["k"])} if "k" in made_by else {}),
            "dtype": wanted.dtype,
            "tokens": positions,
            "bytes_per_token": round(sum(path.stat().st_size for path in shards) / positions, 1),
            "shards": len(self._shards),
        }
        if wanted.kind in ("likeliest", "spans"):
            rests = np.concatenate([shard.read(0, int(shard.counts.sum()))["rest"] for shard in self._shards])
            self.facts["mass_beyond_k"] = round(float(np.exp(rests.astype(np.float64)).mean()), 6)
        self.facts |= lost(folder)

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherSignal:
        """Teacher signal at the batch's supervised positions; `temperature` is that of the cache."""
        assert batch.rows_B is not None and temperature == self._config.temperature
        packed = self.packed(batch.rows_B)
        assert len(packed["ids"]) == len(batch.labels_N), "the batch has other positions than its rows"
        device = batch.labels_N.device
        if config.cache.sampled:
            return SampledTokens([tensor.to(device) for tensor in unpack_draws(packed)], self._known, temperature)
        return TopTokens([tensor.to(device) for tensor in unpack_likeliest(packed)], self._known, config, temperature)

    def packed(self, rows: Indices) -> Packed:
        """What is kept of the supervised positions of some rows."""
        places = zip(self._shard_R[rows], self._start_R[rows], self._count_R[rows], strict=True)
        nothing = {name: array[:0] for name, array in self._shards[0].read(0, 0).items()}
        return _joined([nothing, *(self._shards[shard].read(start, start + count) for shard, start, count in places)])

    def read(
        self, rows: Sequence[tuple[int, Row]], config: DistillConfig, *, temperature: float, packed: bool
    ) -> TeacherReading:
        """What a teacher of other tokens said of its own rows, each with its number; none may have another answer."""
        found = self.packed(np.asarray([number for number, _ in rows], dtype=np.int64))
        tensors = unpack_likeliest(found) if "ids" in found else ()
        return _reading(tensors, torch.from_numpy(found["own"]), self._known if tensors else 0)


@dataclass(frozen=True)
class BlankCache:
    """A cache as a plan sees it: distributions over `vocabulary` tokens that have shapes and say nothing."""

    config: DistillConfig
    vocabulary: int

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherSignal:
        """As of `CachedTeacher`."""
        count, k = len(batch.labels_N), min(self.config.cache.kept, self.vocabulary)
        ids_Nk = batch.labels_N.new_zeros((count, k))
        said_NE = torch.zeros(count, k + (not config.cache.sampled), device=ids_Nk.device)
        if config.cache.sampled:
            return SampledTokens([ids_Nk, said_NE, said_NE[:, 0]], self.vocabulary, temperature)
        return TopTokens([ids_Nk, said_NE], self.vocabulary, config, temperature)

    def read(
        self, rows: Sequence[tuple[int, Row]], config: DistillConfig, *, temperature: float, packed: bool
    ) -> TeacherReading:
        """As of `CachedTeacher`."""
        own_M = torch.zeros(sum(len(predicted(row)) for _, row in rows))
        if config.loss == "alm":
            return _reading((), own_M, 0)
        k = min(self.config.cache.kept, self.vocabulary)
        ids_Mk = torch.zeros(len(own_M), k, dtype=torch.int64)
        return _reading((ids_Mk, torch.zeros(len(own_M), k + 1)), own_M, self.vocabulary)


def _reading(tensors: Sequence[Tensor], own_M: Tensor, vocabulary: int) -> TeacherReading:
    """Likeliest tokens (M, k), the log-probabilities of these and of all others together (M, k + 1), as a reading."""

    def distributions(ids_nk: Tensor, logp_nE: Tensor) -> tuple[Tensor, Tensor]:
        nothing_nW = logp_nE.new_full((len(ids_nk), vocabulary), -torch.inf)
        return nothing_nW.scatter(1, ids_nk, logp_nE[:, :-1]), logp_nE[:, -1]

    return TeacherReading(tensors, own_M, vocabulary, distributions)


@torch.no_grad()
def ask(batch: MicroBatch, teacher: Teacher, config: DistillConfig, *, vocabulary: int) -> None:
    """What asking about a micro-batch computes, so that a plan can count it; nothing is kept."""
    assert isinstance(config.temperature, float), "a cache has one"
    signal = teacher.signal(batch, config, temperature=config.temperature)
    assert isinstance(signal, TeacherLogits)
    for hidden in chunks(signal.vocabulary, *signal.tensors):
        likeliest(signal.log_probs(hidden, vocabulary=vocabulary), config.cache.kept)


def missing(folder: Path) -> bool:
    """Whether no finished cache is there."""
    return not (folder / INDEX).exists()


def lost(folder: Path) -> dict[str, float]:
    """What a finished cache loses of the live divergence, where that was measured: `CacheGap.facts`."""
    return dict(files.read_json(folder / INDEX).get("lost", {}))


def with_k(config: DistillConfig) -> DistillConfig:
    """The configuration with the k that a finished cache has, where `distill.cache.gap` is to find it. Raises
    ConfigError: that cache loses more, or nobody measured it."""
    cache = config.cache
    if cache.gap is None or cache.folder is None or missing(cache.folder):
        return config
    index = files.read_json(cache.folder / INDEX)
    share, k = index.get("lost", {}).get("gap_share"), int(index.get("made_by", {}).get("k", 0))
    if share is None or share > cache.gap:
        loses = "it is not known what that loses" if share is None else f"that loses {share:.2g} of the divergence"
        raise ConfigError(
            f"distill.cache.gap={cache.gap:g}: {cache.folder} keeps {k} tokens, and {loses}. Write another "
            "distill.cache.folder, or a higher gap."
        )
    return config.model_copy(update={"cache": cache.model_copy(update={"k": k})})


def made_by(folder: Path) -> str | None:
    """The teacher that a finished cache was made by, as its configuration named it."""
    teacher_name = files.read_json(folder / INDEX).get("made_by", {}).get("name")
    return None if teacher_name is None else str(teacher_name)


def require_usable(config: DistillConfig, train: TokenizedSet, wanted: CacheIdentity) -> None:
    """Refuse, before a teacher is asked, a cache that could not be used, or could not be made. Raises ConfigError: what
    `CachedTeacher` or `write` would raise, or nobody is named who could be asked."""
    folder = config.cache.folder
    assert folder is not None
    if not missing(folder):
        CachedTeacher(folder, train, config, wanted)
    elif wanted.teacher is None:
        raise ConfigError(
            f"distill.cache.folder={folder} holds no finished cache. Name who is to be asked: distill.teacher.id."
        )
    else:
        intact(folder, wanted)


class Questions(Protocol):
    """A way to get the teacher's distributions of training rows."""

    def ask(self, rows: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        """Rows in the order of the cache, their packed distributions, and how many tokens the teacher knows.

        Args:
            rows: Rows to ask about.
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
    lost: Mapping[str, float] | None = None,
) -> None:
    """Ask a teacher about the rows of `train` that no shard in `folder` has, and finish the cache.

    The same rows in the same order make the same files, whether it was interrupted in between or not, and however many
    processes ask. Raises ConfigError: `folder` holds the cache of another configuration, or something else; Stopped:
    the callback asked for it; finished shards are kept. `ranks`: the processes that ask together; the first of them
    writes. `lost`: what the cache loses, kept beside it.
    """
    assert wanted.teacher is not None, "who asks a teacher knows which"
    shard_by_path = intact(folder, wanted) if ranks.first else {}
    if ranks.first:
        files.require_writable(folder / INDEX)
        files.remove_unfinished(folder)
    keys_R, counts_R = row_keys(train)
    shards = ranks.agreed(list(_shards_to_make(keys_R, counts_R, [shard.keys for shard in shard_by_path.values()])))
    names = (folder / f"shard-{number:05d}.safetensors" for number in count())
    for done, shard in enumerate(shards, start=1):
        order, packed, known = questions.ask(shard, keys_R, counts_R)
        if ranks.first:
            made_by = {**wanted.made_by(), "vocabulary": str(known)}
            path = next(name for name in names if name not in shard_by_path)
            tensors = {**packed, "keys": keys_R[order], "counts": counts_R[order].astype(np.uint32)}
            # One entry of metadata, because several come in another order each time.
            files.write_bytes(path, save(tensors, metadata={"made_by": json.dumps(made_by)}))
            shard_by_path[path] = Shard(path)
        callback.say(f"{folder}: shard {done} of {len(shards)} is done, {counts_R[order].sum():,} positions.")
        if ranks.any(callback.stop_requested()) and done < len(shards):
            raise Stopped(f"Stopped after shard {done} of {len(shards)} of {folder}. Run again to go on there.")
    if ranks.first:
        sizes = {path.name: path.stat().st_size for path in sorted(shard_by_path)}
        index = {"made_by": shard_by_path[min(shard_by_path)].made_by, "shards": sizes}
        files.write_json(folder / INDEX, index | ({"lost": lost} if lost else {}))
    ranks.wait()


@dataclass(frozen=True)
class LiveQuestions:
    """Asks a teacher that is loaded in this process."""

    train: TokenizedSet
    teacher: Teacher  # its signals are `TeacherLogits`
    config: DistillConfig
    vocabulary: int  # tokens that count
    tokens: int  # in one forward pass, padding included
    device: torch.device
    ranks: Ranks = ALONE  # the processes, each with a teacher for a part of the rows; all get the results of all

    @torch.no_grad()
    def ask(self, rows: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        passes = list(micro_batches(rows, self.train.lengths, tokens=self.tokens))
        assert isinstance(self.config.temperature, float)
        cache, own = self.config.cache, []
        for indices in self.ranks.share(passes):
            batch = self.train.batch(indices).to(self.device)
            temperature = 1.0 if self.config.loss == "alm" else self.config.temperature
            signal = self.teacher.signal(batch, self.config, temperature=temperature)
            assert isinstance(signal, TeacherLogits) and len(batch.labels_N) == counts_R[indices].sum()
            if cache.sampled:
                # A row's samples depend on the row alone, and not on those beside it.
                pairs = zip(keys_R[indices], counts_R[indices], strict=True)
                uniform_Nk = np.concatenate(
                    [np.random.default_rng(int(key)).random((n, cache.kept)) for key, n in pairs]
                )
                parts = [
                    pack_draws(signal.log_probs(hidden, vocabulary=self.vocabulary), uniform)
                    for *hidden, uniform in chunks(
                        signal.vocabulary, *signal.tensors, torch.from_numpy(uniform_Nk).to(self.device)
                    )
                ]
            else:
                pieces = chunks(signal.vocabulary, batch.labels_N, *signal.tensors)
                parts = [
                    self._pack(signal.log_probs(hidden, vocabulary=self.vocabulary), own) for own, *hidden in pieces
                ]
            own.append((_joined(parts), min(self.vocabulary, *signal.vocabularies)))
        packed, known = zip(*self.ranks.collected(own), strict=True)
        return np.concatenate(passes), _joined(list(packed)), min(known)

    def _pack(self, logp_NV: Tensor, labels_N: Tensor) -> Packed:
        """What is kept of whole distributions, and of the tokens that stand there where the student reads others."""
        cache, config = self.config.cache, self.config
        own = {"own": logp_NV.gather(1, labels_N[:, None])[:, 0].float().cpu().numpy()} if config.across else {}
        return own if config.loss == "alm" else {**pack_likeliest(logp_NV, k=cache.kept, dtype=cache.dtype), **own}


def _shards_to_make(keys_R: Keys, counts_R: Indices, known: list[Keys]) -> Iterator[Indices]:
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
