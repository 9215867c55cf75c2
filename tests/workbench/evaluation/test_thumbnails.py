"""A gradient map is the gradient: of a linear model its weights, wherever the picture is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.vision_backbones import tiny_vision
from tests.workbench.data.images.pictures import photograph
from tests.workbench.evaluation.picture_sets import SIZE, picture_set
from tests.workbench.evaluation.test_prediction_table import CELLS, table
from workbench.data.images import augmentation
from workbench.data.images.picture_reader import PictureReader, PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Kind
from workbench.evaluation import thumbnails, training_dynamics
from workbench.evaluation.prediction_table import ranked
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
        wanted = cv2.GaussianBlur(weights_HW, (0, 0), sigmaX=max(0.5, thumbnails.BLUR * SIZE))
        wanted = np.clip(wanted / np.percentile(wanted, 99), 0, 1)
        np.testing.assert_allclose(thumbnails.gradient_map(model, rows, 2, output=output), wanted, atol=1e-5)
    assert all(each.grad is None for each in model.model.parameters())


def test_a_flat_map_has_no_colour_and_a_full_one_does() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    none, full = np.zeros((8, 8), np.float32), np.ones((8, 8), np.float32)
    grey = thumbnails.overlay(picture, none)
    assert (grey == grey[:, :, :1]).all()
    assert np.abs(grey[:, :, 0].astype(float) - picture.mean(2)).max() <= 0.5
    assert (thumbnails.overlay(picture, full) != grey).any()
    np.testing.assert_array_equal(thumbnails.smoothed(none), none)


def test_gradients_that_overflow_are_left_out() -> None:
    map_HW = np.ones((8, 8), np.float32)
    map_HW[2, 3], map_HW[5, 5] = np.inf, np.nan
    found = thumbnails.smoothed(map_HW)
    assert np.isfinite(found).all() and 0 <= found.min() < found.max() <= 1


@pytest.mark.parametrize("name", ["ConvNext", "ResNet", "Swin", "ViT"])
def test_every_kind_of_backbone_has_a_map_of_its_picture_alone(tmp_path: Path, name: str) -> None:
    rows, reader = picture_set(tmp_path, rows=6)
    model = Classifier(tiny_vision(name).eval(), None, reader, None, None)  # type: ignore[arg-type]
    found = thumbnails.gradient_map(model, rows, 3, output=1)
    assert found.shape == (SIZE, SIZE) and found.max() == 1 and found.std() > 0.01
    alone = rows.subset(np.asarray([3]))
    np.testing.assert_array_equal(thumbnails.gradient_map(model, alone, 0, output=1), found)


def pixels(jpeg: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(jpeg)) as image:
        assert image.format == "JPEG" and image.mode == "RGB"
        return np.asarray(image).astype(float)


def predictions(rows: LabelledSet, seed: int = 0) -> pd.DataFrame:
    """Random predictions of two classes."""
    p_N = np.random.default_rng(seed).random(len(rows))
    said = ["a" if p > 0.5 else "b" for p in p_N]
    found = {"row": [each.place for each in rows.records], "label": rows.labels, "predicted": said}
    return pd.DataFrame({**found, "p_a": p_N, "p_b": 1 - p_N})


@pytest.mark.parametrize("shape", [(20, 20), (96, 50), (300, 200), (10, 500)])
def test_a_jpeg_decodes_to_its_picture(shape: tuple[int, int]) -> None:
    picture = photograph(*shape)
    found = pixels(thumbnails.jpeg(picture))
    assert max(found.shape) == min(thumbnails.SIDE, max(shape))
    size = (found.shape[1], found.shape[0])
    wanted = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS)).astype(float)
    assert np.abs(found - wanted).mean() < 8


@pytest.mark.parametrize("kind", sorted(CELLS))
def test_rows_are_chosen_by_their_worth(kind: Kind) -> None:
    found = table(kind, 300)
    ranking, rows = ranked(found), thumbnails.chosen(found, first=[7, 5], most=120)
    assert len(rows) == len(set(rows)) == 120 and rows[:2] == [7, 5]
    assert set(ranking.mistakes[: thumbnails.NOTABLE]) <= set(rows)
    assert set(ranking.uncertain[: thumbnails.NOTABLE]) <= set(rows)
    cells = {(str(label), str(said)) for label, said in zip(found["label"], found["predicted"], strict=True)}
    if kind != "number":
        assert {(str(found["label"].iat[row]), str(found["predicted"].iat[row])) for row in rows} == cells
    assert ranking.right_N[rows].any()
    assert sorted(thumbnails.chosen(found)) == list(range(300)), "all, where there is room"


def test_pictures_of_rows_are_their_pictures_and_bounded(tmp_path: Path) -> None:
    rows, reader = picture_set(tmp_path, rows=30)
    found = predictions(rows)
    inputs = rows.inputs
    assert isinstance(inputs, PictureRows)
    kept = thumbnails.of_rows(rows, reader, found)
    number_of = {record.place: number for number, record in enumerate(rows.records)}
    assert [number_of[each.row] for each in kept] == thumbnails.chosen(found)
    for each in kept:
        assert np.abs(pixels(each.jpeg) - inputs.picture(number_of[each.row])).mean() < 8
        assert each.image == reader.describe(rows.records[number_of[each.row]]) and each.label in ("a", "b")
    most = sum(len(each.jpeg) for each in kept[:10])
    assert thumbnails.of_rows(rows, reader, found, most_bytes=most) == kept[:10]


@pytest.mark.parametrize("augment", [{"preset": "light"}, {"preset": "strong"}, {"horizontal_flip": 0.5}], ids=str)
def test_training_pictures_are_what_the_model_read(tmp_path: Path, augment: dict[str, Any]) -> None:
    rows, _ = picture_set(tmp_path, rows=12, augment=augment)
    inputs = rows.inputs
    assert isinstance(inputs, PictureRows) and inputs.augmenter is not None
    config = inputs.augmenter.config
    for epoch in (0, 3):
        read, share = thumbnails.read_in_epoch(inputs, 4, epoch)
        batch = rows.batch(np.asarray([4]), epoch=epoch)
        again = batch.inputs["pixel_values"][0].numpy()
        label = float(batch.labels_N[0, 1 + rows.targets_NC[4].argmax()])
        assert label == pytest.approx(share) or label == 1.0, "the other row has the same label"
        scale_3, shift_3 = inputs.format.affine
        np.testing.assert_allclose(read * scale_3 + shift_3, again.transpose(1, 2, 0), atol=1e-4)
        if not config.mixes:
            key, progress = int(inputs.key_N[4]), epoch / 3
            wanted = augmentation.augment(
                inputs.picture(4), config, seed=3, epoch=epoch, row=key, progress=progress, multiple=8
            )
            np.testing.assert_array_equal(read, wanted)


def test_a_training_picture_stands_in_all_its_states(tmp_path: Path) -> None:
    rows, reader = picture_set(tmp_path, rows=12, augment={"preset": "light"}, epochs=10)
    found = thumbnails.as_trained(rows, reader)
    states = ["file", "prepared", *(f"epoch {number}" for number in (1, 3, 5, 6, 8, 10))]
    assert [each.caption for each in found] == states * thumbnails.TRAINED
    assert {each.label for each in found} == {"a", "b"}
    assert pixels(found[0].jpeg).shape == (40, 40, 3) and pixels(found[1].jpeg).shape == (SIZE, SIZE, 3)
    Path(found[0].image).unlink()  # the run goes on without a file that is gone
    assert [each.caption for each in thumbnails.as_trained(rows, reader)][:2] == ["prepared", "epoch 1"]
    plain, reader = picture_set(tmp_path / "plain", rows=3)
    assert [each.caption for each in thumbnails.as_trained(plain, reader)] == ["file", "prepared"] * 3


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    rows, reader = picture_set(tmp_path, rows=12)
    thumbnails.write(tmp_path, reader, rows, predictions(rows), train=rows)
    found = pd.read_parquet(tmp_path / thumbnails.FILE)
    assert list(found) == ["row", "image", "kind", "label", "caption", "jpeg", "sound"]
    assert found["kind"].value_counts().to_dict() == {"row": 12, "trained": 2 * thumbnails.TRAINED}


def test_the_hardest_training_rows_are_kept_where_they_were_recorded(tmp_path: Path) -> None:
    rows, reader = picture_set(tmp_path, rows=20)
    held_out, train = rows.subset(np.arange(20) < 5), rows.subset(np.arange(20) >= 5)
    confidence_N = np.linspace(1, 0, 15)
    places = [train.place(number) for number in range(15)]
    pd.DataFrame({"row": places, "confidence": confidence_N}).to_parquet(tmp_path / training_dynamics.FILE)
    thumbnails.write(tmp_path, reader, held_out, predictions(held_out), train=train)
    found = pd.read_parquet(tmp_path / thumbnails.FILE)
    hard = found[found["kind"] == "hard"]
    assert set(hard["row"]) == set(places[-training_dynamics.HARDEST :]) and len(hard) == training_dynamics.HARDEST
    inputs = train.inputs
    assert isinstance(inputs, PictureRows)
    for place, jpeg in zip(hard["row"], hard["jpeg"], strict=True):
        wanted = inputs.picture(places.index(place)).astype(int)
        assert np.abs(pixels(jpeg).astype(int) - wanted).mean() < 12
