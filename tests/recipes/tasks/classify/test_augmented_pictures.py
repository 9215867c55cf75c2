"""Training rows of pictures are augmented and mixed, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.config.sections.image_config import AugmentConfig
from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled import labelled_data
from workbench.models import classifier


def test_rows_are_augmented_in_training_only_and_mixed_with_soft_labels(vit: str, drawings: Path) -> None:
    config = load_config(vit, drawings, ["image.augment.cutmix=1", "image.augment.horizontal_flip=1"])
    rows = labelled_data.load(config, classifier.reader_of_backbone(config)).train
    assert isinstance(rows.inputs, PictureRows)
    some = np.arange(24)
    plain, first, again = rows.batch(some), rows.batch(some, epoch=0), rows.batch(some[::-1].copy(), epoch=0)
    pixels = "pixel_values"
    assert not torch.equal(plain.inputs[pixels], first.inputs[pixels])
    assert torch.equal(first.inputs[pixels], again.inputs[pixels].flip(0)), "whatever stands beside a row"
    assert torch.equal(first.labels_N, again.labels_N.flip(0))
    assert not torch.equal(first.inputs[pixels], rows.batch(some, epoch=1).inputs[pixels])
    targets_BC = first.labels_N[:, 1:]
    torch.testing.assert_close(targets_BC.sum(1), torch.ones(24))
    assert ((targets_BC > 0.01) & (targets_BC < 0.99)).any() and (plain.labels_N[:, 1:].max(1).values == 1).all()
    half = rows.subset(np.arange(12))
    assert torch.equal(half.batch(np.arange(12)).inputs[pixels], plain.inputs[pixels][:12])


def load_config(vit: str, drawings: Path, words: list[str]) -> Any:
    from workbench.config import RunConfig
    from workbench.config.yaml_text import override
    from workbench.schema import parse

    values = {
        "recipe": "classify",
        "model": {"id": vit, "weights": "float32"},
        "data": {"format": "image", "train": str(drawings), "held_out": 0.2},
    }
    return parse(RunConfig, override(values, words), source="test")


def test_an_augmentation_that_changes_nothing_is_none(vit: str, drawings: Path) -> None:
    config = load_config(vit, drawings, [])
    assert not AugmentConfig().is_on
    rows = labelled_data.load(config, classifier.reader_of_backbone(config)).train
    some = np.arange(8)
    assert torch.equal(rows.batch(some).inputs["pixel_values"], rows.batch(some, epoch=3).inputs["pixel_values"])
