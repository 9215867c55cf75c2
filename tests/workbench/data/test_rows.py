"""Files to raw rows: the same rows from every kind of file, and a place and a cure for every broken one."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.data.rows import fingerprint, finite, read_rows
from workbench.errors import DataError

ROWS = [{"question": "Why?", "answer": 'He said "no",\nthen left.'}, {"question": "Où ça ?", "answer": "日本"}]


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), ("-2.5", -2.5), (True, None), ("three", None), (None, None), (float("inf"), None), (10**400, None)],
    ids=lambda value: str(value)[:8],
)
def test_a_finite_number(value: object, number: float | None) -> None:
    """JSON may have whole numbers that are larger than any float."""
    assert finite(value) == number


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def csv_text(rows: list[dict[str, str]], separator: str = ",") -> str:
    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(separator.join(map(cell, line)) + "\r\n" for line in lines)


def parquet_bytes(rows: Sequence[Mapping[str, object]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


CONTENTS: dict[str, str | bytes] = {
    "rows.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
    "rows.json": json.dumps(ROWS, indent=2),
    "lines.json": "".join(json.dumps(row) + "\n" for row in ROWS),
    "array.jsonl": json.dumps(ROWS, indent=2),
    "object.json": json.dumps({"version": 1, "data": ROWS}),
    "rows.csv": csv_text(ROWS),
    "rows.parquet": parquet_bytes(ROWS),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, bom: bytes) -> None:
    content = CONTENTS[name]
    source = write(tmp_path, name, bom + content.encode() if isinstance(content, str) else content)
    rows = list(read_rows(source))
    assert [row.columns for row in rows] == ROWS
    assert [row.place.split(" (")[0] for row in rows] == [f"{name}, row 1", f"{name}, row 2"]


def test_upper_case_suffix_and_crlf(tmp_path: Path) -> None:
    source = write(tmp_path, "A.JSONL", '{"text": "a"}\r\n\r\n{"text": "b"}')
    assert [(row.place, row.columns) for row in read_rows(source)] == [
        ("A.JSONL, row 1", {"text": "a"}),
        ("A.JSONL, row 2 (line 3)", {"text": "b"}),
    ]


def test_csv_place_names_the_line_where_a_row_of_several_lines_starts(tmp_path: Path) -> None:
    assert [row.place for row in read_rows(write(tmp_path, "a.csv", csv_text(ROWS)))] == [
        "a.csv, row 1 (line 2)",
        "a.csv, row 2 (line 4)",
    ]


def test_csv_cell_longer_than_the_csv_modules_default_limit(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path, "a.csv", "text\n" + "x" * 200_000 + "\n"))
    assert len(row.columns["text"]) == 200_000


def test_txt_gives_a_row_for_each_line_that_is_not_blank(tmp_path: Path) -> None:
    source = write(tmp_path, "a.txt", "one\n\n  two\u2028still two \r\n \nthree")
    assert [row.columns["text"] for row in read_rows(source)] == ["one", "  two\u2028still two ", "three"]


def test_parquet_drops_the_keys_that_only_other_rows_have(tmp_path: Path) -> None:
    calls = [{"arguments": {"city": "Rome"}}, {"arguments": {"sum": 2}}]
    source = write(tmp_path, "a.parquet", parquet_bytes([{"calls": [call]} for call in calls]))
    assert [row.columns["calls"] for row in read_rows(source)] == [[call] for call in calls]


def test_parquet_of_datasets_has_the_names_of_classes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, None]}, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    rows = [row.columns for row in read_rows(str(tmp_path / "a.parquet"))]
    assert rows == [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}, {"text": "c"}]


@pytest.mark.parametrize("metadata", ["", "1", "{}", '{"info": {"features": [1]}}', '{"info": {"features": {"n": 1}}}'])
def test_other_metadata_of_parquet_does_no_harm(tmp_path: Path, metadata: str) -> None:
    table = pyarrow.table({"n": [1]}).replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.columns for row in read_rows(str(tmp_path / "a.parquet"))] == [{"n": 1}]


def test_parquet_parses_columns_that_hold_json(tmp_path: Path) -> None:
    messages = [{"content": "a", "calls": [{"x": None}]}, {"content": ["b"]}]
    texts = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array([json.dumps(m) for m in messages]))
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2], texts)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.columns["messages"] for row in read_rows(str(tmp_path / "a.parquet"))] == [messages]


def test_folder_reads_files_in_order_and_passes_over_notes(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path, name, json.dumps({"text": name}))
    for name in ("README.md", "LICENSE", ".hidden.jsonl", "deeper/c.jsonl"):
        write(tmp_path, name, "no json")
    assert [row.place for row in read_rows(str(tmp_path))] == ["a.jsonl, row 1", "b.jsonl, row 1"]


def test_rows_are_read_only_as_far_as_they_are_asked_for(tmp_path: Path) -> None:
    for name, head in (("a.jsonl", b'{"text": "x"}\n'), ("a.txt", b"x\n"), ("a.csv", b"text\nx\n")):
        rows = read_rows(write(tmp_path, name, head * 2 + b"\xff\n"))
        assert next(rows).columns == {"text": "x"}
        with pytest.raises(DataError, match="not UTF-8"):
            list(rows)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)
reuse = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@reuse
@given(
    rows=st.lists(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values), min_size=1), ascii=st.booleans()
)
def test_json_round_trip(tmp_path: Path, rows: list[dict[str, object]], ascii: bool) -> None:
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii) for row in rows)
    assert [row.columns for row in read_rows(write(tmp_path, "a.jsonl", lines))] == rows
    assert [row.columns for row in read_rows(write(tmp_path, "a.json", json.dumps(rows)))] == rows


@reuse
@given(cells=st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0"))] * 2), min_size=1))
def test_csv_round_trip(tmp_path: Path, cells: list[tuple[str, str]]) -> None:
    rows = [{"a": a, "b": b} for a, b in cells]
    assert [row.columns for row in read_rows(write(tmp_path, "a.csv", csv_text(rows)))] == rows


@reuse
@given(cells=st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\t\r\n"))] * 2), min_size=1))
def test_tsv_round_trip(tmp_path: Path, cells: list[tuple[str, str]]) -> None:
    """A tsv file has no quoting: every line is a row, whatever its cells begin with."""
    content = "".join(f"{a}\t{b}\n" for a, b in [("a", "b"), *cells])
    assert [(r.columns["a"], r.columns["b"]) for r in read_rows(write(tmp_path, "a.tsv", content))] == cells


# lines of text below the header `label<TAB>text`
QUOTES = {
    "opened, closed two rows on": ['ham\t"win a prize', "spam\tsecond", 'ham\tthird"'],
    "opened, never closed": ['ham\t"win', "spam\tx"],
    "inch": ['ham\t21" screen', 'spam\t"'],
    "whole cell": ['ham\t"a"', "spam\tb"],
    "doubled": ['ham\t""a"" b', "spam\tb"],
    "apostrophes": ["ham\t'tis", "spam\tthat's"],
    "label": ['"ham\ta', 'spam"\tb'],
}


@pytest.mark.parametrize("lines", QUOTES.values(), ids=QUOTES)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
def test_a_tsv_cell_may_hold_quotation_marks(tmp_path: Path, lines: list[str], end: str) -> None:
    rows = list(read_rows(write(tmp_path, "a.tsv", end.join(["label\ttext", *lines, ""]))))
    assert ["\t".join(row.columns.values()) for row in rows] == lines
    assert [row.place for row in rows] == [f"a.tsv, row {n} (line {n + 1})" for n in range(1, len(lines) + 1)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.txt", "a.json"])
def test_lines_that_end_in_carriage_returns_alone(tmp_path: Path, name: str) -> None:
    rows = [{"text": "One."}, {"text": "Two."}, {"text": "Three."}]
    listed = [json.dumps(row) for row in rows]
    texts = [row["text"] for row in rows]
    lines = {"a.jsonl": listed, "a.txt": texts, "a.json": [f"[{','.join(listed)}]"]}.get(name, ["text", *texts])
    for end in ("\r", ""):
        assert [row.columns for row in read_rows(write(tmp_path, name, "\r".join(lines) + end))] == rows


def zstandard(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", CONTENTS)
def test_compressed_files_give_the_same_rows(tmp_path: Path, name: str, suffix: str) -> None:
    content = CONTENTS[name]
    packed = PACKERS[suffix](content.encode() if isinstance(content, str) else content)
    assert [row.columns for row in read_rows(write(tmp_path, f"{name}{suffix}", packed))] == ROWS
    assert [row.columns for row in read_rows(write(tmp_path, name, packed))] == ROWS  # the content tells, not the name


@pytest.mark.parametrize("suffix", PACKERS)
def test_parts_of_a_compressed_file_one_after_another(tmp_path: Path, suffix: str) -> None:
    """As `cat a.gz b.gz` writes them, or a program that compresses in parallel."""
    packed = b"".join(PACKERS[suffix](f"line {n}\n".encode()) for n in range(3))
    rows = read_rows(write(tmp_path, f"a.txt{suffix}", packed))
    assert [row.columns["text"] for row in rows] == ["line 0", "line 1", "line 2"]


def test_a_file_that_was_unpacked_and_kept_its_name(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl.gz", '{"text": "a"}\n')
    assert [(row.place, row.columns) for row in read_rows(source)] == [("a.jsonl.gz, row 1", {"text": "a"})]


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.tsv", "a.txt"])
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_archive_is_told(tmp_path: Path, suffix: str, name: str, kept: float) -> None:
    packed = PACKERS[suffix]("".join(f'{{"text": "{n * 7919}"}}\n' for n in range(400)).encode())
    source = write(tmp_path, name + suffix, packed[: int(len(packed) * kept)])
    with pytest.raises(DataError, match=rf"{name}{suffix}: damaged, or not all of it is there .* Fetch it again"):
        list(read_rows(source))


@reuse
@given(
    content=st.binary(min_size=1, max_size=200),
    name=st.sampled_from(["a" + Path(n).suffix for n in CONTENTS] + ["a.txt"]),
)
def test_no_bytes_raise_anything_but_a_data_error(tmp_path: Path, content: bytes, name: str) -> None:
    source = write(tmp_path, name, content)
    try:
        rows = list(islice(read_rows(source), 100))
    except DataError as error:
        assert name in str(error)
    else:
        assert all(name in row.place for row in rows)


# name of the file, its content, what is asked for (the file where empty), words of the message
BROKEN: dict[str, tuple[str, str | bytes, str, list[str]]] = {
    "missing": ("train.jsonl", "{}", "trian.jsonl", ["no such file", "Did you mean", "train.jsonl"]),
    "missing, nothing near": ("train.jsonl", "{}", "other.csv", ["neither a file", "Data files in", "train.jsonl"]),
    "missing folder": ("train.jsonl", "{}", "none/train.jsonl", ["no such file", "none does not exist either"]),
    "no hub id": ("data/train.jsonl", "{}", "data/train", ["no such file", "Did you mean `data/train.jsonl`?"]),
    "a sentence": ("train.jsonl", "{}", "my data", ["neither a file or folder nor a hub data set", "owner/name"]),
    "much text": ("train.jsonl", "{}", "x" * 5000, ["neither a file or folder"]),
    "empty": ("a.jsonl", "", "", ["a.jsonl", "empty (0 bytes)"]),
    "empty parquet": ("a.parquet", b"", "", ["a.parquet", "empty (0 bytes)"]),
    "suffix": ("a.xlsx", "x", "", ["a.xlsx", "`.xlsx`", ".jsonl", ".csv", ".parquet"]),
    "no suffix": ("a", "x", "", ["unknown kind of file", ".jsonl"]),
    "empty folder": ("folder/notes.md", "x", "folder", ["folder", "holds no data file", "Subfolders"]),
    "mixed folder": ("folder/a.jsonl", "{}", "folder", ["mixes kinds", "a.jsonl", "b.csv"]),
    "strange folder": ("strange/a.doc.gz", "x", "strange", ["a.doc.gz", "`.doc`", "Move it elsewhere"]),
    "latin1": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "caf\xe9"}\n',
        "",
        ["0xE9 at offset 27 (line 2)", "data.encoding=latin1"],
    ),
    "latin1 json": ("a.json", b'[{"text":\n"caf\xe9"}]', "", ["0xE9", "line 2", "data.encoding=latin1"]),
    "latin1 csv": ("a.csv", b"text\ncaf\xe9\n", "", ["0xE9 at offset 8 (line 2)"]),
    "utf-16": ("a.csv", "text\nx\n".encode("utf-16"), "", ["not UTF-8", "line 1", "data.encoding=utf-16"]),
    "truncated json": ("a.json", '[{"text": "a"},\n{"text": "b', "", ["line 2, column 10", "cut off"]),
    "json typo": ("a.json", '[{"text": "a"},\n{text: "b"}]', "", ["not valid JSON (line 2, column 2"]),
    "json number": ("a.json", "3", "", ["expected a list of objects", "found 3"]),
    "json without list": ("a.json", '{"a": 1}', "", ["expected a list of objects", "found {'a': 1}"]),
    "json with two lists": ("a.json", '{"train": [], "test": []}', "", ["the arrays train, test"]),
    "deep json": ("a.json", "[" * 200_000, "", ["not JSON that can be read"]),
    "header twice": ("a.csv", "text,label, text\na,b,c\n", "", ["the header has the column `text` twice"]),
    "semicolons": ("a.csv", "text;label\na;b\n", "", ["one column, 'text;label'", "wrong separator", "commas"]),
    "tabs in csv": ("a.csv", "text\tlabel\na\tb\n", "", ["wrong separator", "data.format=tsv"]),
    "header quote": ("a.csv", '"text,label\na,b\n', "", ["header, line 1", "never closed"]),
    "no parquet": ("a.parquet", b"text\nx\n", "", ["a.parquet", "not a parquet file"]),
    "cut parquet": ("a.parquet", parquet_bytes(ROWS)[:-20], "", ["a.parquet", "not a parquet file"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, content, asked, words = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, name, content)
    if case == "mixed folder":
        write(tmp_path, "folder/b.csv", "text\nx\n")
    with pytest.raises(DataError) as caught:
        list(read_rows(asked or name))
    for word in words:
        assert word in str(caught.value)


# content, place and words of the mistake of the one row that is broken, number of rows
BROKEN_ROWS = {
    "a.jsonl": ('{"text": "a"}\n\n{"text": "b"\n', "row 2 (line 3)", ["not valid JSON (column 13", "cut off"], 2),
    "b.jsonl": ('{"text": "a"}\n{"text" "b"}\n{"text": "c"}', "row 2", ["not valid JSON (column 9"], 3),
    "c.jsonl": ('{"text": "a"}\n["b"]\n', "row 2", ["must be an object", "['b']"], 2),
    "d.jsonl": ('{"text": "\\ud83d"}\n{"text": "c"}', "row 1", ["surrogate pair"], 2),
    "e.jsonl": ('{"n": ' + "1" * 5000 + "}\n", "row 1", ["not JSON that can be read"], 1),
    "a.json": ('[{"text": "a"}, "b"]', "row 2", ["must be an object", "'b'"], 2),
    "a.csv": ("text,label\na,b\na,b,c\nd,e\n", "row 2 (line 3)", ["3 cells, but the header has 2", "Quote a cell"], 3),
    "b.csv": ("text,label\na\nd,e\n", "row 1 (line 2)", ["1 cells, but the header has 2 (text, label)"], 2),
    "c.csv": ('text,label\na,"b"c\nd,e\n', "row 1 (line 2)", ["not valid CSV"], 2),
    "d.csv": ('text,label\na,b\nc,"d\ne,f\n', "row 2 (line 3)", ["a quote that opens here is never closed"], 2),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_a_broken_row_is_named_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    content, where, words, count = BROKEN_ROWS[name]
    rows = list(read_rows(write(tmp_path, name, content)))
    (broken,) = [row for row in rows if row.mistake]
    assert broken.place == f"{name}, {where}"
    assert len(rows) == count
    for word in words:
        assert word in broken.mistake


def test_fingerprint_is_the_content_and_not_the_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, "x/a.txt", "text\n"), write(tmp_path, "y/b.txt", "text\n")
    assert fingerprint(first) == fingerprint(second) == hashlib.sha256(b"text\n").hexdigest()
    before = fingerprint(str(tmp_path / "x"))
    write(tmp_path, "x/b.txt", "more\n")
    assert fingerprint(str(tmp_path / "x")) != before


def test_fingerprint_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        fingerprint(str(tmp_path / "none" / "a.txt"))
