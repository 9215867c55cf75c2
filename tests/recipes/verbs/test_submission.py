"""A submission has the sample's rows, order and columns; what cannot be matched is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.recipes.drawings import draw
from workbench.config import RunConfig
from workbench.data.rows import read_rows
from workbench.errors import WorkbenchError
from workbench.recipes.task import PredictionTable
from workbench.recipes.verbs import submission

P = {"ham": [0.9, 0.2, 0.4], "spam": [0.1, 0.8, 0.6]}
TEST = [["id", "text"], ["a", "one"], ["b", "two"], ["c", "three"]]


def table_of(path: Path, lines: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def submitted(
    folder: Path,
    sample: Sequence[Sequence[Any]],
    *,
    test: Sequence[Sequence[Any]] = TEST,
    classes: dict[str, list[float]] = P,
    numbers: Sequence[float] | None = None,
    several: bool = False,
    left_out: Sequence[int] = (),
) -> tuple[list[list[str]], list[str]]:
    """The lines of the submission and what is said of it, for a run that answered `P` for the three rows of `test`."""
    source, like = table_of(folder / "test.csv", test), table_of(folder / "sample.csv", sample)
    config = RunConfig.model_validate({"recipe": "classify", "data": {"train": "t.csv"}})
    places = [row.place for row in read_rows(str(source))]
    if numbers is not None:
        table = pd.DataFrame({"row": places, "predicted": list(numbers)})
    else:
        likeliest = [max(classes, key=lambda name: classes[name][row]) for row in range(len(places))]
        over = [[name for name in classes if classes[name][row] >= 0.5] for row in range(len(places))]
        table = pd.DataFrame({"row": places, "predicted": over if several else likeliest})
        table = table.assign(**{f"p_{name}": values for name, values in classes.items()})
    train = {"rows": 10, "classes": {"ham": 7, "spam": 3}} if numbers is None else {"rows": 10, "mean_label": 4.5}
    (folder / "manifest.json").write_text(json.dumps({"data": {"train": train}}))
    out = folder / "out.csv"
    predictions = PredictionTable(table.drop(index=list(left_out)))
    notes = submission.write(predictions, folder, str(source), config, like=like, out=out)
    with out.open(newline="") as file:
        return list(csv.reader(file)), notes


@pytest.mark.parametrize(
    ("sample", "options", "wanted"),
    [
        ([["id", "kind"], ["c", "ham"], ["a", "ham"], ["b", "ham"]], {}, ["spam", "ham", "spam"]),
        ([["id", "kind"], ["c", "0.5"], ["a", "0.5"], ["b", "0.5"]], {}, ["0.6", "0.1", "0.8"]),
        ([["id", "ham"], ["c", "0.5"], ["a", "0.5"], ["b", "0.5"]], {}, ["0.4", "0.9", "0.2"]),
        ([["id", "spam"], ["c", "0"], ["a", "0"], ["b", "1"]], {}, ["1", "0", "1"]),
        ([["id", "value"], ["c", "0"], ["a", "0"], ["b", "0"]], {"numbers": [1.5, 2.5, 3.5]}, ["3.5", "1.5", "2.5"]),
        ([["name", "kind"], ["c", "ham"], ["a", "ham"], ["b", "ham"]], {"left_out": [1]}, ["spam", "ham", "ham"]),
        ([["id", "kind"], ["c", "0.5"], ["a", "0.5"], ["b", "0.5"]], {"left_out": [1]}, ["0.6", "0.1", "0.3"]),
        (
            [["id", "value"], ["c", "0"], ["a", "0"], ["b", "0"]],
            {"numbers": [1.5, 2.5, 3.5], "left_out": [1]},
            ["3.5", "1.5", "4.5"],
        ),
        ([["id", "tags"], ["c", "ham"], ["a", "ham"], ["b", "ham spam"]], {"several": True}, ["spam", "ham", "spam"]),
    ],
)
def test_one_column(tmp_path: Path, sample: list[list[str]], options: dict[str, Any], wanted: list[str]) -> None:
    lines, notes = submitted(tmp_path, sample, **options)
    assert lines[0] == sample[0] and [line[0] for line in lines[1:]] == ["c", "a", "b"]
    assert [line[1] for line in lines[1:]] == wanted
    assert any(": b." in note for note in notes) == bool(options.get("left_out"))


def test_columns_of_classes_hold_probabilities_or_a_one(tmp_path: Path) -> None:
    ids = [["b"], ["c"], ["a"]]
    soft, _ = submitted(tmp_path, [["id", "p_spam", "p_ham"], *([*each, 0.5, 0.5] for each in ids)])
    assert soft == [["id", "p_spam", "p_ham"], ["b", "0.8", "0.2"], ["c", "0.6", "0.4"], ["a", "0.1", "0.9"]]
    hard, notes = submitted(tmp_path, [["id", "spam", "ham"], *([*each, 0, 1] for each in ids)], left_out=[2])
    assert hard == [["id", "spam", "ham"], ["b", "1", "0"], ["c", "0", "1"], ["a", "0", "1"]]
    assert "the most frequent class of training (0, 1): c." in notes[1]


@pytest.mark.parametrize(
    ("sample", "test", "says"),
    [
        ([["id", "kind"], ["a", "ham"], ["x", "ham"]], TEST, r"1 id\(s\) of .* \(x\), and 2 id\(s\) of .* \(b, c\)"),
        ([["key", "kind"], ["x", "ham"], ["y", "ham"]], TEST, "Rename the column of ids"),
        (
            [["key", "kind"], ["a", "ham"], ["b", "ham"], ["c", "ham"]],
            [["one", "text"], ["a", "c"], ["b", "b"], ["c", "a"]],
            "several columns with the same values",
        ),
        ([["id", "kind"], ["a", "ham"], ["a", "ham"], ["b", "ham"], ["c", "ham"]], TEST, "stand.* twice in `id`"),
        ([["id", "kind"], ["a", "ham"], ["b", "ham"]], [*TEST[:3], ["a", "x"]], "`id` has a twice"),
        (
            [["id", "kind"], ["a", "7"], ["b", "7"], ["c", "7"]],
            TEST,
            "`kind` holds 7, and the run's classes are ham, spam",
        ),
        ([["id", "x", "y"], ["a", 1, 1], ["b", 1, 1], ["c", 1, 1]], TEST, "`x`, `y` are not the names"),
        ([["id", "kind"]], TEST, "expected rows"),
    ],
)
def test_what_does_not_match_is_refused(
    tmp_path: Path, sample: list[list[str]], test: list[list[str]], says: str
) -> None:
    with pytest.raises(WorkbenchError, match=says):
        submitted(tmp_path, sample, test=test)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.slow
def test_pictures_from_a_table_of_names_to_a_submission(tmp_path: Path, vit: str) -> None:
    import workbench

    names: dict[str, list[tuple[str, str]]] = {}
    for split in ("train", "test"):
        (tmp_path / f"{split}_images").mkdir()
        for file in sorted(draw(tmp_path / split, 18).glob("*/*.png")):
            names.setdefault(split, []).append((file.stem, file.parent.name))
            file.rename(tmp_path / f"{split}_images" / file.name)
    (tmp_path / "test_images" / "0003.png").write_bytes(b"no picture")
    train = table_of(tmp_path / "train.csv", [["id_code", "diagnosis"], *names["train"]])
    test = table_of(tmp_path / "test.csv", [["id_code"], *([name] for name, _ in names["test"])])
    like = table_of(tmp_path / "s.csv", [["id_code", "diagnosis"], *((name, "bar") for name, _ in names["test"][::-1])])
    words = [
        *("model.id=" + vit, f"data.train={train}", "data.held_out=0.4", "train.epochs=null", "train.steps=2"),
        *("image.column=id_code", "image.folder={train.csv: train_images, test.csv: test_images}"),
        "data.columns={label: diagnosis, id: id_code}",
    ]
    run = workbench.run("vision/quickstart", words, out=tmp_path / "run")
    assert set(pd.read_parquet(tmp_path / "run" / "predictions.parquet")["id"]) < {name for name, _ in names["train"]}
    answered = workbench.predict(tmp_path / "run", str(test), like=like, out=tmp_path / "run" / "o.csv")
    assert '<a href="o.csv">o.csv</a>' in (tmp_path / "run" / "report.html").read_text()
    with (tmp_path / "run" / "o.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert [line[0] for line in lines] == ["id_code", *(name for name, _ in names["test"][::-1])], run
    assert {line[1] for line in lines[1:]} <= {"bar", "circle", "square"}
    assert "1 unreadable row(s)" in answered.notes[1] and answered.notes[1].endswith(": 0003.")
