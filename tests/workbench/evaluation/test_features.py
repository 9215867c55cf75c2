"""Features are what the head reads, whatever the batch, and tell labels that can be told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.conftest import MINILM, write_animals
from tests.run_files import write_lines
from tests.vision_backbones import SIZE, save_vision
from workbench.config import RunConfig
from workbench.data.labelled import labelled_data
from workbench.errors import ConfigError
from workbench.evaluation.features import PARTS, STRENGTH, UNKNOWN, features, probe, probe_losses
from workbench.models import backbones, classifier, row_readers
from workbench.recipes import features as verb


def config(model: str, train: str, **data: object) -> RunConfig:
    values = {"recipe": "classify", "model": {"id": model, "weights": "float32"}, "data": {"train": train, **data}}
    return RunConfig.model_validate(values)


def read(config: RunConfig, rows: int) -> tuple[classifier.Classifier, labelled_data.LabelledSet]:
    reader = row_readers.of_backbone(config)
    data = labelled_data.load(config, reader)
    backbone = backbones.load(config.model, reader.tokenizer, task=classifier.task(data.labels, seed=0)).model
    return classifier.classification_model(backbone, backbone, reader, data.labels), data.train.subset(np.arange(rows))


@pytest.mark.parametrize("name", ["encoder", "causal", "ViT", "ResNet"])
def test_features_are_what_the_head_reads(name: str, tmp_path: Path) -> None:
    if name in ("ViT", "ResNet"):
        train = "starter/sign_digits.zip/test"
        asked = config(save_vision(tmp_path, name), train, format="image", held_out=0.3)
        asked = asked.model_copy(update={"image": asked.image.model_copy(update={"size": SIZE})})
    else:
        asked = config(MINILM if name == "encoder" else "starter", "starter/banking77_train.csv", limit=400)
    model, rows = read(asked, 12)
    found = features(model, rows.inputs)
    head = model.backbone.get_submodule({"causal": "score"}.get(name, "classifier"))
    with torch.no_grad():
        said = head(torch.from_numpy(found)[:, :, None, None] if name == "ResNet" else torch.from_numpy(found))
        expected = model.outputs(rows.batch(np.arange(12)))
    torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-4)
    alone = np.concatenate([features(model, rows.inputs.take(np.asarray([number]))) for number in range(12)])
    np.testing.assert_allclose(alone, found, rtol=1e-3, atol=1e-4)


def clouds(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of three classes with noise, and the classes."""
    rng = np.random.default_rng(0)
    class_N = np.arange(rows) % 3
    return (rng.normal(size=(3, 20))[class_N] + 0.3 * rng.normal(size=(rows, 20))).astype(np.float32), class_N


def test_losses_are_those_of_probes_that_never_saw_the_row() -> None:
    """Written out by scikit-learn's own cross-validation over the same parts."""
    features_ND, class_N = clouds(60)
    part_N = np.random.default_rng([7, 12]).permutation(60) % PARTS
    said_NC = cross_val_predict(
        make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH)),
        *(features_ND, class_N),
        cv=PredefinedSplit(part_N),
        method="predict_proba",
    )
    found = probe_losses(features_ND, class_N, seed=7)
    np.testing.assert_allclose(found, -np.log(said_NC[np.arange(60), class_N]), atol=6e-4)


def test_wrong_labels_and_a_class_of_one_row_are_the_hardest() -> None:
    features_ND, class_N = clouds(90)
    class_N[[4, 40]] = (class_N[[4, 40]] + 1) % 3
    class_N[50] = 3
    found = probe_losses(features_ND, class_N, seed=0)
    assert {*np.argsort(-found)[:3].tolist()} == {4, 40, 50}
    assert found[50] == pytest.approx(-np.log(UNKNOWN), abs=1e-3) and (found >= 0).all()


def test_what_can_be_told_is_told_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    labels = [str(number % 3) for number in range(120)]
    centres = rng.normal(size=(3, 20))
    clear = (np.stack([centres[int(label)] for label in labels]) + 0.1 * rng.normal(size=(120, 20))).astype(np.float32)
    assert probe(clear[:90], labels[:90], clear[90:], labels[90:]) == (1, 1)
    noise = rng.normal(size=(120, 20)).astype(np.float32)
    assert max(probe(noise[:90], labels[:90], noise[90:], labels[90:])) < 0.65


def test_the_verb_writes_features_with_rows_and_labels(tmp_path: Path) -> None:
    asked = config("starter", "starter/banking77_train.csv", limit=240, held_out=0.25)
    asked = asked.model_copy(update={"classes": asked.classes.model_copy(update={"every_class": False})})
    found = verb.write(asked, tmp_path / "f.parquet")
    table = pd.read_parquet(tmp_path / "f.parquet")
    assert table["split"].value_counts().to_dict() == found.rows == {"train": 180, "held_out": 60}
    assert len(table["features"][0]) == found.width and list(table.columns[:2]) == ["row", "text"]
    assert found.known is not None and found.known.probe.linear > found.known.likeliest
    assert "linear probe" in found.sentence
    with pytest.raises(ConfigError, match="Name a recipe of classify or crossval"):
        verb.write(asked.model_copy(update={"recipe": "sft"}), None)


def test_the_verb_writes_features_of_folds_test_and_unlabelled_rows(tmp_path: Path, stories: str) -> None:
    write_animals(tmp_path / "train.jsonl", range(60))
    write_animals(tmp_path / "test.jsonl", range(100, 109))
    rows = [{"text": f"An owl has {number} eggs."} for number in range(5)]
    write_lines(tmp_path / "more.jsonl", rows)
    data = {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl")}
    sections = {"model": {"id": stories}, "data": data, "pseudo_label": {"unlabelled": str(tmp_path / "more.jsonl")}}
    sections["duplicates"] = {"on_duplicate": "ignore"}
    found = verb.write(RunConfig.model_validate({"recipe": "crossval", **sections}), tmp_path / "f.parquet")
    table = pd.read_parquet(tmp_path / "f.parquet")
    assert table["split"].value_counts().to_dict() == found.rows
    assert set(found.rows) == {"train", "test", "unlabelled"} and found.rows["unlabelled"] == 5
    assert found.known is not None and found.known.classes == 3
    assert table["label"][table["split"] == "unlabelled"].isna().all()


@pytest.mark.parametrize("kind", ["several", "number"])
def test_labels_that_are_not_one_class_have_features_and_no_probe(kind: str, tmp_path: Path, stories: str) -> None:
    labels = (lambda n: ["odd"] * (n % 2) + ["high"] * (n > 9)) if kind == "several" else (lambda n: n / 2)
    rows = [{"text": f"It is {number}.", "label": labels(number)} for number in range(20)]
    write_lines(tmp_path / "rows.jsonl", rows)
    sections = {"model": {"id": stories}, "data": {"train": str(tmp_path / "rows.jsonl"), "held_out": 0.25}}
    asked = RunConfig.model_validate({"recipe": "classify", **sections, "classes": {"kind": kind}})
    found = verb.write(asked, tmp_path / "f.parquet")
    assert found.known is None and "not one class" in found.sentence
    assert pd.read_parquet(tmp_path / "f.parquet")["label"].notna().all()
