"""Pages show the training rows nearest to mistakes, and suspected labels of texts, whatever they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.workbench.report.test_class_section import make
from tests.workbench.report.test_picture_section import jpeg, place, predictions, section, stored
from tests.workbench.report.test_picture_section import make as make_pictured
from workbench import report
from workbench.config.yaml_text import dump_yaml
from workbench.evaluation import prediction_table
from workbench.report.class_section import SUSPECTS, classified
from workbench.report.run_record import read

PROBE = {"train": 40, "others": 20, "compared": 40, "rows": 90, "neighbours": 0.5, "linear": 0.625}


def neighbours(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    table = pd.DataFrame(rows, columns=["row", "neighbour", "label"]).assign(text="<i>near</i>", similarity=0.875)
    table.to_parquet(folder / "neighbours.parquet")
    (folder / "probe.json").write_text(json.dumps(PROBE))


def test_a_mistake_of_text_stands_beside_its_neighbours(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [("a", "a"), ("a", "b"), ("b", "a")], ["a", "b"], accuracy=1 / 3)
    neighbours(run, [("rows.csv, row 2", f"train.csv, row {number}", "<b>") for number in (5, 9)])
    found = classified(read(run))
    assert found is not None
    of_row = {each["row"]: each["near"] for each in found.mistakes}
    assert [each.place for each in of_row["rows.csv, row 2"]] == ["train.csv, row 5", "train.csv, row 9"]
    assert of_row["rows.csv, row 3"] == []
    page = report.write(run).read_text()
    assert "&lt;i&gt;near&lt;/i&gt;" in page and "<i>near" not in page and "0.88" in page
    assert "Most like it among the training rows (40 of 90 were looked at)" in page
    assert "The frozen backbone alone: k-NN 0.50, linear probe 0.62; this run 0.33 (40 training rows" in page
    assert "What it knew before is as good as the run." in page


def test_a_mistaken_picture_stands_beside_its_neighbours(tmp_path: Path) -> None:
    table = predictions(30)
    near: list[dict[str, Any]] = stored([100, 101], "neighbour")
    run = make_pictured(tmp_path / "run", table, [*stored(list(range(30))), *near])
    wrong = table.loc[table["label"] != table["predicted"], "row"].iloc[0]
    neighbours(run, [(wrong, place(number), "x") for number in (100, 3, 999)])
    found = section(run)
    (card,) = (card for card in found.mistakes if card.place == wrong)
    drawn = [picture for _, picture in card.near]
    assert [each.place for each, _ in card.near] == [place(100), place(3), place(999)]
    assert drawn[0] is not None and drawn[1] is not None and drawn[2] is None, "a row and a neighbour have pictures"
    assert all(not card.near for card in found.mistakes if card.place != wrong) and jpeg(100) != jpeg(3)
    page = report.write(run).read_text()
    assert page.count('class="near"') == 1 and page.count('<p class="file">0.88</p>') == 3


def crossvalidated(folder: Path, recipe: str) -> Path:
    """Text rows of two classes, of which every tenth has the other one's label."""
    rng = np.random.default_rng(0)
    true_N = np.arange(200) % 2
    label_N = np.where(np.arange(200) % 10 == 0, 1 - true_N, true_N)
    p_N = np.clip(true_N + np.where(true_N == 1, -1, 1) * rng.uniform(0, 0.4, 200), 0, 1)
    rows = [("ab"[label], "ab"[int(p > 0.5)]) for label, p in zip(label_N, p_N, strict=True)]
    run = make(folder, rows, ["a", "b"], accuracy=0.9)
    (run / "config.yaml").write_text(dump_yaml({"recipe": recipe, "classes": {"kind": "one"}}))
    table = pd.read_parquet(run / "predictions.parquet").assign(repeat=0, fold="0", p_a=1 - p_N, p_b=p_N)
    table.loc[0, "text"] = "<u>" + "long " * 100
    table.to_parquet(run / "out_of_fold.parquet")
    return run


def test_suspected_labels_of_texts_are_listed_with_what_is_suggested(tmp_path: Path) -> None:
    run = crossvalidated(tmp_path / "run", "crossval")
    table = read(run).labelled
    found = classified(read(run))
    assert found is not None
    expected = prediction_table.suspected(table[["p_a", "p_b"]].to_numpy(), (table["label"] == "b").to_numpy(np.int64))
    rows = [(table.at[row, "row"], "ab"[other]) for row, other in expected.items()]
    assert [(each.row, each.suggested) for each in found.suspects] == rows[:SUSPECTS] and len(rows) > 5
    assert all(each.label != each.suggested for each in found.suspects)
    page = report.write(run).read_text()
    assert "Labels that are probably wrong" in page and "<u>" not in page


def test_labels_are_suspected_out_of_fold_alone(tmp_path: Path) -> None:
    found = classified(read(crossvalidated(tmp_path / "run", "classify")))
    assert found is not None and found.suspects == []


def test_a_contradiction_shows_rows_that_were_left_out(tmp_path: Path) -> None:
    left_out = [{**each, "label": "<other>"} for each in stored([77], "left out")]
    stages = {"duplicates": {"conflicts": [[place(2), place(77)]]}}
    run = make_pictured(
        tmp_path / "run", predictions(9), [*stored(list(range(9))), *left_out], recipe="crossval", stages=stages
    )
    ((first, second),) = section(run).conflicts
    assert (first.place, second.place) == (place(2), place(77)) and first.picture is not None
    assert second.picture is not None and second.label == "<other>" and second.chance == "left out"
