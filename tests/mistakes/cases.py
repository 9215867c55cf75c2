"""A mistake that a person can make, what the message must say, and what it must leave alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import workbench
from tests.mistakes.remedies import assert_keys, assert_remedies, assert_remedies_of_rows
from workbench.cli.verbs import main
from workbench.errors import WorkbenchError
from workbench.recipes.load import load

Prepare = Callable[[Path], object]
"""Makes a mistake in a folder that holds my.yaml, rows.jsonl, the backbone `stories` and the run `one`."""


class Case(NamedTuple):
    command: str
    place: str
    """What the message must name as the place: file, key, argument."""
    cure: str
    """What it must say to do."""
    prepare: Prepare = lambda folder: None


class RowsCase(NamedTuple):
    """A mistake with the rows of a recipe, in a folder that holds my.yaml, rows.jsonl and other.jsonl."""

    place: str
    """What the message must name as the place."""
    cure: str
    words: str = ""
    """Overrides."""
    rows: Iterable[Any] = ()
    """Rows of rows.jsonl."""
    other: Iterable[Any] = ()
    """Rows of other.jsonl."""
    command: str = "run my.yaml"


def file(name: str, content: str | bytes) -> Prepare:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(rows: Iterable[Any], name: str = "bad.jsonl") -> Prepare:
    return file(name, "".join(json.dumps(row) + "\n" for row in rows))


SUMS = lines([{"question": f"How much is {n} and {n}?", "answer": f"{2 * n}."} for n in range(40)], "rows.jsonl")
"""40 short questions, in place of the recipe's few."""


def removed(name: str) -> Prepare:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Prepare:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def changed(name: str, **values: Any) -> Prepare:
    """A JSON file with some of its values replaced."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def backbone(*then: Prepare) -> Prepare:
    """A copy of the backbone, in the folder `m`, with something done to it."""

    def prepare(folder: Path) -> None:
        shutil.copytree(folder / "stories", folder / "m")
        for step in then:
            step(folder)

    return prepare


AssertRefused = Callable[[Case], None]
"""The fixture `assert_refused`."""
AssertRowsRefused = Callable[..., None]
"""The fixture `assert_rows_refused`."""


def assert_refused(
    case: Case,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    retried: bool = False,
) -> None:
    """Make the mistake, and see that it is told and leaves nothing.

    Args:
        retried: Whether what the message says to write is tried.
    """
    case.prepare(folder)
    before = content(folder)
    monkeypatch.setattr(sys, "argv", ["workbench", *shlex.split(case.command)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert_told(case, told.out, told.err)
    assert_keys(told.err)
    assert_nothing_left(folder, before)
    if retried:
        assert_remedies_of_rows(sys.argv[1:], told.err)


def refusal(command: str) -> str | None:
    """The message that every verb gives about a recipe and overrides that cannot be read; None where they can be."""
    recipe, *overrides = shlex.split(command)
    try:
        load(recipe, overrides)
    except WorkbenchError as error:
        assert_remedies(command, str(error))
        return " ".join(str(error).split())
    return None


def assert_refused_with(
    words: Iterable[str], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """See that the command ends in status 2 and says all `words`; returns what it says."""
    monkeypatch.setattr(sys, "argv", ["workbench", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and all(word in told for word in words), told
    assert_keys(told)
    return told


def trained(recipe: str, rows: Iterable[Any], folder: Path, stories: str) -> Path:
    """A run of a recipe on these rows over the backbone `stories`, in a folder."""
    file("my.yaml", recipe)(folder)
    lines(rows, "rows.jsonl")(folder)
    words = [f"model.id={stories}", f"data.train={folder}/rows.jsonl"]
    return workbench.run(folder / "my.yaml", words, out=folder / "one", quiet=True)


def assert_rows_refused(
    case: RowsCase,
    recipe: str,
    links: Mapping[str, str | Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    retried: bool = False,
) -> None:
    """See that the command, run in the folder beside `links`, is refused before an adapter is there.

    Args:
        retried: Whether what the message says to write is tried.
    """
    monkeypatch.chdir(folder)
    file("my.yaml", recipe)(folder)
    lines(case.rows, "rows.jsonl")(folder)
    lines(case.other, "other.jsonl")(folder)
    for link, target in links.items():
        (folder / link).symlink_to(target)
    message = assert_refused_with((case.place, case.cure), f"{case.command} {case.words}", monkeypatch, capsys)
    assert not list(folder.glob("runs/*/adapter"))
    if retried:
        assert_remedies_of_rows(sys.argv[1:], message)


def assert_told(case: Case, out: str, err: str) -> None:
    told = " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and out == "", err
    assert case.place in told and case.cure in told, told


def assert_nothing_left(folder: Path, before: dict[Path, bytes]) -> None:
    """What was there is as it was, and nothing is new but run directories that say that they failed."""
    after = content(folder)
    failed = [path for path in folder.rglob("manifest.json") if b'"status": "failed"' in path.read_bytes()]
    for path in before.keys() | after.keys():
        assert before.get(path) == after.get(path) or any(run.parent in path.parents for run in failed), path


def content(folder: Path) -> dict[Path, bytes]:
    """Every file that is not behind a link; locks, which are empty, say nothing, nor does what Python compiled."""
    paths = (Path(place) / name for place, _, names in os.walk(folder) for name in names if name[-4:] != ".pyc")
    return {path: path.read_bytes() for path in paths if path.name != "run.lock"}
