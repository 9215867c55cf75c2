"""Augmented pictures depend on seed, epoch, row, repeat and progress alone; each change does what its setting says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from workbench.config.sections.image_config import AugmentConfig
from workbench.data.images.augmentation import augment, output_size, rectangle

EVERYTHING: dict[str, Any] = {
    "crop_scale": [0.3, 1],
    "horizontal_flip": 0.5,
    "vertical_flip": 0.5,
    "rotation": 20,
    "translate": 0.1,
    "shear": 10,
    "randaugment": 2,
    "brightness": 0.3,
    "contrast": 0.3,
    "gamma": 0.5,
    "saturation": 0.5,
    "hue": 0.1,
    "blur": 1.5,
    "erasing": 0.5,
}
GEOMETRIC: list[dict[str, Any]] = [
    {"crop_scale": [0.1, 0.9]},
    {"horizontal_flip": 1},
    {"vertical_flip": 1},
    {"rotation": 180},
    {"translate": 0.5},
    {"shear": 40},
    {"blur": 3},
]


def picture(height: int = 32, width: int = 32, seed: int = 0) -> NDArray[np.uint8]:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC), dtype=np.uint8)


def augmented(settings: dict[str, Any], given: NDArray[np.uint8] | None = None, **place: Any) -> NDArray[np.uint8]:
    where = {"seed": 1, "epoch": 2, "row": 3, **place}
    return augment(picture() if given is None else given, AugmentConfig.model_validate(settings), **where)


def test_every_change_is_off_by_default() -> None:
    assert not AugmentConfig().is_on
    np.testing.assert_array_equal(augmented({}), picture())


def test_same_place_same_picture_other_place_other_picture() -> None:
    first = augmented(EVERYTHING)
    np.testing.assert_array_equal(first, augmented(EVERYTHING))
    for other in ({"seed": 2}, {"epoch": 3}, {"row": 4}, {"repeat": 1}):
        assert (augmented(EVERYTHING, **other) != first).any()


def test_the_order_of_calls_does_not_matter_and_the_stored_picture_stays() -> None:
    stored = picture()
    forwards = [augmented(EVERYTHING, stored, row=row) for row in range(8)]
    backwards = [augmented(EVERYTHING, stored, row=row) for row in reversed(range(8))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    np.testing.assert_array_equal(stored, picture())


def test_pictures_of_a_read_only_file_are_augmented_like_those_of_memory(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_bytes(np.stack([picture(seed=seed) for seed in range(3)]).tobytes())
    stored_NHW3 = np.memmap(tmp_path / "pictures", dtype=np.uint8, mode="r", shape=(3, 32, 32, 3))
    for settings in (EVERYTHING, {"horizontal_flip": 1}, {"erasing": 1}, {}):
        for row in range(3):
            seen = augmented(settings, stored_NHW3[row], row=row)
            np.testing.assert_array_equal(seen, augmented(settings, picture(seed=row), row=row))


def test_threads_of_opencv_do_not_matter() -> None:
    large, before = picture(256, 256), cv2.getNumThreads()
    try:
        results = []
        for threads in (1, 4):
            cv2.setNumThreads(threads)
            results.append([augmented(EVERYTHING, large, row=row) for row in range(4)])
    finally:
        cv2.setNumThreads(before)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("settings", [EVERYTHING, {"trivialaugment": True}])
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (33, 21)])
def test_keeps_shape_and_type(settings: dict[str, Any], size: tuple[int, int]) -> None:
    for row in range(20):
        result = augmented(settings, picture(*size), row=row)
        assert result.shape == (*size, 3) and result.dtype == np.uint8


@pytest.mark.parametrize("settings", [EVERYTHING, {"trivialaugment": True}, {"erasing": 1}])
def test_grey_pictures_stay_grey(settings: dict[str, Any]) -> None:
    grey = np.repeat(picture()[:, :, :1], 3, axis=2)
    for row in range(40):
        result = augmented(settings, grey, row=row)
        assert (result == result[:, :, :1]).all() and len(np.unique(result)) > 2


@pytest.mark.parametrize("settings", GEOMETRIC, ids=lambda each: next(iter(each)))
def test_changes_of_place_leave_one_colour_alone(settings: dict[str, Any]) -> None:
    flat = np.full((32, 32, 3), (200, 100, 50), dtype=np.uint8)
    for row in range(10):
        np.testing.assert_array_equal(augmented(settings, flat, row=row), flat)


@pytest.mark.parametrize("axis, name", [(1, "horizontal_flip"), (0, "vertical_flip")])
def test_flips_mirror_an_axis_as_often_as_they_say(axis: int, name: str) -> None:
    np.testing.assert_array_equal(augmented({name: 1}), np.flip(picture(), axis))
    count = sum((augmented({name: 0.3}, row=row) != picture()).any() for row in range(1000))
    assert 250 < count < 350


def test_a_flip_mirrors_the_crop_that_would_be_drawn_without_it() -> None:
    settings = {"crop_scale": [0.4, 0.8]}
    straight, flipped = augmented(settings), augmented({**settings, "horizontal_flip": 1})
    np.testing.assert_allclose(flipped.astype(int), straight[:, ::-1].astype(int), atol=2)


def test_crops_have_the_areas_and_ratios_that_are_asked_for() -> None:
    rng = np.random.default_rng(0)
    found = [rectangle((64, 64), (0.2, 0.6), (0.5, 2.0), rng.random(20).tolist()) for _ in range(2000)]
    sides = np.array([each for each in found if each is not None])
    assert len(sides) > 1990
    area, ratio = sides.prod(1) / 64**2, sides[:, 1] / sides[:, 0]
    assert 0.2 <= area.min() < 0.22 and 0.58 < area.max() <= 0.6
    assert 0.5 <= ratio.min() < 0.55 and 1.8 < ratio.max() <= 2.0


def test_a_crop_is_a_part_of_the_picture_at_full_size() -> None:
    """A ramp from left to right stays a ramp, with a slope of the crop's share of the width."""
    ramp = np.repeat(np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None], 64, 0), 3, 2)
    for row in range(20):
        result = augmented({"crop_scale": [0.25, 0.25], "crop_ratio": [1, 1]}, ramp, row=row).astype(int)
        inner = np.diff(result[32, 2:-2, 0])
        assert abs(inner.mean() - 2) < 0.1 and (np.ptp(result, axis=0) <= 1).all()


def test_erasing_changes_a_rectangle_of_the_area_it_says() -> None:
    flat = np.full((64, 64, 3), 128, dtype=np.uint8)
    settings = {"erasing": 1, "erasing_area": [0.1, 0.3], "erasing_fill": "black"}
    for row in range(50):
        erased = (augmented(settings, flat, row=row) == 0).all(2)
        rows, columns = erased.any(1), erased.any(0)
        assert 0.09 < erased.mean() < 0.31
        assert erased.sum() == rows.sum() * columns.sum()


@pytest.mark.parametrize("fill, expected", [("mean", 128), ("black", 0)])
def test_erased_pixels_have_the_colour_that_is_asked_for(fill: str, expected: int) -> None:
    given = np.full((32, 32, 3), 128, dtype=np.uint8)
    settings = {"erasing": 1, "erasing_area": [0.5, 0.5], "erasing_ratio": [1, 1], "erasing_fill": fill}
    assert set(np.unique(augmented(settings, given))) == {128, expected}


def test_resolution_grows_in_multiples_and_ends_at_full_size() -> None:
    config = AugmentConfig.model_validate({"curriculum": {"resolution": {"start": 0.5, "until": 0.5}}})
    sides = [output_size((224, 224), config, progress=step / 100, multiple=16)[0] for step in range(101)]
    assert sides[0] == 112 and sides[-1] == 224 == sides[50]
    assert sides == sorted(sides) and all(side % 16 == 0 for side in sides) and len(set(sides)) == 5
    assert augment(picture(64, 64), config, seed=0, epoch=0, row=0, progress=0.0, multiple=16).shape == (32, 32, 3)


def test_less_strength_is_less_change() -> None:
    def distance(start: float) -> float:
        growth = {"strength": {"start": start}} if start < 1 else {}
        settings = {**EVERYTHING, "horizontal_flip": 0, "vertical_flip": 0, "randaugment": 0, "curriculum": growth}
        results = [augmented(settings, row=row, progress=0.0).astype(int) for row in range(30)]
        return float(np.abs(np.array(results) - picture()).mean())

    assert distance(0.01) < 4 < distance(0.3) < distance(1.0)
