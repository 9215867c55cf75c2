"""Tables of tokens, and refusals of data that teach nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.held_out_split import Splits
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable, require_ends, require_teaching, values
from workbench.errors import DataError

LISTS = st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=30)


@settings(deadline=None)  # the first array imports pandas
@given(st.lists(st.booleans(), max_size=70), st.data())
def test_values_of_a_part_are_those_of_the_list(marks: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(marks)))
    stop = data.draw(st.integers(start, len(marks)))
    assert values(pyarrow.array(marks, pyarrow.bool_())[start:stop]).tolist() == marks[start:stop]
    for kind in (pyarrow.int32(), pyarrow.uint64(), pyarrow.float64()):
        found = values(pyarrow.array(map(int, marks), kind)[start:stop])
        assert found.dtype == kind.to_pandas_dtype() and found.tolist() == marks[start:stop]


@given(LISTS, st.integers(1, 7), st.integers(1, 3))
def test_rows_and_columns_are_as_written_in_any_batches_of_any_files(
    marks: list[list[bool]], batch: int, files: int
) -> None:
    columns = {"supervised": marks, "length": [len(each) for each in marks]}
    schema = pyarrow.schema({"supervised": pyarrow.list_(pyarrow.bool_()), "length": pyarrow.int32()})
    batches = pyarrow.table(columns, schema=schema).to_batches(max_chunksize=batch)
    empty = batches[0].slice(0, 0)
    part = TokenTable(pyarrow.Table.from_batches([empty, *batches, empty]), "a")
    table = TokenTable.joined([part] * files)
    assert len(table) == files * len(marks) and table.identity == "+".join("a" * files)
    assert [table[number] for number in range(len(table))] == table.data.to_pylist() == files * part.data.to_pylist()
    assert [values(table.row(number).column(0).flatten()).tolist() for number in range(len(table))] == files * marks
    assert table.numbers("length").tolist() == files * columns["length"]


def test_a_file_is_mapped_and_named_by_what_it_was_made_of(tmp_path: Path) -> None:
    written = pyarrow.table({"digest": np.arange(5, dtype=np.uint64)})
    with pyarrow.ipc.new_stream(str(tmp_path / "abc.arrow"), written.schema) as writer:
        writer.write_table(written, max_chunksize=2)
    before = pyarrow.total_allocated_bytes()
    table = TokenTable.from_file(tmp_path / "abc.arrow")
    assert table.identity == "abc" and table.data.equals(written)
    assert pyarrow.total_allocated_bytes() == before, "values stay in the file"


def _tokens(source: str, targets: list[int], ends: list[int]) -> TokenizedSet:
    table = TokenTable(pyarrow.table({"targets": targets, "ends": ends}))
    return TokenizedSet(table, np.arange(len(targets)), source, "0" * 64)


GOOD = _tokens("good.jsonl", [5, 0], [1, 0])


def test_one_row_that_teaches_is_enough() -> None:
    require_teaching(Splits(GOOD, GOOD, None))
    require_ends(Splits(GOOD, GOOD, None))


@pytest.mark.parametrize(
    ("train", "held_out", "expected"),
    [
        (([0, 0], [0, 0]), None, "bad.jsonl: no token carries loss. Look at `workbench check`"),
        (([5, 3], [0, 0]), None, "bad.jsonl: no supervised token ends a turn"),
        (None, ([0], [0]), "bad.jsonl: no held-out token carries loss"),
    ],
)
def test_what_teaches_nothing_is_refused_by_name(
    train: tuple[list[int], list[int]] | None, held_out: tuple[list[int], list[int]] | None, expected: str
) -> None:
    splits = [_tokens("bad.jsonl", *columns) if columns else GOOD for columns in (train, held_out)]
    with pytest.raises(DataError) as caught:
        require_teaching(Splits(splits[0], splits[1], None))
        require_ends(Splits(splits[0], splits[1], None))
    assert str(caught.value).startswith(expected)
