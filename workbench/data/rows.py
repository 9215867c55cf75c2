"""Files of rows (jsonl, json, csv, tsv, parquet, txt, CoNLL), read into raw rows that know their file and number."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from workbench.config import DataConfig
from workbench.data import hub_datasets, unread_columns
from workbench.data.hub_datasets import rows_of
from workbench.data.source_files import AS_NAMED, data_files, kind_of, local_path, opened, readable, text_lines
from workbench.errors import DataError
from workbench.runs import files

RowT = TypeVar("RowT")
FileReader = Callable[[Path, DataConfig], Iterator["RawRow"]]

MAX_MISTAKES = 5  # malformed rows that a message shows; reading stops there


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row of a file, before its columns are interpreted."""

    place: str  # file, row number and, where it differs, line number; all count from 1
    columns: dict[str, Any] = field(default_factory=dict)
    mistake: str = ""  # why the row is malformed; empty where it is not


def read_rows(
    source: str, config: DataConfig = AS_NAMED, *, readers: Mapping[str, FileReader] | None = None
) -> Iterator[RawRow]:
    """Yield the rows of a file, of a folder of files in the order of their names, or of a hub data set.

    Only json files are held in memory as a whole. A malformed row is yielded with its mistake. Raises DataError: a file
    is missing, empty, of an unknown kind, not UTF-8 or broken as a whole.

    Args:
        source: Of these.
        config: How files are read: its format, header, encoding, labels and label_names are used.
        readers: What reads files of some kinds, such as `txt`, in place of their usual reader.
    """
    rows = _file_rows(source, config, {**_READERS, **(readers or {})})
    if (labels := config.label_files.get(source)) is not None:
        rows = _labelled(rows, labels, config)
    if names := _label_names(config):
        rows = (_named(row, names, config) for row in rows)
    yield from rows


def _file_rows(source: str, config: DataConfig, readers: Mapping[str, FileReader]) -> Iterator[RawRow]:
    paths = data_files(source, config)
    if paths is None:
        for number, columns in enumerate(hub_datasets.read(source), start=1):
            yield RawRow(place(source, number), columns)
        return
    for path in paths:
        with readable(path):
            if path.stat().st_size == 0:
                raise DataError(f"{path}: the file is empty (0 bytes). Write it again, or name another one.")
            yield from readers[str(kind_of(path, config))](path, config)


def fingerprint(source: str, config: DataConfig = AS_NAMED) -> str:
    """Identify the content: SHA-256 of a file, SHA-256 over those of a folder's files, id@commit of a hub data set. The
    files of labels and of their names that `config` gives count too."""
    paths = data_files(source, config)
    if paths is None:
        return hub_datasets.fingerprint(source)
    names = config.label_names if isinstance(config.label_names, str) else None
    beside = [local_path(each) for each in (config.label_files.get(source), names) if each is not None]
    digests = []
    for path in (*paths, *beside):
        with readable(path):
            digests.append(files.digest(path))
    if not local_path(source).is_dir() and not beside:
        return digests[0]
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def convert_rows(
    source: str,
    converter: Callable[[RawRow], Callable[[RawRow], RowT | None]],
    config: DataConfig,
    *,
    skipped: list[str],
    limit: int | None = None,
    reader: Callable[[str], Iterator[RawRow]] | None = None,
    reads: Callable[[RawRow], Collection[str]] | None = None,
) -> Iterator[RowT]:
    """Yield the rows of `source`, converted; malformed ones are refused together, or skipped. Raises DataError: the
    source cannot be read, no row is left, or rows are malformed and `config.on_bad_row` is refuse: the message shows up
    to MAX_MISTAKES of them.

    Args:
        source: A path or a hub data set, as `read_rows` takes it.
        converter: Called with the first row that is not malformed; returns the function that converts each row. That
            one raises DataError for a malformed row, and returns None for one that is left out.
        config: How files are read, and whether malformed rows end the reading, rather than being skipped.
        skipped: Place and reason of every skipped row are appended.
        limit: Rows to read; None for all.
        reader: Yields the raw rows of `source` in place of `read_rows`.
        reads: From the first row to the columns, by their names in the file, that are read; others are noted, or
            refused where other tools give them a meaning. None: all are.
    """
    known: Collection[str] = ()
    unread = dict[str, None]()
    convert: Callable[[RawRow], RowT | None] | None = None
    mistakes: list[str] = []
    rows_read = converted = 0
    refuse = config.on_bad_row == "refuse"
    for row in itertools.islice(read_rows(source, config) if reader is None else reader(source), limit):
        rows_read += 1
        if config.ignore:
            row = replace(row, columns=unread_columns.without(row.columns, config.ignore))
        if convert is None and not row.mistake:
            try:
                convert = converter(row)
                known = reads(row) if reads is not None else ()
            except DataError:
                if reader is None:
                    _require_named_columns(source, config)
                raise
        try:
            if convert is None or row.mistake:
                raise DataError(row.mistake)
            if reads is not None:
                unread.update(dict.fromkeys(unread_columns.left(row.columns, known)))
            result = convert(row)
        except DataError as error:
            (mistakes if refuse else skipped).append(f"{row.place}: {error}")
            if len(mistakes) == MAX_MISTAKES:
                break
            continue
        if result is not None and not mistakes:
            converted += 1
            yield result
    if mistakes:
        count = "1 malformed row" if len(mistakes) == 1 else f"{len(mistakes)} malformed rows"
        more = ", where reading stopped" if len(mistakes) == MAX_MISTAKES else ""
        lines = [f"{source} has {count} among the first {rows_read}{more}:", *(f"  {mistake}" for mistake in mistakes)]
        remedy = "Correct them, or write data.on_bad_row=skip to leave them out and count them."
        raise DataError("\n".join([*lines, remedy]))
    if not rows_read:
        raise DataError(f"{source}: holds no rows. Write it again, or name another one.")
    if not converted:
        raise DataError(f"{source}: none of its {rows_read} rows can be used. The last one: {skipped[-1]}")
    unread_columns.note(source, unread)


def excerpt(value: Any) -> str:
    """`value` as it is written in a file, cut to 60 characters, for messages."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def finite(value: Any) -> float | None:
    """`value` as a number; None where it is none, or not a finite one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def place(name: str, row: int, line: int | None = None) -> str:
    """File, row and, where it is known and differs, line number."""
    return f"{name}, row {row}" if line in (None, row) else f"{name}, row {row} (line {line})"


def _read_jsonl(path: Path, config: DataConfig) -> Iterator[RawRow]:
    row = 0
    for line, text in enumerate(text_lines(path, config.encoding), start=1):
        if not text.strip():
            continue
        row += 1
        if row == 1 and text.lstrip().startswith("["):
            yield from _read_json(path, config)  # one array, whatever its name says
            return
        location = place(path.name, row, line)
        try:
            value = json.loads(text.rstrip())  # with its line end, a mistake would be reported on the next line
        except (ValueError, RecursionError) as error:
            yield RawRow(location, mistake=_json_mistake(error, text))
        else:
            yield _object_row(location, value, escapes="\\u" in text)


def _read_json(path: Path, config: DataConfig) -> Iterator[RawRow]:
    text = "".join(text_lines(path, config.encoding))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(path, config)  # an object per line, whatever its name says
            return
        raise DataError(f"{path}: {_json_mistake(error, text)}") from None
    arrays = {"": value} if isinstance(value, list) else {}
    if isinstance(value, dict):
        arrays = {name: item for name, item in value.items() if isinstance(item, list)}
    if len(arrays) != 1:
        found = f"an object with the arrays {', '.join(arrays)}" if arrays else excerpt(value)
        raise DataError(f"{path}: expected a list of objects, or an object that holds one such list, found {found}.")
    for number, item in enumerate(next(iter(arrays.values())), start=1):
        yield _object_row(place(path.name, number), item)


def _object_row(location: str, value: Any, *, escapes: bool = True) -> RawRow:
    if not isinstance(value, dict):
        return RawRow(location, mistake=f"a row must be an object such as {{...}}, found {excerpt(value)}.")
    if not escapes:  # half of a surrogate pair is not UTF-8: only an escape can write it
        return RawRow(location, value)
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return RawRow(
            location, mistake="holds half of a surrogate pair (\\ud800 to \\udfff): a character was cut in two."
        )
    return RawRow(location, value)


def _json_mistake(error: Exception, text: str) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON that can be read: {error}."
    position = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
    incomplete = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    hint = " The end is missing: is the file cut off?" if incomplete else ""
    return f"not valid JSON ({position}: {error.msg}).{hint}"


def read_table(path: Path, config: DataConfig) -> Iterator[RawRow]:
    """Yield the rows of a csv or tsv file, whose first line is the header unless `config.header` is false."""
    kind, header, row = str(kind_of(path, config)), list[str](), 0
    for line, cells, mistake in _CELLS[kind](path, config):
        if not header:
            if mistake:
                raise DataError(f"{path}: header, line {line}: {mistake}")
            header = [str(number) for number in range(1, len(cells) + 1)]
            if config.header is not False:
                header = [cell.strip() for cell in cells]
                _require_header(path, header)
                continue
        if not mistake and len(cells) != len(header):
            what = f"the header has {len(header)} ({', '.join(header)})"
            mistake = (
                f"{len(cells)} cells, but {what if config.header is not False else f'the first row {len(header)}'}. "
            )
            mistake += _REMEDIES[kind]
        row += 1
        yield RawRow(place(path.name, row, line), {} if mistake else dict(zip(header, cells, strict=True)), mistake)


def _require_header(path: Path, header: Sequence[str]) -> None:
    """Raise DataError where the first line of a table cannot be its header."""
    duplicates = [name for index, name in enumerate(header) if name and name in header[:index]]
    if duplicates:
        raise DataError(
            f"{path}: the header has the column `{duplicates[0]}` twice. Rename one of them, or write "
            "data.header=false where the first line is a row."
        )
    separators = [sign for sign in ";\t,|" if sign in header[0]]
    if len(header) == 1 and separators:
        remedy = "Write data.format=tsv." if separators[0] == "\t" else "Write it with commas."
        raise DataError(f"{path}: the header is one column, {excerpt(header[0])}: wrong separator? {remedy}")


_REMEDIES = {
    "csv": "Quote a cell that holds the separator or a line break.",
    "tsv": "A tsv file has no quotes: write a tab or a line break in a cell as a space.",
}


def _require_named_columns(source: str, config: DataConfig) -> None:
    """Raise DataError where the first line of a csv or tsv file looks like a row, not like names of columns."""
    paths = data_files(source, config)
    kind = None if paths is None else kind_of(paths[0], config)
    if config.header is not None or not paths or kind not in _CELLS:
        return
    first, *others = itertools.islice((cells for _, cells, _ in _CELLS[kind](paths[0], config) if cells), 50)
    columns = list(zip(*(cells for cells in others if len(cells) == len(first)), strict=True)) or [()] * len(first)
    if not any(
        finite(cell) is not None or len(cell.split()) > 4 or cell in column
        for cell, column in zip(first, columns, strict=True)
    ):
        return
    text = max(range(len(first)), key=lambda at: len(first[at]) + sum(map(len, columns[at])))
    labels = sorted({*range(len(first))} - {text}, key=lambda at: len({first[at], *columns[at]}))
    wanted = ", ".join([*(f"label: {at + 1}" for at in labels[:1]), f"text: {text + 1}"])
    raise DataError(
        f"{source}: its first line looks like a row, not like names of columns: {', '.join(map(excerpt, first[:8]))}. "
        f"Write data.header=false data.columns='{{{wanted}}}', or data.header=true where it does name them."
    ) from None


def _tsv_cells(path: Path, config: DataConfig) -> Iterator[tuple[int, list[str], str]]:
    """Line number and cells of each line that is not empty; a quotation mark is a character like any other."""
    for line, text in enumerate(text_lines(path, config.encoding), start=1):
        if text := text.rstrip("\r\n"):
            yield line, text.split("\t"), ""


def _csv_cells(path: Path, config: DataConfig) -> Iterator[tuple[int, list[str], str]]:
    """Line number, cells and mistake of each row that is not empty; a cell in quotes may hold commas and line ends."""
    csv.field_size_limit(sys.maxsize)  # the default refuses cells above 128 kB
    reader = csv.reader(text_lines(path, config.encoding), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            if cells := next(reader):
                yield line, cells, ""
        except StopIteration:
            return
        except csv.Error as error:
            mistake = f"not valid CSV: {error}."
            if "unexpected end of data" in str(error):
                mistake = 'a quote that opens here is never closed. Close it; a quote inside a cell is written "".'
            yield line, [], mistake


_CELLS = {"csv": _csv_cells, "tsv": _tsv_cells}


def _read_parquet(path: Path, config: DataConfig) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with (
            opened(path) as content,
            pyarrow.parquet.ParquetFile(content if content.seekable() else io.BytesIO(content.read())) as file,
        ):
            rows = (columns for batch in file.iter_batches(batch_size=1024) for columns in rows_of(batch))
            for number, columns in enumerate(rows, start=1):
                yield RawRow(place(path.name, number), columns)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path}: not a parquet file that can be read: {str(error).splitlines()[0]}. Write it again."
        ) from None


def _read_arrow(path: Path, config: DataConfig) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file: a stream, as `datasets` writes, or one with a footer."""
    import pyarrow

    try:
        with opened(path) as content:
            footed = content.read(6) == b"ARROW1"
            content.seek(0)
            if footed:
                file = pyarrow.ipc.open_file(content)
                batches: Iterator[Any] = map(file.get_batch, range(file.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(content))
            for number, columns in enumerate((columns for batch in batches for columns in rows_of(batch)), start=1):
                yield RawRow(place(path.name, number), columns)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{path}: not an Arrow file that can be read: {why}. Write it again.") from None


def _read_txt(path: Path, config: DataConfig) -> Iterator[RawRow]:
    row = 0
    for line, text in enumerate(text_lines(path, config.encoding), start=1):
        if text.strip() or config.label_files:  # a file of labels has a line for each of these
            row += 1
            yield RawRow(place(path.name, row, line), {"text": text.rstrip("\r\n")})


def _read_label_first(path: Path, config: DataConfig) -> Iterator[RawRow]:
    """Yield the rows of lines such as `DESC:manner How did it end ?` or, as fastText has them, `__label__spam Hi`."""
    row = 0
    for line, text in enumerate(text_lines(path, config.encoding), start=1):
        if not text.strip():
            continue
        row += 1
        found = _LABEL_FIRST.fullmatch(text.strip())
        where = place(path.name, row, line)
        if found is None:
            yield RawRow(
                where, mistake=f"holds no label and text with white space between them, only {excerpt(text.strip())}."
            )
            continue
        labels = [label.removeprefix("__label__") for label in found["labels"].split()]
        yield RawRow(where, {"label": labels[0] if len(labels) == 1 else labels, "text": found["text"]})


_LABEL_FIRST = re.compile(r"(?P<labels>(__label__\S+)(\s+__label__\S+)*|\S+)\s+(?P<text>\S.*)", re.DOTALL)


def _labelled(rows: Iterator[RawRow], labels: str, config: DataConfig) -> Iterator[RawRow]:
    """Yield rows with the labels that stand beside them in the lines of another file."""
    with readable(path := local_path(labels)):
        listed = [line.strip() for line in text_lines(path, config.encoding)]
    while listed and not listed[-1]:
        del listed[-1]
    number = 0
    for number, row in enumerate(rows, start=1):
        if number <= len(listed):
            columns = {**row.columns, config.columns.get("label", "label"): listed[number - 1] or None}
            yield replace(row, columns=row.columns if row.mistake else columns)
        elif str(row.columns.get("text", row.mistake) or "").strip():
            raise DataError(
                f"{row.place}: {labels} has no label for it, only {len(listed)} lines. Write a label for each row."
            )
    if number < len(listed):
        raise DataError(
            f"{labels}: has {len(listed)} labels for {number} rows. Write a label for each row, and no more."
        )


def _label_names(config: DataConfig) -> Mapping[str, str]:
    """The name of each label, as `data.label_names`, or the file that it names, says."""
    if isinstance(config.label_names, dict):
        return config.label_names
    path = local_path(config.label_names)
    with readable(path):
        lines = [line.strip() for line in text_lines(path, config.encoding) if line.strip()]
    if kind_of(path) == "json":
        try:
            value = json.loads(" ".join(lines))
            pairs = [(str(a), str(b)) for a, b in (value.items() if isinstance(value, dict) else enumerate(value))]
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: expected an object of labels and names, or a list of names ({error}).") from None
    else:
        found = [each for each in map(_LABEL_NAME.fullmatch, lines) if each is not None]
        pairs = [(each[1] or each[4], each[2] or each[5]) for each in found]
        if len(found) < len(lines):
            pairs = [(str(number), line) for number, line in enumerate(lines)]
    if all(finite(name) is not None and finite(label) is None for label, name in pairs):
        pairs = [(label, name) for name, label in pairs]  # {name: number}, as label2id has them
    return dict(pairs)


# A label, a tab and its name, and what else stands behind a tab; or a number and a name.
_LABEL_NAME = re.compile(r"([^\t]*\S)\s*\t\s*([^\t]*\S)\s*(\t.*)?|(-?\d+)\s*[,:= ]\s*(.+)")


def _named(row: RawRow, names: Mapping[str, str], config: DataConfig) -> RawRow:
    """The row with the names of its labels, which stay as they are where they are names already."""
    column = config.columns.get("label", "label")
    if (value := row.columns.get(column)) is None:
        return row
    given = value if isinstance(value, list) else [value]
    keys = [str(int(each)) if isinstance(each, float) and each.is_integer() else str(each).strip() for each in given]
    if unknown := [key for key in keys if key not in names and key not in names.values()]:
        known = excerpt(", ".join(names))
        mistake = f"`{column}` is {excerpt(unknown[0])}, and data.label_names names {known} only. Name it there too."
        return replace(row, mistake=mistake)
    found = [names.get(key, key) for key in keys]
    return replace(row, columns={**row.columns, column: found if isinstance(value, list) else found[0]})


UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""Names of the ten columns of CoNLL-U (Universal Dependencies)."""
_PREFIXED_TAG = re.compile(r"O|[BIMLEUS]-.+")


def read_columns(path: Path, config: DataConfig) -> Iterator[RawRow]:
    """Yield the sentences of a CoNLL file: a word per line, with its columns, and an empty line after each sentence.

    Columns stand between tabs or, in a file without tabs, between spaces. Lines of `-DOCSTART-` and comments are
    skipped; so are the ranges of words (`3-4`) and the empty nodes (`5.1`) of CoNLL-U.

    Yields:
        A row per sentence. Its columns are lists with an item per word, under their numbers (`1` is the first) and in
        CoNLL-U under their names too; `lines` has the line of each word, and `text` what a comment `# text =` holds.
    """
    first = next(
        (
            line
            for line in text_lines(path, config.encoding)
            if line.strip() and not line.startswith(("#", "-DOCSTART-"))
        ),
        "",
    )
    first = first or next(
        (line for line in text_lines(path, config.encoding) if line.startswith("#") and "\t" in line), ""
    )
    tabs = "\t" in first
    width = len(_cells(first, tabs))
    universal = tabs and width == len(UNIVERSAL) and re.fullmatch(r"\d+([-.]\d+)?", first.split("\t")[0]) is not None
    row, words, lines, text, mistake = 0, list[list[str]](), list[int](), "", ""
    for number, line in enumerate(itertools.chain(text_lines(path, config.encoding), [""]), start=1):
        cells = _cells(line, tabs)
        if not any(cells) or cells[0] == "-DOCSTART-":
            if lines:
                row += 1
                columns: dict[str, Any] = {
                    str(at): list(each) for at, each in enumerate(zip(*words, strict=False), start=1)
                }
                if universal:
                    columns |= dict(zip(UNIVERSAL, columns.values(), strict=False))
                columns |= {"lines": lines} | ({"text": text} if text else {})
                yield RawRow(place(path.name, row, lines[0]), {} if mistake else columns, mistake)
            words, lines, text, mistake = [], [], "", ""
        elif not lines and _is_comment(line, tabs, universal):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
        elif not (universal and re.fullmatch(r"\d+[-.]\d+", cells[0])):
            words.append(cells)
            lines.append(number)
            if len(cells) != width:
                mistake = mistake or (
                    f"line {number} has {len(cells)} columns, the first word of the file has {width}. Write {width} "
                    f"for every word, with {'a tab' if tabs else 'a space'} between them."
                )
            elif not cells[1 if universal else 0]:
                mistake = mistake or f"line {number} has no word, only {excerpt(line.strip())}. Write or delete it."


def _cells(line: str, tabs: bool) -> list[str]:
    # A word may hold other white space, such as a no-break space: only spaces and tabs separate.
    line = line.rstrip(" \t\r\n")
    return line.split("\t") if tabs else re.split(r"[ \t]+", line.lstrip(" \t"))


def _is_comment(line: str, tabs: bool, universal: bool) -> bool:
    """Whether a line before a sentence is a comment, rather than a first word that begins with `#`."""
    if not line.startswith("#") or universal or tabs:
        return line.startswith("#") and (universal or "\t" not in line)
    cells = line.split()
    return line.startswith("# ") and len(cells) > 2 and _PREFIXED_TAG.fullmatch(cells[-1]) is None


_READERS: dict[str, FileReader] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": read_table,
    "tsv": read_table,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "txt": _read_txt,
    "label_first": _read_label_first,
    "conll": read_columns,
}


def number_of(value: Any, name: str) -> float:
    """The finite number `value`, found in the column `name`; raises DataError for anything else."""
    if (parsed := finite(value)) is None:
        raise DataError(f"`{name}` must be a finite number, found {excerpt(value)}.")
    return parsed


def string_of(columns: Mapping[str, Any], name: str, remedy: str = "write it in quotes") -> str:
    """The text in the column `name`; raises DataError, with `remedy`, where there is none but white space."""
    value = columns.get(name)
    if value is None:
        raise DataError(f"`{name}` is missing or null.")
    if not isinstance(value, str):
        raise DataError(f"`{name}` must be a string, found {excerpt(value)}: {remedy}.")
    if not value.strip():
        raise DataError(f"`{name}` is empty.")
    return value


def optional_string(columns: Mapping[str, Any], name: str) -> str:
    """The text in the column `name`, empty where it is missing, null or white space."""
    value = columns.get(name)
    return "" if value is None or (isinstance(value, str) and not value.strip()) else string_of(columns, name)
