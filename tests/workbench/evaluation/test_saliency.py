"""A gradient map is the gradient: of a linear model its weights, wherever the picture is."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.vision_backbones import tiny_vision
from tests.workbench.evaluation.picture_sets import SIZE, picture_set
from workbench.data.images.picture_reader import PictureReader
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.evaluation import saliency
from workbench.models.classifier import Classifier


class Output:
    """What a transformers model returns."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight_C3HW = nn.Parameter(torch.randn((2, 3, SIZE, SIZE), generator=generator))

    def forward(self, pixel_values: Tensor) -> Output:
        return Output(torch.einsum("bchw,kchw->bk", pixel_values, self.weight_C3HW))


def linear(rows: LabelledSet, reader: PictureReader) -> Classifier:
    return Classifier(Linear(), None, reader, None, None)  # type: ignore[arg-type]


def test_the_map_of_a_linear_model_is_its_smoothed_weights(tmp_path: Path) -> None:
    rows, reader = picture_set(tmp_path, rows=4)
    model = linear(rows, reader)
    for output in (0, 1):
        weights_HW = model.model.weight_C3HW[output].detach().abs().amax(0).numpy()  # type: ignore[index]
        wanted = cv2.GaussianBlur(weights_HW, (0, 0), sigmaX=max(0.5, saliency.BLUR * SIZE))
        wanted = np.clip(wanted / np.percentile(wanted, 99), 0, 1)
        np.testing.assert_allclose(saliency.gradient_map(model, rows, 2, output=output), wanted, atol=1e-5)
    assert all(each.grad is None for each in model.model.parameters())


def test_a_flat_map_has_no_colour_and_a_full_one_does() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    none, full = np.zeros((8, 8), np.float32), np.ones((8, 8), np.float32)
    grey = saliency.overlay(picture, none)
    assert (grey == grey[:, :, :1]).all()
    assert np.abs(grey[:, :, 0].astype(float) - picture.mean(2)).max() <= 0.5
    assert (saliency.overlay(picture, full) != grey).any()
    np.testing.assert_array_equal(saliency.smoothed(none), none)


def test_gradients_that_overflow_are_left_out() -> None:
    map_HW = np.ones((8, 8), np.float32)
    map_HW[2, 3], map_HW[5, 5] = np.inf, np.nan
    found = saliency.smoothed(map_HW)
    assert np.isfinite(found).all() and 0 <= found.min() < found.max() <= 1


@pytest.mark.parametrize("name", ["ConvNext", "ResNet", "Swin", "ViT"])
def test_every_kind_of_backbone_has_a_map_of_its_picture_alone(tmp_path: Path, name: str) -> None:
    rows, reader = picture_set(tmp_path, rows=6)
    model = Classifier(tiny_vision(name).eval(), None, reader, None, None)  # type: ignore[arg-type]
    found = saliency.gradient_map(model, rows, 3, output=1)
    assert found.shape == (SIZE, SIZE) and found.max() == 1 and found.std() > 0.01
    alone = rows.subset(np.asarray([3]))
    np.testing.assert_array_equal(saliency.gradient_map(model, alone, 0, output=1), found)
