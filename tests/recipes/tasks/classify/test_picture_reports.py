"""Runs on pictures keep the pictures that their pages show, for one adapter and for folds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests.vision_backbones import save_vision
from tests.workbench.evaluation.picture_sets import write_pictures
from workbench.config.yaml_text import dump_yaml
from workbench.report.run_record import read

CLASSES = ("<b>circle", "square")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "backbone").mkdir()
    pictures = write_pictures(folder / "rows", rows=48, classes=CLASSES)
    return {
        "model": {"id": save_vision(folder / "backbone", "ViT"), "weights": "float32"},
        "data": {"format": "image", "train": str(pictures)},
        "image": {"augment": {"preset": "strong"}, "workers": 0},
        "train": {"epochs": 2, "learning_rate": 0.01},
        "batch": {"size": 16},
    }


def run(folder: Path, sections: dict[str, Any], **more: Any) -> Path:
    (folder / "run.yaml").write_text(dump_yaml({**sections, **more}))
    workbench.run(folder / "run.yaml", out=folder / "run")
    return folder / "run"


def kinds(pictures: pd.DataFrame) -> dict[str, int]:
    return {str(kind): len(rows) for kind, rows in pictures.groupby("kind")}


def test_a_run_shows_its_held_out_rows_maps_and_training_pictures(tmp_path: Path, sections: dict[str, Any]) -> None:
    data = {**sections["data"], "held_out": 0.25}
    record = read(run(tmp_path, {**sections, "data": data}, recipe="classify"))
    held_out = set(record.predictions["row"])
    pictures = record.pictures
    assert kinds(pictures) == {"map": 8, "row": len(held_out), "trained": 6 * 4, "hard": 12}
    learnt = pictures["kind"].isin(["trained", "hard"])
    assert set(pictures.loc[~learnt, "row"]) == held_out
    assert not held_out & set(pictures.loc[learnt, "row"])
    page = (record.folder / "report.html").read_text()
    assert "Most uncertain" in page and "&lt;b&gt;circle" in page and "<b>circle" not in page
    assert not re.search(r"https?:", page) and "Pictures seen" in page


def test_folds_show_every_row_and_explain_those_that_an_adapter_did_not_train_on(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    record = read(run(tmp_path, sections, recipe="crossval", folds={"k": 2}, tta={"views": []}))
    fold = record.out_of_fold.set_index("row")["fold"]
    pictures = record.pictures
    assert kinds(pictures) == {"map": 8, "row": 48, "trained": 6 * 4, "hard": 12}
    explained = {fold[row] for row in pictures.loc[pictures["kind"] == "map", "row"]}
    trained = {fold[row] for row in pictures.loc[pictures["kind"] == "trained", "row"]}
    assert len(explained) == 1 and not explained & trained
    assert "By the adapter of the first fold" in (record.folder / "report.html").read_text()
