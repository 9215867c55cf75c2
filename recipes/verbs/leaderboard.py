"""`workbench init FOLDER`: the recipe of a folder with train, test and sample submission, as leaderboards give them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.config.sections.classes_config import ClassesConfig
from workbench.data.images import picture_sources
from workbench.data.labelled import labels
from workbench.data.rows import finite, read_rows
from workbench.errors import DataError
from workbench.recipes.verbs import submission


@dataclass(frozen=True)
class Leaderboard:
    """What a folder says of a competition."""

    train: str
    test: str
    """Rows to predict."""
    sample: Path
    pictures: bool
    words: tuple[str, ...]
    """`key=value` words that read its tables."""
    several: bool
    """Whether labels are numbers or several classes."""

    def commands(self, recipe: Path) -> list[str]:
        """What to run, from the recipe to the file to submit."""
        run = f"runs/{recipe.stem}"
        return [
            f"workbench check {recipe}",
            f"workbench run {recipe} --out {run}",
            f"workbench predict {run} {self.test} --like {self.sample} --out {run}/submission.csv",
        ]


def found(rows: str) -> Leaderboard | None:
    """The competition in a folder; None where it has no sample submission.

    Raises:
        DataError: It has one, and what is to be learnt from which columns is not clear.
    """
    folder = Path(rows).expanduser()
    tables = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    samples = [path for path in tables if "sample" in path.stem.lower()]
    if not samples:
        return None
    others = [path for path in tables if path not in samples]
    sample, train, test = (
        _one(folder, those, word) for those, word in ((samples, "sample"), (others, "train"), (others, "test"))
    )
    asked = submission.read_sample(sample)
    train_rows, test_rows = (list(_cells(path)) for path in (train, test))
    own, name = submission.id_columns(asked, test_rows, str(test), sample)
    columns, wanted = list(train_rows[0]), [column for column in asked if column != own]
    words = list[str]()
    renamed = {"id": name} if name in columns else {}
    label, classes = _label(train, train_rows, [each for each in columns if each not in test_rows[0]], wanted)
    if classes:
        words.append(f"classes.columns={json.dumps(classes)}")
        of_one = all(sum(finite(row[each]) == 1 for each in classes) == 1 for row in train_rows)
        kind = "one" if of_one else "several"
    else:
        renamed |= {"label": label} if label != "label" else {}
        kind = _kind([row[label] for row in train_rows], train)
    words += [f"classes.kind={kind}"] if kind != "one" else []
    shared = [each for each in columns if each in test_rows[0]]
    pictures = list(_pictures(folder, train, test, shared))
    words += pictures or _texts(train_rows, [each for each in shared if each != name], renamed, folder)
    words.append(f"data.columns={json.dumps(renamed)}")
    return Leaderboard(str(train), str(test), sample, bool(pictures), tuple(words), kind != "one")


def _one(folder: Path, tables: Sequence[Path], word: str) -> Path:
    """The one table of a name; raises DataError where there is none, or several."""
    fitting = [path for path in tables if word in path.stem.lower()]
    exact = [path for path in fitting if path.stem.lower() == word] or fitting
    if len(exact) != 1:
        names = ", ".join(path.name for path in exact) or "none"
        raise DataError(
            f"{folder}: holds a sample submission, and expected one table with `{word}` in its name, found {names}. "
            "Move others elsewhere, or name the rows to learn from: --rows FILE."
        )
    return exact[0]


def _cells(path: Path) -> Iterator[dict[str, str]]:
    yield from (row.columns for row in read_rows(str(path)) if not row.mistake)


def _label(
    train: Path, rows: Sequence[dict[str, str]], learnt: Sequence[str], wanted: Sequence[str]
) -> tuple[str, list[str]]:
    """The column of labels, or the columns of classes: what the sample asks for, or a column whose values it names."""
    known = [each for each in wanted if each in rows[0]]
    if len(known) == len(wanted) == 1:
        return known[0], []
    if len(known) == len(wanted):
        if {cell.strip() for row in rows for cell in map(row.__getitem__, known)} <= {"0", "1", "0.0", "1.0", ""}:
            return "", known
        raise DataError(
            f"{train}: the sample asks for {', '.join(f'`{each}`' for each in known)}, which hold other than 0 and "
            "1: several labels of their own. Write one recipe for each: --rows FILE data.columns='{label: NAME}'."
        )
    for each in learnt:
        if submission.class_columns(wanted, sorted({row[each].strip() for row in rows})) is not None:
            return each, []
    if len(learnt) == 1 == len(wanted):
        return learnt[0], []
    raise DataError(
        f"{train}: the sample asks for {', '.join(f'`{each}`' for each in wanted)}, which are neither its columns "
        f"({', '.join(f'`{each}`' for each in rows[0])}) nor values of one. Name them: --rows FILE "
        "data.columns='{label: NAME}'."
    )


def _kind(cells: Sequence[str], train: Path) -> str:
    try:
        labels.require_classes("one", [labels.read(cell, ClassesConfig()) for cell in cells], source=str(train))
    except DataError:
        return "number"
    return "one"


def _pictures(folder: Path, train: Path, test: Path, shared: Sequence[str]) -> Iterator[str]:
    """Words that find the pictures of both tables; none where they name none."""
    archives = picture_sources.ARCHIVES
    places = [each for each in sorted(folder.iterdir()) if each.is_dir() or each.suffix.lower() in archives]

    def place_of(table: Path, word: str, column: str) -> str | None:
        """The folder that has the first picture of a table; empty where cells are whole paths."""
        for name in ("", *(path.name for path in sorted(places, key=lambda path: word not in path.stem.lower()))):
            try:
                row = next(iter(picture_sources.read_rows(str(table), column, name or None)))
            except DataError:
                continue
            if not row.mistake:
                return name
        return None

    for column in shared:
        own = {table: place_of(table, word, column) for table, word in ((train, "train"), (test, "test"))}
        if None not in own.values():
            named = {table.name: name for table, name in own.items() if name}
            yield from ("data.format=image", f"image.column={json.dumps(column)}")
            yield from [f"image.folder={json.dumps(named)}"] if named else []
            return


def _texts(rows: Sequence[dict[str, str]], shared: Sequence[str], renamed: dict[str, str], folder: Path) -> list[str]:
    """Words that read the columns of text; a single one is renamed."""
    first = list(itertools.islice(rows, 1000))
    texts = [each for each in shared if any(row[each] and finite(row[each]) is None for row in first)]
    if not texts:
        raise DataError(
            f"{folder}: train and test share no column of text, and none that names pictures in a folder here "
            f"({', '.join(f'`{each}`' for each in shared) or 'only ids'}). Unpack the pictures beside the tables."
        )
    if len(texts) == 1 or not all(each.isidentifier() for each in texts):
        longest = max(texts, key=lambda each: sum(len(row[each]) for row in first))
        renamed |= {"text": longest} if longest != "text" else {}
        return []
    template = "\n".join(f"{{{each}}}" for each in texts)
    return [f"classes.text={json.dumps(template)}"]
