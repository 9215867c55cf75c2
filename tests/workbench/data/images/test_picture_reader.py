"""Deep pictures are scaled by one range, decided over the training rows, kept with the run, and told where it fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.workbench.evaluation.picture_sets import picture_reader, write_pictures
from workbench.config.sections.image_config import ImageConfig
from workbench.data.images import picture_reader as readers
from workbench.data.images.picture_reader import PictureReader, saved_format
from workbench.errors import DataError

BRIGHT, DIM = 4000, 240
"""Brightest values; each by itself would be scaled from other bits."""


def write(folder: Path, brightest: list[int], kind: type[np.generic] = np.uint16) -> Path:
    """Class folders of ramps up to these values."""
    for number, value in enumerate(brightest):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        values = np.linspace(0, value, 32 * 32).reshape(32, 32) + number % 3
        Image.fromarray(values.astype(kind)).save(place / f"{number:02}.tiff")
    return folder


def reader(train: Path, **image: Any) -> PictureReader:
    return replace(picture_reader(train), image=ImageConfig.model_validate({"workers": 0, **image}))


def means(reader: PictureReader, folder: Path) -> list[float]:
    source = reader.read(str(folder), labelled=False)
    return [float(picture.mean()) for picture in reader.inputs(source).arrays()]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_brightness_is_that_of_the_values_and_not_of_each_file(tmp_path: Path, kind: type[np.generic]) -> None:
    train = write(tmp_path / "train", [BRIGHT, DIM, BRIGHT, DIM], kind)
    one, other, *_ = means(reader(train), train)
    assert other == pytest.approx(one * DIM / BRIGHT, abs=2)


@pytest.mark.parametrize("image", [{}, {"depth": 14}])
def test_a_run_keeps_its_range_and_reads_others_by_it(tmp_path: Path, image: dict[str, Any]) -> None:
    train = write(tmp_path / "train", [BRIGHT, DIM])
    asked = write(tmp_path / "asked", [DIM, DIM])
    now = reader(train, **image)
    expected = means(now, asked)
    now.save(tmp_path)
    kept = saved_format(tmp_path)
    assert kept.ranges is not None and kept.ranges.integers is not None
    assert kept.ranges == now.value_ranges() == ((0, 4095 if not image else 2**14 - 1), None)
    assert not (tmp_path / readers.PROCESSOR).exists()  # a stock processor clips such values
    later = replace(reader(tmp_path / "gone"), ranges=kept.ranges)
    assert means(later, asked) == expected
    picture = later.decoded(later.read(str(asked)).records[0])
    assert picture.max() == np.rint(DIM * 255 / kept.ranges.integers[1])


def test_values_beyond_the_range_are_refused_with_the_setting(tmp_path: Path) -> None:
    train, bright = write(tmp_path / "train", [DIM, 900]), write(tmp_path / "bright", [BRIGHT, BRIGHT])
    with pytest.raises(DataError, match=r"2 pictures of 2 cannot be read(.|\n)*beyond the 10 bits.*image\.depth=12"):
        reader(train).read(str(bright))
    assert means(reader(train, depth=12), bright)
    eight = write_pictures(tmp_path / "eight", rows=2)
    with pytest.raises(DataError, match=r"more than 8 bits a value, as no training picture(.|\n)*image\.depth=16"):
        reader(eight).read(str(bright))


def test_pictures_of_8_bits_are_the_same_whatever_the_depth(tmp_path: Path) -> None:
    train = write_pictures(tmp_path / "train", rows=4)
    stores = [reader(train, **image).read(str(train)).inputs for image in ({}, {"depth": 12})]
    for one, other in zip(*(store.arrays() for store in stores if store is not None), strict=True):
        np.testing.assert_array_equal(one, other)
    reader(train).save(tmp_path)
    assert saved_format(tmp_path).ranges == (None, None) and (tmp_path / readers.PROCESSOR).exists()
