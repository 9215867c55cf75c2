"""`predict --like`: predictions in the rows, the order and the columns of a leaderboard's sample submission.

What a column wants is read off the sample: a class's name heads its probability, or 0 and 1 where the sample has only
these; one column wants the label or the number, or of two classes the probability of the second where the sample has
decimals.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from workbench.config import RunConfig
from workbench.data import starter
from workbench.data.images import picture_sources
from workbench.data.rows import RawRow, finite, read_rows
from workbench.data.sound.sound_files import SOUND
from workbench.data.stored_files import StoredFile
from workbench.errors import ConfigError, DataError
from workbench.evaluation import prediction_table
from workbench.recipes.task import PredictionTable
from workbench.runs import files

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5
"""Ids that a message names."""


@dataclass(frozen=True)
class Column:
    """What stands in a column of the submission."""

    says: str
    of_line: Callable[[Any], str]
    """From a line of the table of predictions to the cell."""
    fallback: str
    """Cell of a row that cannot be read."""
    fallback_is: str


def read_sample(path: Path) -> pd.DataFrame:
    """A sample submission, all cells as they are written. Raises DataError: it is no csv file with rows."""
    import pandas as pd  # 0.2 s, which other verbs need not wait for

    if path.suffix.lower() != ".csv" or not path.is_file():
        raise ConfigError(f"--like {path}: expected a csv file that exists, such as sample_submission.csv.")
    try:
        sample = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:
        raise DataError(f"--like {path}: not a csv file that can be read: {error}. Download it again.") from None
    if len(sample) == 0 or len(sample.columns) < 2:
        raise DataError(f"--like {path}: expected rows with an id and one value or more. Download it again.")
    return sample


def write(
    predictions: PredictionTable, run: Path, source: str, config: RunConfig, *, like: Path, out: Path
) -> list[str]:
    """Write `out` as the sample `like` is, and read it again; returns sentences on what was written.

    Raises:
        DataError: Ids of the sample and of the input differ, or the sample's columns are none that the run answers.
    """
    sample, table = read_sample(like), predictions.table
    rows = _input_rows(source, config)
    names = [_names(row, config) for row in rows]
    own, theirs = id_columns(sample, names, source, like)
    place_of = _places(rows, [each.get(theirs) for each in names], source, theirs)
    wanted = list(sample[own])
    if twice := [each for each, times in Counter(wanted).items() if times > 1]:
        raise DataError(f"--like {like}: {_some(twice)} stand(s) twice in `{own}`. Give each row an id of its own.")
    missing = [each for each in wanted if each not in place_of]
    known = {*wanted}
    surplus = [each for each in place_of if each not in known]
    nameless = sum(theirs not in each for each in names)
    if len(missing) > nameless or surplus:
        told = [f"{len(missing)} id(s) of {like} are not in {source} ({_some(missing)})"] if missing else []
        told += [f"{len(surplus)} id(s) of {source} are not in {like} ({_some(surplus)})"] if surplus else []
        raise DataError(
            f"--like: {', and '.join(told)}; ids are `{own}` there and `{theirs}` here. Name the file of the rows that "
            "the sample asks for."
        )
    lines = {line["row"]: line for line in table.to_dict("records")}
    if len(lines) < len(table) or not lines.keys() <= {row.place for row in rows}:
        raise ConfigError(f"{run}: predicts several lines a row, and {like} has one. Leave --like out.")
    columns = _columns(sample.drop(columns=own), table, run, config, like)
    found = [lines.get(place_of.get(each, "")) for each in wanted]
    unread = [each for each, line in zip(wanted, found, strict=True) if line is None]
    if unread and any(not column.fallback for column in columns.values()):
        raise DataError(
            f"{source}: {len(unread)} row(s) cannot be read ({_some(unread)}), and answers in words have no fallback. "
            "Correct them."
        )
    written = sample.copy()
    for name, column in columns.items():
        written[name] = [column.fallback if line is None else column.of_line(line) for line in found]
    files.write_bytes(out, written.to_csv(index=False).encode())
    _require_like(out, sample, own, columns)
    first = next(iter(columns.values()))
    notes = [f"As {like.name}: {_some([f'`{name}`' for name in columns])}: {first.says}."]
    if unread:
        fallback = _some([column.fallback for column in columns.values()])
        notes.append(f"{len(unread)} unreadable row(s) have {first.fallback_is} ({fallback}): {_some(unread)}.")
    return [*notes, f"Read again: the {len(written):,} ids in the sample's order, its columns, no empty value."]


def _require_like(out: Path, sample: pd.DataFrame, own: str, columns: Mapping[str, Column]) -> None:
    written = read_sample(out)
    if list(written.columns) != list(sample.columns) or list(written[own]) != list(sample[own]):
        raise DataError(
            f"{out}: does not read back with the sample's columns and ids. Delete it and look for odd signs."
        )
    for name in columns:
        if bad := [key for key, cell in zip(written[own], written[name], strict=True) if cell in ("", "nan", "inf")]:
            raise DataError(f"{out}: `{name}` has no value for {_some(bad)}: the run gave none. Train it again.")


def _input_rows(source: str, config: RunConfig) -> list[RawRow]:
    """All rows of the input, readable or not."""
    source = starter.resolve(source)
    if (media := config.media) is None:
        return list(read_rows(source, config.data))
    kind = SOUND if config.reads_sound else picture_sources.PICTURE
    return list(picture_sources.read_rows(source, media.column, media.folder_of(source), config.data, kind))


def _names(row: RawRow, config: RunConfig) -> dict[str, str]:
    """The cells of a row that may be its id, as they are written; of a file also its file's name."""
    cells = {name: cell.name if isinstance(cell, StoredFile) else cell for name, cell in row.columns.items()}
    if config.media and isinstance(file := cells.get(config.media.column), str):
        cells |= {"file": PurePosixPath(file).name, "file without suffix": PurePosixPath(file).stem}
    return {name: _written(cell) for name, cell in cells.items() if isinstance(cell, (str, int, float))}


def _written(value: str | float) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def id_columns(sample: pd.DataFrame, names: Sequence[Mapping[str, str]], source: str, like: Path) -> tuple[str, str]:
    """The column of ids in the sample and in the input: of one name, else the only two with the same values."""
    cells: dict[str, set[str]] = {}
    for row in names:
        for name, cell in row.items():
            cells.setdefault(name, set()).add(cell)
    ids = {name: set(sample[name]) for name in sample if sample[name].is_unique}
    same = [name for name in sample if name in cells]
    pairs = [(name, name) for name in same if ids.get(name) == cells[name]]
    pairs = pairs or [(one, other) for one, own in ids.items() for other, theirs in cells.items() if own == theirs]
    pairs = pairs or [(name, name) for name in same if name in ids or name == sample.columns[0]][:1]
    if pairs and all([row.get(two) for row in names] == [row.get(pairs[0][1]) for row in names] for _, two in pairs):
        return pairs[0]
    found = f"several columns with the same values ({', '.join(f'`{two}`' for _, two in pairs)})" if pairs else "none"
    raise DataError(
        f"--like: the rows of {like} (columns {', '.join(f'`{name}`' for name in sample)}) are found in {source} by a "
        f"column of the same name or with the same values, and it has {found} (columns "
        f"{', '.join(f'`{name}`' for name in cells) or 'none'}). Rename the column of ids in one of the two."
    )


def _places(rows: Sequence[RawRow], ids: Sequence[str | None], source: str, column: str) -> dict[str, str]:
    places: dict[str, str] = {}
    for row, each in zip(rows, ids, strict=True):
        if each is not None and (other := places.setdefault(each, row.place)) != row.place:
            raise DataError(f"{source}: `{column}` has {each} twice, in {other} and {row.place}. Remove one.")
    return places


def _columns(values: pd.DataFrame, table: pd.DataFrame, run: Path, config: RunConfig, like: Path) -> dict[str, Column]:
    """What each column of values wants, by its name and by the sample's cells."""
    answer = config.task.answer
    if answer is None or answer not in table:
        raise ConfigError(f"{run}: recipe {config.recipe} has no one answer a row for {like}. Leave --like out.")
    classes = prediction_table.class_names(table)
    train = files.read_json(run / "manifest.json").get("data", {}).get("train", {})
    cells = [cell for name in values for cell in values[name] if cell]
    if not classes:
        return {
            _only(values, "a number" if table[answer].dtype.kind == "f" else "text", like): _number(
                table, answer, train
            )
        }
    several = isinstance(table[answer].iloc[0], list)
    counts = {name: train.get("classes", {}).get(name, 0) for name in classes}
    total = (train.get("rows") if several else None) or max(1, sum(counts.values()))
    prior = {name: counts[name] / total for name in classes}
    frequent = max(classes, key=prior.__getitem__)
    if (of_column := class_columns(list(values), classes)) is not None:
        hard = bool(cells) and {*cells} <= {"0", "1"}
        usual = {name: str(int(prior[name] >= 0.5 if several else name == frequent)) for name in classes}

        def one(name: str) -> Column:
            if hard:

                def decided(line: Any) -> str:
                    return str(int(name in line[answer] if several else name == line[answer]))

                says = "1 for the class of the row, else 0, as the sample has no decimals"
                return Column(says, decided, usual[name], "the most frequent class of training")
            return _probability(name, prior, "the probability of the class")

        return {column: one(name) for column, name in of_column.items()}
    column = _only(values, f"one of the classes {', '.join(classes[:8])}", like)
    decimals = any(not _is_integer(cell) for cell in cells) and all(finite(cell) is not None for cell in cells)
    if decimals and len(classes) == 2 and not several:
        return {column: _probability(classes[1], prior, f"the probability of `{classes[1]}`")}
    separator = config.classes.separator or " "
    known = {part.strip() for cell in cells for part in (cell.split(separator) if several else [cell])}
    alike = all(map(_is_integer, known)) and all(map(_is_integer, classes))
    if cells and not known & set(classes) and not alike:
        raise DataError(
            f"--like {like}: `{column}` holds {_some(sorted(known))}, and the run's classes are {_some(classes)}. "
            "Train with the labels that the sample has, or write a sample with columns that have the classes' names."
        )

    def label(line: Any) -> str:
        if not several:
            return str(line[answer])
        return separator.join(line[answer] or [max(classes, key=lambda name: line[f"p_{name}"])])

    says = f"the labels, with `{separator}` between them, or the likeliest" if several else "the label"
    return {column: Column(says, label, frequent, "the most frequent class of training")}


def _number(table: pd.DataFrame, answer: str, train: Mapping[str, Any]) -> Column:
    if table[answer].dtype.kind != "f":
        return Column("the answer", lambda line: str(line[answer]), "", "no fallback")
    mean = train.get("mean_label")
    fallback_is = "the mean of the other rows" if mean is None else "the mean of training"
    return Column(
        "the number",
        lambda line: repr(line[answer]),
        repr(float(table[answer].mean() if mean is None else mean)),
        fallback_is,
    )


def _probability(name: str, prior: Mapping[str, float], says: str) -> Column:
    return Column(says, lambda line: repr(line[f"p_{name}"]), repr(prior[name]), "the share of the class in training")


def class_columns(columns: Sequence[str], classes: Sequence[str]) -> dict[str, str] | None:
    """The class of each column: its name, or what follows the words that all begin with, such as `p_cat`."""
    shared = re.match(r"(?:.*[\W_])?", os.path.commonprefix(list(columns)))  # noqa: RUF071 - of letters
    for start in (0, shared.end() if shared else 0):
        found = {column: column[start:].strip() for column in columns}
        if {*found.values()} <= {*classes}:
            return found
    return None


def _only(values: pd.DataFrame, wanted: str, like: Path) -> str:
    if len(values.columns) != 1:
        raise DataError(
            f"--like {like}: the columns {', '.join(f'`{name}`' for name in values)} are not the names of the run's "
            f"classes, and the run answers {wanted}. Name a sample with one column of values, or with those names."
        )
    return str(values.columns[0])


def _is_integer(cell: str) -> bool:
    return re.fullmatch(r"-?\d+", cell) is not None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
