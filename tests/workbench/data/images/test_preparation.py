"""Preparation: each step as its definition says, in the order of the configuration, without side effects."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.workbench.data.images.pictures import photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images import preparation
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.preparation import PictureStatistics, prepare

FORMAT = PictureFormat(32, 32, "stretch", (32, 32), Image.Resampling.BILINEAR, (0.5, 0.4, 0.3), (0.5, 0.5, 0.5))
EVERYTHING = PrepareConfig.model_validate(
    {"median": 3, "standardise": "picture", "edges": "sobel", "edges_as": "overlay", "crop_to_object": 0.1,
     "fit": "pad", "colour": "grey"}
)  # fmt: skip


CHOICES: dict[str, list[object]] = {
    "median": [None, 3, 5],
    "standardise": ["none", "picture", "data"],
    "edges": ["none", "canny", "sobel"],
    "edges_as": ["replace", "overlay"],
    "crop_to_object": [None, 0.0, 0.5],
    "fit": ["backbone", "stretch", "crop", "pad"],
    "colour": ["colour", "grey"],
}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
)
def test_every_setting_gives_the_size_and_changes_nothing_outside(
    height: int, width: int, values: dict[str, object]
) -> None:
    if values["edges"] == "none":
        del values["edges_as"]  # refused where there are no edges
    config = PrepareConfig.model_validate(values)
    statistics = PictureStatistics((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    picture = photograph(height, width)
    before = picture.copy()
    first, second = (prepare(picture, config, FORMAT, statistics) for _ in range(2))
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(picture, before)
    if config.colour == "grey":
        assert (first == first[:, :, :1]).all()


def test_only_the_size_changes_by_default() -> None:
    picture = photograph(32, 32)
    np.testing.assert_array_equal(prepare(picture, PrepareConfig(), FORMAT), picture)


def test_steps_are_those_of_the_configuration_in_its_order() -> None:
    names = [name for name, _ in preparation.steps(photograph(50, 60), EVERYTHING, FORMAT)]
    assert names == ["median", "standardise", "edges", "crop_to_object", "resize", "grey"]
    assert [name for name, _ in preparation.steps(photograph(50, 60), PrepareConfig(), FORMAT)] == ["resize"]


def test_the_median_removes_single_pixels() -> None:
    flat = np.full((32, 32, 3), 90, np.uint8)
    noisy = flat.copy()
    noisy[::4, ::4] = 255
    np.testing.assert_array_equal(prepare(noisy, PrepareConfig(median=3), FORMAT), flat)


def test_standardised_pictures_do_not_depend_on_brightness_and_contrast() -> None:
    picture = photograph(32, 32)
    darker = np.rint(picture * 0.5 + 20).astype(np.uint8)
    config = PrepareConfig(standardise="picture")
    one, other = (prepare(each, config, FORMAT).astype(int) for each in (picture, darker))
    assert np.abs(one - other).max() <= 2
    within = (one > 0) & (one < 255)
    scores = (picture - picture.mean()) / picture.std()
    np.testing.assert_allclose(one[within], (127.5 + 42.5 * scores)[within], atol=0.51)


def test_statistics_of_the_data_are_used_channel_by_channel() -> None:
    picture = photograph(32, 32)
    statistics = PictureStatistics((10.0, 120.0, 200.0), (60.0, 70.0, 80.0))
    found = prepare(picture, PrepareConfig(standardise="data"), FORMAT, statistics)
    scores = (picture - np.asarray(statistics.mean)) / np.asarray(statistics.std)
    np.testing.assert_allclose(found, (127.5 + 42.5 * scores).clip(0, 255), atol=0.51)


def square(*, light: bool, top: int = 20, left: int = 50, side: int = 24) -> Pixels:
    """A square on another grey, 80 x 120."""
    picture = np.full((80, 120, 3), 60 if light else 200, np.uint8)
    picture[top : top + side, left : left + side] = 220 if light else 40
    return picture


@pytest.mark.parametrize("kind", ["canny", "sobel"])
def test_edges_lie_where_the_brightness_changes(kind: str) -> None:
    edges = getattr(preparation, kind)(square(light=True)) > 0
    rows, columns = np.nonzero(edges)
    assert edges.any() and not edges[25:40, 55:70].any()
    assert rows.min() in (18, 19, 20) and rows.max() in (43, 44, 45)
    assert columns.min() in (48, 49, 50) and columns.max() in (73, 74, 75)
    assert not getattr(preparation, kind)(np.full((20, 20, 3), 70, np.uint8)).any()


def test_edges_of_canny_do_not_depend_on_contrast() -> None:
    picture = photograph(64, 64)
    edges, faint = (preparation.canny(each) > 0 for each in (picture, picture // 4 + 90))
    assert (edges & faint).sum() > 0.8 * (edges | faint).sum()


def test_overlaid_edges_are_white_on_the_picture() -> None:
    picture = square(light=False)
    config = PrepareConfig(edges="canny", edges_as="overlay")
    _, found = next(iter(preparation.steps(picture, config, FORMAT)))
    edges = preparation.canny(picture) > 0
    assert (found[edges] == 255).all()
    np.testing.assert_array_equal(found[~edges], picture[~edges])


@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_the_object_is_cropped_whether_it_is_light_or_dark(light: bool, margin: float) -> None:
    border = round(margin * 24)
    found = preparation.cropped_to_object(square(light=light), margin=margin)
    assert abs(found.shape[0] - 24 - 2 * border) <= 4 and abs(found.shape[1] - 24 - 2 * border) <= 4
    moved = preparation.cropped_to_object(square(light=light, top=30, left=20), margin=margin)
    np.testing.assert_array_equal(found, moved)


def test_a_margin_ends_at_the_pictures_border() -> None:
    picture = square(light=True, top=0, left=0)
    assert preparation.cropped_to_object(picture, margin=1.0).shape[0] <= 24 * 2 + 2


@pytest.mark.parametrize(
    "picture",
    [
        np.full((30, 30, 3), 80, np.uint8),
        np.random.default_rng(0).integers(120, 130, (60, 60, 3), np.uint8),
        square(light=True, side=3),
        photograph(1, 50),
    ],
)
def test_a_picture_without_an_object_stays_whole(picture: Pixels) -> None:
    assert preparation.cropped_to_object(picture, margin=0.1).shape == picture.shape


@pytest.mark.parametrize("shape", [(64, 128), (100, 50), (1, 300), (33, 32)])
def test_fits(shape: tuple[int, int]) -> None:
    picture = np.full((*shape, 3), 200, np.uint8)
    stretched, cropped, padded = (
        prepare(picture, PrepareConfig.model_validate({"fit": fit}), FORMAT) for fit in ("stretch", "crop", "pad")
    )
    assert (stretched == 200).all() and (cropped == 200).all()
    mean = np.rint(np.asarray(FORMAT.mean) * 255)
    covered = (padded == 200).all(axis=2)
    assert (covered | (padded == mean).all(axis=2)).all()
    short, long = min(shape), max(shape)
    assert covered.sum() == 32 * max(1, 32 * short // long)


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(prepare(stripes, PrepareConfig(), FORMAT).astype(int) - 128).max() <= 6


def test_grey_is_the_luma_of_the_resized_picture() -> None:
    picture = photograph(32, 32)
    grey = prepare(picture, PrepareConfig(colour="grey"), FORMAT)[:, :, 0]
    np.testing.assert_array_equal(grey, cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY))


@pytest.mark.parametrize("config", [PrepareConfig(), EVERYTHING])
def test_an_image_is_prepared_like_its_pixels(config: PrepareConfig) -> None:
    picture = photograph(50, 60)
    found = preparation.prepare(Image.fromarray(picture), config, FORMAT)
    np.testing.assert_array_equal(found, preparation.prepare(picture, config, FORMAT))
