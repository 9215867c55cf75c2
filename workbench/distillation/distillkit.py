"""Logits that DistillKit keeps (arcee-ai/DistillKit, `distillkit.sample_logits_vllm`): read as a teacher cache, and
written from one.

A folder of parquet files has a row for each text: its tokens (`input_ids`), and for each position the tokens that may
follow it, by falling probability (`bytepacked_indices`), with their log-probabilities (`compressed_logprobs`).
compression_config.yaml says how these are coded: the first `exact_k` as they are, the others as a polynomial of their
rank and residuals of few bits; with `delta_encoding` each as the difference from the one before.

Legend: P positions, k tokens kept of each.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.distill_config import DistillConfig
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.data.batching import Indices
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_cache
from workbench.distillation.teacher_cache import CacheIdentity, Keys, Packed
from workbench.errors import ConfigError
from workbench.runs import files
from workbench.training.callbacks import Callback

CONFIG = "compression_config.yaml"
Bytes = npt.NDArray[np.uint8]
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class ResidualBin(BaseModel):
    """Consecutive residuals with one scale."""

    scale_dtype: str
    element_bits: PositiveInt
    num_elements: PositiveInt


class Compression(BaseModel):
    """How the distributions of a folder are coded; the names are DistillKit's."""

    model_config = ConfigDict(extra="ignore")

    d: PositiveInt
    """Tokens of the vocabulary."""
    k: PositiveInt
    exact_k: int
    exact_dtype: str = "float32"
    polynomial_terms: list[int | str] | None = None
    term_dtype: str = "float32"
    residual_bins: list[ResidualBin] = []
    delta_encoding: bool = True
    normalize_t: bool = False

    @property
    def bits(self) -> int:
        """Of a token's number."""
        return math.ceil(math.log2(self.d))

    def log_probs(self, coded_PB: Bytes) -> npt.NDArray[np.float64]:
        """Log-probabilities (P, k), by rank."""
        rest = coded_PB

        def numbers(count: int, dtype: str) -> torch.Tensor:
            nonlocal rest
            size = count * _DTYPES[dtype].itemsize
            part, rest = rest[:, :size].copy(), rest[:, size:]
            return torch.from_numpy(part).view(_DTYPES[dtype]).double()

        exact_Pe = numbers(self.exact_k, self.exact_dtype)
        more_Pm = torch.zeros(len(coded_PB), self.k - self.exact_k, dtype=torch.float64)
        if self.polynomial_terms:
            factors = numbers(len(self.polynomial_terms), self.term_dtype)
            ranks = torch.arange(more_Pm.shape[1], dtype=torch.float64)
            ranks = ranks / max(1, len(ranks) - 1) if self.normalize_t else ranks
            terms = [
                ranks**term if isinstance(term, int) else getattr(torch, term)(ranks) for term in self.polynomial_terms
            ]
            more_Pm = factors @ torch.stack(terms)
        start = 0
        for each in self.residual_bins:
            scale = numbers(1, each.scale_dtype)
            size = -(-each.num_elements * each.element_bits // 8)
            levels = torch.from_numpy(unpack_bits(rest[:, :size], each.element_bits, each.num_elements)).double()
            rest = rest[:, size:]
            centred = 2 * levels - 1 if each.element_bits == 1 else levels - 2 ** (each.element_bits - 1)
            more_Pm[:, start : start + each.num_elements] += centred * scale
            start += each.num_elements
        found = torch.cat([exact_Pe, more_Pm], 1)
        return (found.cumsum(1) if self.delta_encoding else found).numpy()


def pack_bits(numbers_PN: Indices, bits: int) -> Bytes:
    """Each number in so many bits, the highest first, one after another in the bytes of its row."""
    places = np.arange(bits - 1, -1, -1)
    return np.packbits((numbers_PN[..., None] >> places & 1).astype(np.uint8).reshape(len(numbers_PN), -1), axis=1)


def unpack_bits(packed_PB: Bytes, bits: int, count: int) -> Indices:
    """The numbers (P, `count`) that `pack_bits` packed."""
    found = np.unpackbits(packed_PB, axis=1)[:, : count * bits].reshape(len(packed_PB), count, bits)
    return found.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1))


@dataclass(frozen=True)
class DistillKitRows:
    """A folder of DistillKit as who is asked about training rows. Raises ConfigError: it is none, of another
    vocabulary, or lacks a row."""

    folder: Path
    train: TokenizedSet
    vocabulary: int  # the student's tokens
    k: int
    dtype: str

    @cached_property
    def compression(self) -> Compression:
        """How its numbers are coded."""
        path = self.folder / CONFIG
        if not path.is_file():
            raise ConfigError(f"{self.folder} has no {CONFIG}, which DistillKit writes beside its parquet files.")
        try:
            found = Compression.model_validate(read_yaml(path))
        except ValidationError as error:
            raise ConfigError(
                f"{path} is no configuration of DistillKit's logits: {error.errors()[0]['msg']}."
            ) from None
        if found.d < self.vocabulary:
            raise ConfigError(
                f"{self.folder} is of a vocabulary of {found.d} tokens, and the student's tokenizer has "
                f"{self.vocabulary}. Name a student with the tokenizer of that teacher."
            )
        return found

    @cached_property
    def _places(self) -> tuple[pyarrow.Table, dict[bytes, int]]:
        table = pyarrow.dataset.dataset(self.folder, format="parquet", exclude_invalid_files=True).to_table()
        rows = table.column("input_ids").to_pylist()
        return table, {np.asarray(ids, dtype=np.int64).tobytes(): place for place, ids in enumerate(rows)}

    def ask(self, rows: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        """As of `Questions`."""
        table, places = self._places
        parts = list[Packed]()
        for index in map(int, rows):
            row = self.train[index]
            place = places.get(row.input_ids.astype(np.int64).tobytes())
            if place is None:
                raise ConfigError(
                    f"{self.folder} has no row with the tokens of {self.train.place(index)}: it was made of other "
                    "data, or by another tokenizer or chat template."
                )
            coded, named = (
                np.asarray(table.column(name)[place].as_py(), dtype=np.uint8)
                for name in ("compressed_logprobs", "bytepacked_indices")
            )
            at = np.flatnonzero(row.supervised[1:])
            parts.append(self._packed(self.compression.log_probs(coded[at]), named[at]))
        return rows, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, self.vocabulary

    def _packed(self, logp_Pk: npt.NDArray[np.float64], named_PB: Bytes) -> Packed:
        """The likeliest `k`, as `teacher_cache.pack_likeliest` packs whole distributions."""
        compression, k = self.compression, min(self.k, self.compression.k)
        ids_Pk = unpack_bits(named_PB, compression.bits, compression.k)[:, :k]
        if (ids_Pk >= self.vocabulary).any():
            raise ConfigError(
                f"{self.folder} names token {int(ids_Pk.max())}, and the student's tokenizer has {self.vocabulary}."
            )
        order = ids_Pk.argsort(1)
        logp_Pk = np.minimum(np.take_along_axis(logp_Pk[:, :k], order, 1), 0)
        rest = np.log(np.maximum(1 - np.exp(logp_Pk).sum(1), np.finfo(np.float32).eps))
        return {
            **teacher_cache.pack_ids(np.take_along_axis(ids_Pk, order, 1), self.vocabulary),
            "log_probs": logp_Pk.astype(self.dtype),
            "rest": rest.astype(np.float32),
        }


def read(
    folder: Path,
    train: TokenizedSet,
    config: DistillConfig,
    tokenizer: PreTrainedTokenizerBase,
    callback: Callback,
) -> None:
    """Make the cache that `config` names of what a folder says. Raises ConfigError: as `DistillKitRows` does, or it
    keeps fewer tokens."""
    cache = config.cache
    assert cache.folder is not None, "refused otherwise"
    asked = DistillKitRows(folder, train, len(tokenizer), cache.kept, cache.dtype)
    if asked.compression.k < min(cache.kept, len(tokenizer)):
        raise ConfigError(
            f"distill.cache.k={cache.kept}: {folder} keeps {asked.compression.k} tokens. Write "
            f"distill.cache.k={asked.compression.k}."
        )
    digests = {path.name: files.digest(path) for path in sorted(folder.glob("*.parquet"))}
    made = teacher_cache.identity(config, None, tokenizer)._replace(
        teacher=hashlib.sha256(repr(digests).encode()).hexdigest()[:16], name=str(folder)
    )
    teacher_cache.write(cache.folder, train, asked, made, callback=callback)


def write(folder: Path, cache: Path, train: TokenizedSet, wanted: CacheIdentity) -> None:
    """Write what a cache holds of `train` as DistillKit reads it, exactly; positions without a loss say nothing."""
    made_by, shard_by_path = teacher_cache.opened(cache, wanted)
    shards, vocabulary = list(shard_by_path.values()), int(made_by["vocabulary"])
    keys_R, _ = teacher_cache.row_keys(train)
    known = {int(key): (shard, at) for shard in shards for at, key in enumerate(shard.keys)}
    k, lines = shards[0].read(0, 1)["log_probs"].shape[1], list[dict[str, Any]]()
    compression = Compression(d=vocabulary, k=k, exact_k=k, delta_encoding=False)
    for index, key in enumerate(keys_R.tolist()):
        shard, at = known[key]
        start = int(shard.counts[:at].sum())
        packed = shard.read(start, start + int(shard.counts[at]))
        logp_Pk = packed["log_probs"].astype(np.float32)
        order = np.argsort(-logp_Pk, axis=1, kind="stable")
        row = train[index]
        length, places = len(row.input_ids), np.flatnonzero(row.supervised[1:])
        every = np.full((length, k), -np.log(np.float32(vocabulary)), dtype=np.float32)
        ids = np.tile(np.arange(k), (length, 1))
        every[places] = np.take_along_axis(logp_Pk, order, 1)
        ids[places] = np.take_along_axis(teacher_cache.unpack_ids(packed), order, 1)
        lines.append(
            {
                "input_ids": row.input_ids.tolist(),
                "compressed_logprobs": every.view(np.uint8).reshape(length, -1).tolist(),
                "bytepacked_indices": pack_bits(ids, compression.bits).tolist(),
            }
        )
    folder.mkdir(parents=True)
    coded = pyarrow.list_(pyarrow.list_(pyarrow.uint8()))
    schema = pyarrow.schema(
        {"input_ids": pyarrow.list_(pyarrow.uint64()), "compressed_logprobs": coded, "bytepacked_indices": coded}
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines, schema=schema), folder / "data_0.parquet")
    (folder / CONFIG).write_text(dump_yaml(compression.model_dump()), encoding="utf-8")
