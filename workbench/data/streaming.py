"""Some rows of a data set that is larger than the disk, through `datasets`' streaming, kept as files.

They are written in parts of a fixed number of rows, beside the position in the stream after the last one: a reading
that was killed, also in the middle of a shard, goes on there and ends with the same bytes. One part is in memory.
No buffer shuffles them: the run permutes all rows that it has.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.data import hub_datasets
from workbench.data.hub_datasets import rows_of
from workbench.data.source_files import data_files, kind_of
from workbench.errors import DataError
from workbench.runs import files
from workbench.runs.files import cache_folder

OPEN = 8  # shards that are read in turn: data sets are often sorted, and a run then sees more than their beginning


@dataclass
class OpenShard:
    """A shard that is being read."""

    number: int
    dataset: Any  # an IterableDataset of Arrow tables
    tables: Iterator[Any]

    @classmethod
    def begun(cls, dataset: Any, number: int, state: dict[str, Any] | None, *, rows: int) -> OpenShard:
        """A shard of a data set, from a state on; from its beginning where there is none."""
        shard = dataset.shard(num_shards=dataset.num_shards, index=number)
        if state is not None:
            shard.load_state_dict(state)
        return cls(number, shard, shard.iter(batch_size=rows))


@dataclass
class ShardTurns:
    """Reads a table from each of OPEN shards in turn; when one ends, the next in a seeded order takes its place.

    The shuffling of `datasets` has a buffer, whose rows are lost where another reading goes on.

    Args:
        dataset: An IterableDataset of Arrow tables.
        rows: Of a table.
        position: Where another reading stood; None: the beginning.
    """

    dataset: Any
    rows: int
    seed: int
    position: dict[str, Any] | None = None
    _open: list[OpenShard] = field(default_factory=list, init=False)
    _begun: int = field(default=0, init=False)  # shards that were opened so far
    _turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.position is None:
            return
        self._begun, self._turn = self.position["begun"], self.position["turn"]
        for number, state in self.position["open"]:
            self._open.append(OpenShard.begun(self.dataset, number, state, rows=self.rows))

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([self.seed, 15]).permutation(self.dataset.num_shards).tolist()
        while True:
            while len(self._open) < OPEN and self._begun < len(order):
                self._open.append(OpenShard.begun(self.dataset, order[self._begun], None, rows=self.rows))
                self._begun += 1
            if not self._open:
                return
            self._turn %= len(self._open)
            table = next(self._open[self._turn].tables, None)
            if table is None:
                del self._open[self._turn]
            else:
                self._turn += 1
                yield table

    def state(self) -> dict[str, Any]:
        """The position after the last table, as JSON."""
        states = [(each.number, each.dataset.state_dict()) for each in self._open]
        return {"begun": self._begun, "turn": self._turn, "open": states}


PART = 1000  # rows of the stream that are read at a time, and most rows of a part
AWAY = 50  # readings after which a part is written, however few rows are taken: so much is read again after a kill
LINES = {"jsonl", "txt"}  # kinds of files that hold a row per line


@dataclass(frozen=True)
class RowStream:
    """The first rows of a stream, and how they are chosen."""

    source: str  # a jsonl, parquet or txt file, a folder of them, or a hub data set
    count: int  # rows that are taken; fewer where it has no more
    share: float  # share of the rows on the way that are taken
    seed: int


@dataclass
class Position:
    """How far a stream was read."""

    parts: int = 0
    taken: int = 0
    readings: int = 0
    done: bool = False
    stream: dict[str, Any] | None = None  # where the shards stand, as ShardTurns has it; None at the beginning


def take(stream: RowStream, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the rows that a stream gives, which has them all already, or some, or none. Raises DataError: the
    source is none that can be streamed, cannot be read, or gives no row."""
    import datasets

    paths, suffix = data_files(stream.source), ".jsonl"
    if paths is None:
        identity: Any = hub_datasets.fingerprint(stream.source)
    else:
        kind = kind_of(paths[0])
        if kind not in {*LINES, "parquet"}:
            raise DataError(
                f"{stream.source}: data.streaming reads jsonl, parquet and txt files and hub data sets, not "
                f"{paths[0].name}. Leave data.streaming out; data.limit reads the first rows."
            )
        suffix = f".{kind}" if kind in LINES else suffix
        # To read a file that is larger than memory for its digest would take longer than its first rows.
        identity = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    key = [identity, stream.count, stream.share, stream.seed, PART, AWAY, OPEN, datasets.__version__]
    folder = cache_folder() / "streams" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    files.require_writable(folder / "lock")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # inside the block no other process reads this stream
        path = folder / "position.json"
        position = Position(**files.read_json(path)) if path.exists() else Position()
        files.remove_unfinished(folder / "rows")
        for number, part in enumerate(sorted((folder / "rows").glob("*"))):
            if number >= position.parts:  # written, but not its position
                part.unlink()
        if not position.done:
            say(f"Streaming {stream.count:,} rows of {stream.source}, {position.taken:,} of which are here ...")
            name = f"{Path(stream.source).name.partition(':')[0].partition('.')[0]}-{{:05d}}{suffix}"
            _read_stream(stream, paths, folder / "rows" / name, position)
        os.utime(folder)
    if not position.taken:
        raise DataError(f"{stream.source}: streaming gave no row. Write a larger data.streaming.share, or other rows.")
    return folder / "rows"


def _read_stream(stream: RowStream, paths: list[Path] | None, part: Path, position: Position) -> None:
    """Go on from a position to the end, and write it beside the parts after each of them."""
    with hub_datasets.data_errors(stream.source):
        turns = ShardTurns(hub_datasets.stream(stream.source, paths), PART, stream.seed, position.stream)
    pending, readings = list[str](), 0
    for lines in _lines(turns, stream, paths):
        chosen = np.random.default_rng([stream.seed, 14, position.readings]).random(len(lines)) < stream.share
        position.readings, readings = position.readings + 1, readings + 1
        pending += itertools.compress(lines, chosen.tolist())
        position.done = position.taken + len(pending) >= stream.count
        if position.done or len(pending) >= PART or readings >= AWAY:
            position.stream = turns.state()
            _write(part, pending[: stream.count - position.taken], position)
            pending, readings = [], 0
        if position.done:
            return
    position.done = True
    _write(part, pending, position)


def _write(part: Path, lines: list[str], position: Position) -> None:
    if lines:
        text = "".join(f"{line}\n" for line in lines)
        files.write_bytes(part.with_name(part.name.format(position.parts)), text.encode("utf-8", "surrogatepass"))
        position.parts, position.taken = position.parts + 1, position.taken + len(lines)
    files.write_json(part.parent.parent / "position.json", vars(position))


def _lines(turns: ShardTurns, stream: RowStream, paths: list[Path] | None) -> Iterator[list[str]]:
    """The rows of each reading, as lines of a file; empty lines are none."""
    with hub_datasets.data_errors(stream.source):
        for table in turns:
            if paths is not None and kind_of(paths[0]) in LINES:
                yield [line for line in table.column("text").to_pylist() if line.strip()]
            else:
                yield [json.dumps(row, ensure_ascii=False, default=_plain) for row in rows_of(table)]


def _plain(value: object) -> str | None:
    """A value that JSON does not have: times in words; sounds and pictures, which no format of text reads, as null."""
    return None if isinstance(value, bytes) else str(value)
