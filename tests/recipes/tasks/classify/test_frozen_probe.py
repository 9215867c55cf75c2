"""Runs keep what the frozen backbone knows and the neighbours of mistakes, and train to the same bits without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.vision_backbones import save_vision
from tests.workbench.evaluation.picture_sets import write_pictures
from workbench.config.yaml_text import dump_yaml
from workbench.recipes.load import load
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.verbs.check import check
from workbench.report.run_record import RunRecord, read


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "backbone").mkdir()
    pictures = write_pictures(folder / "rows", rows=60)
    common = {"train": {"epochs": 1, "learning_rate": 0.01}, "batch": {"size": 16}}
    return {
        "pictures": common
        | {
            "model": {"id": save_vision(folder / "backbone", "ViT"), "weights": "float32"},
            "data": {"format": "image", "train": str(pictures)},
            "image": {"augment": {"preset": "strong"}, "workers": 0},
        },
        "texts": common
        | {
            "model": {"weights": "float32"},
            "data": {"train": "starter/banking77_train.csv", "limit": 160},
            "classes": {"every_class": False},
        },
    }


def run(folder: Path, name: str, sections: dict[str, Any], **more: Any) -> RunRecord:
    merged = {key: {**sections.get(key, {}), **more[key]} if isinstance(more.get(key), dict) else more.get(key, value)
              for key, value in {**sections, **more}.items()}  # fmt: skip
    (folder / f"{name}.yaml").write_text(dump_yaml(merged))
    workbench.run(folder / f"{name}.yaml", out=folder / name)
    return read(folder / name)


@pytest.mark.nightly(but=["crossval-pictures"])
@pytest.mark.parametrize("rows", ["pictures", pytest.param("texts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_the_same_training_with_and_without(
    rows: str, recipe: str, tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    more: dict[str, Any] = {"recipe": recipe, "data": {}} | (
        {"data": {"held_out": 0.3}} if recipe == "classify" else {"folds": {"k": 2, "every_class": False}}
    )
    plain = run(tmp_path, "plain", sections[rows], **more, evaluate={"probe": 0})
    probed = run(tmp_path, "probed", sections[rows], **more, evaluate={"probe": 600})
    for column in ("loss", "grad_norm", "held_out_loss"):
        assert plain.metrics[column].equals(probed.metrics[column]), column
    assert plain.scores.items() <= probed.scores.items() and "simple_baseline" not in plain.scores
    assert not plain.probe and plain.neighbours.empty and "The frozen backbone alone" in page(probed)
    assert 0 <= probed.probe["linear"] <= 1 and probed.probe["compared"] == probed.probe["rows"]
    labelled = probed.labelled.set_index("row")
    wrong = labelled[labelled["label"] != labelled["predicted"]]
    assert not probed.neighbours.empty and set(wrong.index[:1]) <= set(labelled.index)
    if recipe == "crossval":
        folds = labelled["fold"]
        assert (folds[probed.neighbours["row"]].to_numpy() != folds[probed.neighbours["neighbour"]].to_numpy()).all()
    if rows == "pictures":
        kept = probed.pictures[probed.pictures["kind"].isin(["neighbour", "row"])]
        assert kept["row"].is_unique and set(probed.neighbours["neighbour"]) <= set(kept["row"])
        assert 'class="near"' in page(probed)
    else:
        assert "Most like it among the" in page(probed)
    assert not re.search(r"https?:", page(probed))


def page(record: RunRecord) -> str:
    return (record.folder / "report.html").read_text()


def test_check_tells_what_the_backbone_knows_unless_told_not_to() -> None:
    asked = ("data.limit=200", "data.held_out=0.3", "classes.every_class=false")
    found, silent = (check(load("classify/quickstart", [*asked, f"evaluate.probe={rows}"])) for rows in ("auto", 0))
    assert isinstance(found, ClassInspection) and isinstance(silent, ClassInspection)
    assert re.fullmatch(
        r"The frozen backbone alone: k-NN 0\.\d\d, linear probe 0\.\d\d \(.* others\)\. Without a backbone, logistic "
        r".*: accuracy 0\.\d+; the same answer for every row 0\.\d+\. "
        r"(More than the frozen .* holds back\. )?`workbench features` .*",
        found.probe,
    )
    assert silent.probe == ""
