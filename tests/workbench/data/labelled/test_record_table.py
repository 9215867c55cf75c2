"""Labelled rows and their tokens in little memory."""

from __future__ import annotations

import math
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.data.labelled import record_table
from workbench.data.labelled.record_table import (
    ByteStore,
    EncodedTexts,
    FieldTokens,
    LabelledRecord,
    RawRows,
    RecordTable,
    joined,
    labels_of,
    taken,
)
from workbench.data.rows import RawRow
from workbench.errors import FileError


@pytest.mark.parametrize("most", [record_table.IN_MEMORY, 5], ids=["in memory", "in a file"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=9), max_size=9), st.data())
def test_bytes_come_back(most: int, monkeypatch: pytest.MonkeyPatch, chunks: list[bytes], data: st.DataObject) -> None:
    monkeypatch.setattr(record_table, "IN_MEMORY", most)
    store, whole = ByteStore(iter(chunks)), b"".join(chunks)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert len(store) == len(whole) and store.read(start, stop) == whole[start:stop]
    assert b"".join(store.chunks()) == whole == b"".join(ByteStore(store.chunks()).chunks())


def test_many_bytes_take_no_memory_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record_table, "IN_MEMORY", 2**16)
    tracemalloc.start()
    store = ByteStore(bytes([number % 256]) * 1000 for number in range(4000))
    for number in range(4000):
        assert store.read(1000 * number, 1000 * number + 1) == bytes([number % 256])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**19 < len(store) == 4_000_000
    assert not list((tmp_path / "cache").iterdir())


def test_a_forked_process_reads_beside_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_table, "IN_MEMORY", 2)
    store = ByteStore([b"abc", b"def"])
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, store.read(3, 6))
        os._exit(0)
    assert store.read(0, 3) == b"abc" and os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 9) == b"def"


@pytest.mark.parametrize("made", [lambda path: path.touch(), lambda path: path.symlink_to("/dev/full")])
def test_a_folder_that_cannot_be_written_is_named(
    made: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileError, match=r"cache: cannot be written .*WORKBENCH_CACHE"):
        ByteStore([b"abc"])


ROW = st.builds(
    FieldTokens,
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.asarray(ids, dtype=np.int64)),
    st.booleans(),
)


def shown(rows: Iterable[FieldTokens]) -> list[tuple[str, list[int], bool]]:
    return [(str(each.input_ids.dtype), each.input_ids.tolist(), each.truncated) for each in rows]


@given(st.lists(ROW, max_size=6), st.lists(ROW, max_size=3), st.lists(st.integers(0, 99), max_size=8))
def test_rows_come_back(rows: list[FieldTokens], more: list[FieldTokens], numbers: list[int]) -> None:
    encoded = EncodedTexts.of(iter(rows))
    assert len(encoded) == len(rows) and shown(encoded) == shown(rows)
    assert encoded.length_N.tolist() == [len(each.input_ids) for each in rows]
    chosen = np.asarray([number % len(rows) for number in numbers if rows], dtype=np.int64)
    part = encoded.take(chosen)
    assert shown(part) == shown([rows[row] for row in chosen])
    assert shown(part.concatenated(EncodedTexts.of(more))) == shown([*(rows[row] for row in chosen), *more])


TEXT = st.text(max_size=8)
CELL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
LABEL = st.none() | TEXT | st.floats(allow_nan=False) | st.lists(TEXT, max_size=2).map(tuple)
RECORD = st.builds(
    LabelledRecord,
    st.builds(RawRow, place=TEXT, columns=st.dictionaries(TEXT, CELL, max_size=3)),
    st.lists(TEXT, max_size=2).map(tuple),
    LABEL,
    st.floats(0, 9),
)


def to_the_type(value: Any) -> str:
    """Tells 1 from 1.0 and True, and 0.0 from -0.0, and the order of keys."""
    return repr(value)


@given(st.lists(RECORD, max_size=6), st.lists(RECORD, max_size=3), st.data())
def test_a_table_is_the_sequence_of_its_records(
    records: list[LabelledRecord], more: list[LabelledRecord], data: st.DataObject
) -> None:
    table = RecordTable.of(records)
    assert to_the_type(list(table)) == to_the_type(records) and len(table) == len(records)
    assert to_the_type(labels_of(table)) == to_the_type(labels_of(records))
    assert to_the_type(list(table[1:])) == to_the_type(records[1:])
    assert to_the_type(list(RawRows(table))) == to_the_type([each.row for each in records])
    chosen = np.asarray(data.draw(st.lists(st.integers(0, 5)).map(lambda n: [x % len(records) for x in n if records])))
    part, other = taken(table, chosen.astype(np.int64)), RecordTable.of(more)
    assert to_the_type(list(part)) == to_the_type([records[row] for row in chosen])
    assert to_the_type(list(joined(part, other))) == to_the_type([*part, *more])
    assert [each.key for each in table] == [each.key for each in records]


def test_cells_that_no_table_of_columns_would_keep() -> None:
    columns = {"n": 2**80, "none": None, "day": date(2020, 2, 29), "half": "\ud800", "f": -0.0, "mixed": [1, "1", 1.0]}
    (found,) = RecordTable.of([LabelledRecord(RawRow("rows.jsonl, row 1", columns), ("a",), 0.0)])
    assert to_the_type(found.row.columns) == to_the_type(columns) and math.copysign(1, found.row.columns["f"]) == -1


def test_a_row_takes_little_beyond_its_text() -> None:
    text = "nine words of text stand in each of these rows "

    def records(count: int) -> Iterator[LabelledRecord]:
        for row in range(count):
            words = f"{text}{row}"
            columns = {"a column with a long name": words, "label": f"class {row % 20}"}
            yield LabelledRecord(RawRow(f"rows.csv, row {row}", columns), (words,), columns["label"])

    tracemalloc.start()
    table = RecordTable.of(records(10_000))
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(table) < len(text) + 120 and most / len(table) < 2 * (len(text) + 120)
