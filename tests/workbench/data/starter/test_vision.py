"""The shipped vision backbone is small, stock, and knows something; the shipped pictures are split by person."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageClassification, ViTForImageClassification

from workbench.config import RunConfig
from workbench.data.images.picture_sources import read_rows
from workbench.data.labelled import labelled_data
from workbench.data.starter import FOLDER
from workbench.evaluation.frozen_features import backbone_features, probe
from workbench.models import classifier

PICTURES = "starter/sign_digits.zip"


def test_the_backbone_is_a_small_stock_vit() -> None:
    model = AutoModelForImageClassification.from_pretrained(FOLDER / "vision")
    assert isinstance(model, ViTForImageClassification)
    assert sum(each.numel() for each in model.parameters()) < 2_000_000
    assert (FOLDER / "vision" / "model.safetensors").stat().st_size < 4_000_000
    assert (FOLDER / "sign_digits.zip").stat().st_size < 3_000_000


def test_nobody_stands_on_two_sides_of_the_split() -> None:
    people = dict[str, set[str]]()
    for part in ("train", "test", "unlabelled"):
        rows = list(read_rows(f"{PICTURES}/{part}"))
        people[part] = {Path(row.columns["image"].name).name[:9] for row in rows}
        if part != "unlabelled":
            counts = Counter(row.columns["label"] for row in rows)
            assert sorted(counts) == list("0123456789") and max(counts.values()) < 1.1 * min(counts.values())
    assert not people["train"] & people["test"] and not people["unlabelled"] & (people["train"] | people["test"])


@pytest.mark.nightly
def test_pretraining_tells_hands_apart_better_than_random_weights() -> None:
    data = {"format": "image", "train": f"{PICTURES}/train", "held_out": f"{PICTURES}/test", "limit": 400}
    values = {"recipe": "classify", "model": {"id": "starter/vision", "weights": "float32"}, "data": data}
    config = RunConfig.model_validate(values)
    reader = classifier.reader_of_backbone(config)
    rows = labelled_data.load(config, reader)

    def told(model: ViTForImageClassification) -> float:
        asked = classifier.classification_model(model.eval(), model, reader, rows.labels)
        seen = [backbone_features(asked, each.inputs) for each in (rows.train, rows.held_out)]
        labels = [[str(label) for label in each.labels] for each in (rows.train, rows.held_out)]
        return float(np.mean(probe(seen[0], labels[0], seen[1], labels[1])))

    pretrained = ViTForImageClassification.from_pretrained(FOLDER / "vision", num_labels=10)
    assert told(pretrained) > told(ViTForImageClassification(pretrained.config)) + 0.05
