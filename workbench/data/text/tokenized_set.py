"""Tokenised data sets: rows of tokens in a memory-mapped Arrow file, what is known of them, and several as one."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow

from workbench.data import named_sets
from workbench.data.batching import Collate, Floats, Indices, MicroBatch, Row, WholeRows, collate
from workbench.data.held_out_split import Splits
from workbench.data.text import decontamination
from workbench.data.text.decontamination import Contamination
from workbench.data.text.media import MediaProcessor
from workbench.data.text.quality import cleaning
from workbench.data.text.quality.cleaning import Cleaning
from workbench.errors import DataError


class TokenTable:
    """Rows of one file, or of several end to end.

    Args:
        data: The rows; no batch is copied.
        identity: Names all that the rows were made of.
    """

    def __init__(self, data: pyarrow.Table, identity: str = "") -> None:
        self.data, self.identity = data, identity
        self._batches: list[pyarrow.RecordBatch] = data.to_batches()
        self._starts = list(itertools.accumulate(map(len, self._batches), initial=0))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The rows of a file that bears the hash of what they were made of as its name."""
        return cls(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all(), path.stem)

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> Self:
        """The rows of several tables, in their order."""
        return cls(pyarrow.concat_tables([each.data for each in tables]), "+".join(each.identity for each in tables))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.row(number).to_pylist()[0]
        return row

    def row(self, number: int) -> pyarrow.RecordBatch:
        """One row, as a batch."""
        batch = bisect_right(self._starts, number) - 1
        return self._batches[batch].slice(number - self._starts[batch], 1)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers or truth values without nulls."""
        if not self._batches:
            return values(pyarrow.array([], self.data.schema.field(name).type))
        return np.concatenate([values(batch.column(name)) for batch in self._batches])


def values(array: pyarrow.Array) -> npt.NDArray[Any]:
    """Numbers or truth values of an array without nulls. pyarrow's own `to_numpy` imports pandas, which takes 0.2 s."""
    buffer, stop = array.buffers()[1], array.offset + len(array)
    if not pyarrow.types.is_boolean(array.type):
        kind = np.dtype(array.type.to_pandas_dtype())
        numbers_N: npt.NDArray[Any] = np.ndarray(len(array), kind, buffer=buffer, offset=array.offset * kind.itemsize)
        return numbers_N
    bits = np.ndarray(-(-stop // 8), np.uint8, buffer=buffer)[array.offset // 8 :]
    marks_N: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[array.offset % 8 :].view(np.bool_)
    return marks_N[: len(array)]


_AT_ONCE = 2**16  # places that are read at a time


@dataclass(frozen=True)
class TokenizedSet(WholeRows):
    """A tokenised set of examples, read from disk row by row."""

    table: TokenTable
    rows: Indices
    """Which rows of the table belong to this set."""
    source: str
    fingerprint: str
    skipped: list[str] = field(default_factory=list)
    """Rows that were left out, and why."""
    chat: bool = True
    """Whether rows are conversations, rendered by the chat template, or raw text."""
    collate: Collate = collate
    """How rows are seen."""
    processor: MediaProcessor | None = None
    """Reads the pictures of rows, where they have any."""
    shown: tuple[str, ...] | None = None
    """Pictures of each example that are read instead of its own."""
    contamination: Contamination | None = None
    """Rows that held the text of evaluation rows, where they were looked for."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """The first row of the table that each of several sources has; empty where there is one."""
    prefixes: tuple[str, ...] = ()
    """The beginning of the places of each source's rows; empty where files tell them apart."""
    cleaning: Cleaning | None = None
    """Rows that `data.clean` left out."""
    difficulty: Floats | None = None
    """How hard each example is, where `data.curriculum` asks for it."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.table.row(int(self.rows[index]))
        ids, supervised = (values(row.column(name).flatten()) for name in ("input_ids", "supervised"))
        source, digest, block = (row.column(name)[0].as_py() for name in ("source", "digest", "block"))
        pictures = row.column("pictures")[0].as_py()
        if self.shown is not None:
            pictures = self.shown[index]
            digest += int.from_bytes(pictures[:16].encode(), "little") % 2**63
        return Row(ids.astype(np.int64), supervised, source, (digest + block) % 2**64, pictures)

    def place(self, index: int) -> str:
        row = self.rows[[index]]
        place = str(self.table[int(row[0])]["place"])  # of a column, pyarrow would bring all chunks together
        return self.prefixes[self._source_of(row)[0]] + place if self.prefixes else place

    def places(self) -> Iterator[str]:
        """File and row that each example came from."""
        for start in range(0, len(self.rows), _AT_ONCE):
            rows = self.rows[start : start + _AT_ONCE]
            places: list[str] = self.table.data.column("place").take(pyarrow.array(rows)).to_pylist()
            if self.prefixes:
                numbered = zip(self._source_of(rows), places, strict=True)
                places = [self.prefixes[number] + place for number, place in numbered]
            yield from places

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return replace(self.collate([self[int(index)] for index in indices], epoch=epoch), rows_B=indices)

    def subset(self, keep: Indices | npt.NDArray[np.bool_], note: str | None = None) -> TokenizedSet:
        """The examples that `keep` indexes or marks."""
        return replace(
            self,
            rows=self.rows[keep],
            skipped=[note, *self.skipped] if note else self.skipped,
            difficulty=None if self.difficulty is None else self.difficulty[keep],
            shown=None if self.shown is None else tuple(np.asarray(self.shown, dtype=object)[keep]),
        )

    def with_other_pictures(self) -> TokenizedSet | None:
        """The examples with pictures, each with those of another that take as many tokens; None without any."""
        if not self.pictured or self.processor is None or not len(self.processor.token_ids):
            return None
        groups: dict[bytes, list[tuple[str, int]]] = {}
        for number in range(len(self)):
            row = self[number]
            if row.pictures:
                edges = np.flatnonzero(np.diff(np.isin(row.input_ids, self.processor.token_ids)))
                groups.setdefault(np.diff(edges)[::2].tobytes(), []).append((row.pictures, number))
        found: dict[int, str] = {}
        for group in groups.values():
            group.sort()
            for place, (own, number) in enumerate(group):
                turned = (group[(place + len(group) // 2 + more) % len(group)][0] for more in range(len(group)))
                if (other := next((key for key in turned if key != own), None)) is not None:
                    found[number] = other
        if not found:
            return None
        return replace(self.subset(np.asarray(list(found))), shown=tuple(found.values()))

    @property
    def source_N(self) -> Indices:
        """The source of each example, where there are several."""
        return self._source_of(self.rows)

    def _source_of(self, rows: Indices) -> Indices:
        return np.searchsorted(list(self.sources.values()), rows, side="right") - 1

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Number of examples of each source; empty where there is one."""
        return named_sets.sizes(self)

    @cached_property
    def lengths(self) -> Indices:
        return self._column("length")

    @cached_property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each example."""
        source = self._column("source")
        longer: Indices = np.maximum(source, self.lengths - source)
        return longer

    @cached_property
    def supervised(self) -> Indices:
        """Predicted tokens that carry loss, of each example; the first token of a row has no prediction."""
        return self._column("targets")

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """How often each example counts in the loss."""
        weights: npt.NDArray[np.float64] = self.table.numbers("weight")[self.rows]
        return weights

    @property
    def judged(self) -> bool:
        """Whether rows are answers that are told to be good or bad, better or worse."""
        return bool(self.table[0]["desired"] is not None)

    @cached_property
    def pictured(self) -> bool:
        """Whether any example has pictures."""
        counts_N = self.table.numbers("picture_count")[self.rows]
        return bool(counts_N.any())

    @cached_property
    def ends(self) -> Indices:
        """Supervised end-of-turn tokens of each example."""
        return self._column("ends")

    @cached_property
    def truncated(self) -> int:
        """How many examples were cut to `data.max_tokens`."""
        return int((self._column("whole") > self.lengths).sum())

    def use_in_words(self) -> list[str]:
        """Sentences on long documents, which became blocks, and on what cutting leaves of all tokens."""
        block_N, whole_N = self._column("block"), self._column("whole")
        documents, total, used = (
            int((block_N == 1).sum()),
            int(whole_N.sum()),
            int(np.minimum(whole_N, self.lengths).sum()),
        )
        sentences = []
        if documents:
            sentences.append(f"Long documents: {documents:,}, in {int((block_N > 0).sum()):,} blocks.")
        if documents or used < total:
            share = "all" if used == total else f"{used / total:.1%}"
            sentences.append(f"{used:,} of {total:,} tokens are used ({share}).")
        return sentences

    @cached_property
    def digests(self) -> npt.NDArray[np.uint64]:
        """A hash of each example's tokens: equal for exact duplicates."""
        digests: npt.NDArray[np.uint64] = self.table.numbers("digest")[self.rows]
        return digests

    @property
    def packs(self) -> bool:
        """Whether its rows can be packed, as far as their pictures are concerned."""
        return self.processor is None or self.processor.packs or not self.pictured

    @cached_property
    def pictures(self) -> list[str]:
        """Names the pictures of each example, by their contents; empty where it has none."""
        if not self.pictured:
            return [""] * len(self)
        names: list[str] = self.table.data.column("pictures").take(pyarrow.array(self.rows)).to_pylist()
        return names

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        check_facts = {} if self.contamination is None else {"contamination": self.contamination.facts()}
        check_facts |= {} if self.cleaning is None else {"cleaning": self.cleaning.facts()}
        return {
            **named_sets.shared_facts(self, supervised_tokens=int(self.supervised.sum())),
            "chat": self.chat,
            **({"sources": self.rows_by_source} if self.sources else {}),
            **check_facts,
        }

    def _column(self, name: str) -> Indices:
        column: Indices = self.table.numbers(name)[self.rows].astype(np.int64)
        return column


def join_sets(parts: Mapping[str, TokenizedSet]) -> TokenizedSet:
    """The rows of several sources as one set."""
    sets = list(parts.values())
    prefixes = named_sets.prefixes({name: each.source for name, each in parts.items()})
    starts = list(itertools.accumulate((len(each.table) for each in sets[:-1]), initial=0))
    return replace(
        sets[0],
        table=TokenTable.joined([each.table for each in sets]),
        rows=np.concatenate([start + each.rows for start, each in zip(starts, sets, strict=True)]),
        source=" + ".join(each.source for each in sets),
        fingerprint=hashlib.sha256("".join(each.fingerprint for each in sets).encode()).hexdigest(),
        skipped=[reason for each in sets for reason in each.skipped],
        chat=any(each.chat for each in sets),
        contamination=decontamination.join_contaminations([each.contamination for each in sets], prefixes.values()),
        cleaning=cleaning.join_cleanings([each.cleaning for each in sets], prefixes.values()),
        sources=dict(zip(parts, starts, strict=True)),
        prefixes=tuple(prefixes.values()) if any(prefixes.values()) else (),
    )


def require_teaching(data: Splits[TokenizedSet]) -> None:
    """Raise DataError where training would learn nothing, or nothing would be measured."""
    if int(data.train.supervised.sum()) == 0:
        raise DataError(f"{data.train.source}: no token carries loss. Look at `workbench check`, and at data.loss_on.")
    if int(data.held_out.supervised.sum()) == 0:
        raise DataError(f"{data.held_out.source}: no held-out token carries loss, so nothing would be measured.")


def require_ends(data: Splits[TokenizedSet]) -> None:
    """Raise DataError where a model that writes text would never learn to stop."""
    if int(data.train.ends.sum()) == 0:
        raise DataError(
            f"{data.train.source}: no supervised token ends a turn, so the model would never learn to stop. "
            "Write data.truncate=left or a larger data.max_tokens, so that answers keep their end."
        )
