"""Records come back out of a table as they went in, to the type, and a table of them is small."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from datetime import date
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.labelled.record_table import LabelledRecord, RawRows, RecordTable, joined, labels_of, taken
from workbench.data.rows import RawRow

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
