"""The operations of RandAugment equal Pillow's where Pillow has them, and are drawn evenly in the papers' ranges."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from workbench.config.sections.image_config import AugmentConfig
from workbench.data.images.augmentation import OPERATIONS, Operation, apply_operation, randaugment, trivialaugment

SMALL = np.random.default_rng(0).integers(20, 220, (6, 6, 3), dtype=np.uint8)
PICTURE = np.asarray(cv2.resize(SMALL, (40, 40), interpolation=cv2.INTER_CUBIC), dtype=np.uint8)
PICTURES = {
    "smooth": PICTURE,
    "noise": np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8),
    "flat": np.full((40, 40, 3), 77, dtype=np.uint8),
    "two levels": np.where(PICTURE > 120, 200, 10).astype(np.uint8),
}
Filter = Callable[[Image.Image], Image.Image]


def _transform(*matrix: float) -> Filter:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


PILLOW: list[tuple[Operation, float, Filter]] = [
    ("identity", 0.0, lambda image: image),
    ("autocontrast", 0.0, ImageOps.autocontrast),
    ("equalize", 0.0, ImageOps.equalize),
    ("brightness", 0.7, lambda image: ImageEnhance.Brightness(image).enhance(1.7)),
    ("brightness", -0.7, lambda image: ImageEnhance.Brightness(image).enhance(0.3)),
    ("contrast", 0.5, lambda image: ImageEnhance.Contrast(image).enhance(1.5)),
    ("contrast", -0.9, lambda image: ImageEnhance.Contrast(image).enhance(0.1)),
    ("color", 0.9, lambda image: ImageEnhance.Color(image).enhance(1.9)),
    ("color", -0.9, lambda image: ImageEnhance.Color(image).enhance(0.1)),
    ("sharpness", 0.9, lambda image: ImageEnhance.Sharpness(image).enhance(1.9)),
    ("sharpness", -0.9, lambda image: ImageEnhance.Sharpness(image).enhance(0.1)),
    *[("posterize", bits, lambda image, kept=8 - bits: ImageOps.posterize(image, kept)) for bits in range(7)],
    *[("solarize", 256 - level, lambda image, at=level: ImageOps.solarize(image, at)) for level in (0, 100, 255, 256)],
]
MOVES: list[tuple[Operation, float, Filter]] = [
    ("rotate", 20.0, lambda image: image.rotate(20, Image.Resampling.BILINEAR)),
    ("rotate", -135.0, lambda image: image.rotate(-135, Image.Resampling.BILINEAR)),
    ("translate_x", 5.0, _transform(1, 0, -5, 0, 1, 0)),
    ("translate_y", -7.0, _transform(1, 0, 0, 0, 1, 7)),
    ("shear_x", 0.3, _transform(1, 0.3, 0, 0, 1, 0)),
    ("shear_y", -0.3, _transform(1, 0, 0, -0.3, 1, 0)),
]


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("operation, value, pillow", PILLOW, ids=[f"{name}-{value}" for name, value, _ in PILLOW])
def test_levels_equal_pillow(name: str, operation: Operation, value: float, pillow: Filter) -> None:
    expected = np.asarray(pillow(Image.fromarray(PICTURES[name])))
    found = apply_operation(operation, PICTURES[name], value)
    exact = operation in ("identity", "posterize", "solarize", "equalize")
    assert np.abs(found.astype(int) - expected).max() <= (0 if exact else 2)


@pytest.mark.parametrize("operation, value, pillow", MOVES, ids=[f"{name}-{value}" for name, value, _ in MOVES])
def test_moves_equal_pillow_inside_the_picture(operation: Operation, value: float, pillow: Filter) -> None:
    expected = np.asarray(pillow(Image.fromarray(PICTURE))).astype(int)
    difference = np.abs(apply_operation(operation, PICTURE, value, border="black").astype(int) - expected)
    inside = cv2.erode((expected.sum(2) > 0).astype(np.uint8), np.ones((5, 5), np.uint8)).astype(bool)
    inside[:3] = inside[-3:] = inside[:, :3] = inside[:, -3:] = False
    assert inside.sum() > 400
    # Pillow shears about the corner of the first pixel, OpenCV about its centre: up to half a slope of a pixel apart.
    assert difference[inside].mean() < 2.5


def test_there_are_the_14_operations_of_the_paper() -> None:
    assert len(set(OPERATIONS)) == 14


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each not in ("autocontrast", "equalize")])
def test_magnitude_zero_changes_nothing(operation: Operation) -> None:
    np.testing.assert_array_equal(apply_operation(operation, PICTURES["noise"], 0.0), PICTURES["noise"])


LARGEST: dict[str, dict[Operation, float]] = {
    "randaugment": {"rotate": 30, "shear_x": 0.3, "translate_y": 150, "color": 0.9, "posterize": 4, "solarize": 256},
    "trivialaugment": {
        "rotate": 135,
        "shear_x": 0.99,
        "translate_y": 32,
        "color": 0.99,
        "posterize": 6,
        "solarize": 256,
    },
}


@pytest.mark.parametrize("policy", LARGEST)
def test_operations_are_drawn_evenly_in_the_ranges_of_the_papers(policy: str) -> None:
    rng = np.random.default_rng(0)
    if policy == "randaugment":
        config = AugmentConfig(randaugment=6000, randaugment_magnitude=30)
        drawn = randaugment(config, rng, size=(331, 331))
    else:
        drawn = [trivialaugment(rng) for _ in range(6000)]
    by_name = {name: [value for each, value in drawn if each == name] for name in OPERATIONS}
    shares = np.array([len(values) for values in by_name.values()]) / 6000
    assert np.abs(shares - 1 / 14).max() < 0.02
    for name, bound in LARGEST[policy].items():
        least = 0.0 if name in ("posterize", "solarize") else -bound
        assert max(by_name[name]) == pytest.approx(bound)
        assert min(by_name[name]) >= least or min(by_name[name]) == pytest.approx(least)


def test_as_many_operations_as_asked_for_and_less_magnitude_with_less_strength() -> None:
    config = AugmentConfig(randaugment=3, randaugment_magnitude=9)
    full, half = (
        randaugment(config, np.random.default_rng(0), size=(64, 64), strength=strength) for strength in (1.0, 0.5)
    )
    assert len(full) == 3
    assert half == [(name, pytest.approx(value / 2)) for name, value in full]
