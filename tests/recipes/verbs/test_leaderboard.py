"""A folder with train, test and sample submission becomes words of a recipe, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.drawings import draw
from tests.recipes.verbs.test_submission import table_of
from workbench.errors import DataError
from workbench.recipes.verbs import leaderboard

Lines = Sequence[Sequence[Any]]


def folder_of(path: Path, train: Lines, test: Lines, sample: Lines) -> Path:
    path.mkdir(exist_ok=True)
    for name, lines in (("train", train), ("test", test), ("sample_submission", sample)):
        table_of(path / f"{name}.csv", lines)
    return path


TEXTS = [["id", "title", "body", "age"], *([f"t{n}", "A title", f"Some text {n}", n] for n in range(3))]


@pytest.mark.parametrize(
    ("columns", "cells", "sample", "wanted"),
    [
        (["target"], lambda n: [n % 2], [0], {"data.columns": {"id": "id", "label": "target"}}),
        (["price"], lambda n: [n + 0.25], [0.0], {"classes.kind": "number"}),
        (["a", "b"], lambda n: [n % 2, 1 - n % 2], [0.5, 0.5], {"classes.columns": ["a", "b"]}),
        (["a", "b"], lambda n: [1, n % 2], [0.5, 0.5], {"classes.columns": ["a", "b"], "classes.kind": "several"}),
    ],
)
def test_labels_are_what_the_sample_asks_for(
    tmp_path: Path, columns: list[str], cells: Any, sample: list[Any], wanted: dict[str, Any]
) -> None:
    train = [[*TEXTS[0], *columns], *([f"r{n}", "x", f"Text {n}", n, *cells(n)] for n in range(30))]
    asked = [["id", *columns], *([f"t{n}", *sample] for n in range(3))]
    found = leaderboard.found(str(folder_of(tmp_path / "c", train, TEXTS, asked)))
    assert found is not None and not found.pictures
    said = {key: value for key, _, value in (word.partition("=") for word in found.words)}
    assert json.loads(said["classes.text"]) == "{title}\n{body}"
    for key, value in wanted.items():
        assert said[key] == (value if isinstance(value, str) else json.dumps(value))
    assert ("classes.kind" in said) == ("classes.kind" in wanted)
    assert f"predict runs/c {found.test} --like {found.sample}" in found.commands(Path("c.yaml"))[-1]


def test_classes_that_head_columns_are_values_of_one_label(tmp_path: Path) -> None:
    train = [["id", "text", "breed"], *([f"r{n}", f"Text {n}", ("cat", "dog")[n % 2]] for n in range(8))]
    test = [["id", "text"], ["a", "Text"], ["b", "More"]]
    found = leaderboard.found(
        str(folder_of(tmp_path, train, test, [["id", "cat", "dog"], ["b", 0.5, 0.5], ["a", 0.5, 0.5]]))
    )
    assert found is not None and found.words == ('data.columns={"id": "id", "label": "breed"}',)


def test_pictures_are_found_by_their_names(tmp_path: Path) -> None:
    tables = {}
    for split in ("train", "test"):
        (tmp_path / f"{split}_images").mkdir()
        for file in draw(tmp_path / "drawn", 6).glob("*/*.png"):
            tables.setdefault(split, []).append((f"{split}{file.stem}", file.parent.name))
            file.rename(tmp_path / f"{split}_images" / f"{split}{file.name}")
    (tmp_path / "drawn").rename(tmp_path.parent / "drawn")
    ids = [[name] for name, _ in tables["test"]]
    train = [["id_code", "diagnosis"], *tables["train"]]
    sample = [["id_code", "diagnosis"], *([*each, "bar"] for each in ids)]
    found = leaderboard.found(str(folder_of(tmp_path, train, [["id_code"], *ids], sample)))
    assert found is not None and found.pictures
    assert found.words[:3] == (
        "data.format=image",
        'image.column="id_code"',
        'image.folder={"train.csv": "train_images", "test.csv": "test_images"}',
    )


@pytest.mark.parametrize(
    ("train", "test", "sample", "says"),
    [
        ([["id", "y"], ["a", 1]], [["id"], ["b"]], [["id", "y"], ["b", 0]], "no column of text, and none that names"),
        ([["id", "t", "y", "z"], ["a", "x", 1, 7]], TEXTS, [["id", "y", "z"], ["t0", 0, 0]], "one recipe for each"),
        ([["id", "t", "q", "r"], ["a", "x", 1, 7]], TEXTS, [["id", "y"], ["t0", 0]], "neither its columns"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path: Path, train: Lines, test: Lines, sample: Lines, says: str) -> None:
    with pytest.raises(DataError, match=says):
        leaderboard.found(str(folder_of(tmp_path, train, test, sample)))


def test_other_folders_are_no_leaderboards(tmp_path: Path) -> None:
    table_of(tmp_path / "train.csv", TEXTS)
    assert leaderboard.found(str(tmp_path)) is None
    table_of(tmp_path / "sample.csv", TEXTS)
    with pytest.raises(DataError, match="`test` in its name, found none"):
        leaderboard.found(str(tmp_path))
