"""One warp equals its steps one after the other; turns and mirrors by right angles are exact."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.images.augmentation import Box, Warp, affine, resized_to, warped

SIZE = (24, 32)
SMALL = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PICTURE = np.asarray(cv2.resize(SMALL, SIZE[::-1], interpolation=cv2.INTER_CUBIC), dtype=np.uint8)
SQUARE = PICTURE[:, :24]
WHOLE = Box(0.0, 0.0, *SIZE)


@given(st.floats(-180, 180), st.floats(-40, 40), st.floats(-9, 9), st.floats(-9, 9), st.booleans(), st.booleans())
def test_a_place_moves_through_crop_flips_shear_turn_and_shift_in_this_order(
    degrees: float, shear: float, shift_x: float, shift_y: float, flip_x: bool, flip_y: bool
) -> None:
    box = Box(2.0, 3.0, 12.0, 20.0)
    warp = Warp(box, flip_x, flip_y, degrees, shear, shift_x, shift_y)
    source_x, source_y = 7.0, 5.0
    # Edges, not centres, of pixels: a box maps to the whole picture.
    x = (source_x + 0.5 - box.left) / box.width * SIZE[1] - SIZE[1] / 2
    y = (source_y + 0.5 - box.top) / box.height * SIZE[0] - SIZE[0] / 2
    x, y = (-x if flip_x else x), (-y if flip_y else y)
    x += y * math.tan(math.radians(shear))
    angle = math.radians(degrees)
    x, y = x * math.cos(angle) + y * math.sin(angle), -x * math.sin(angle) + y * math.cos(angle)
    result = np.array([x + shift_x + SIZE[1] / 2 - 0.5, y + shift_y + SIZE[0] / 2 - 0.5, 1.0])
    np.testing.assert_allclose(warp.inverse(SIZE) @ result, [source_x, source_y], atol=1e-9)


@pytest.mark.parametrize("turns", [1, 2, 3, -1])
def test_right_angles_are_exact_and_counter_clockwise(turns: int) -> None:
    warp = Warp(Box(0.0, 0.0, 24.0, 24.0), degrees=90.0 * turns)
    np.testing.assert_array_equal(warped(SQUARE, warp, border="black"), np.rot90(SQUARE, turns))


@pytest.mark.parametrize("flip_x, flip_y", [(True, False), (False, True), (True, True)])
def test_flips_alone_equal_those_of_a_warp(flip_x: bool, flip_y: bool) -> None:
    warp = Warp(WHOLE, flip_x, flip_y)
    expected = PICTURE[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
    assert warp.keeps_pixels(SIZE)
    np.testing.assert_array_equal(warped(PICTURE, warp, border="black"), expected)
    np.testing.assert_array_equal(affine(PICTURE, warp.inverse(SIZE), border="black"), expected)


def test_shifts_by_whole_pixels_are_exact_and_borders_are_as_asked() -> None:
    warp = Warp(WHOLE, shift_x=3.0, shift_y=-2.0)
    black, mirrored, edge = (warped(PICTURE, warp, border=border) for border in ("black", "reflect", "edge"))
    np.testing.assert_array_equal(black[:-2, 3:], PICTURE[2:, :-3])
    assert not black[:, :3].any() and not black[-2:].any()
    np.testing.assert_array_equal(mirrored[:-2, :3], PICTURE[2:, 3:0:-1])
    np.testing.assert_array_equal(edge[:-2, :3], np.repeat(PICTURE[2:, :1], 3, axis=1))


def test_a_crop_between_pixels_keeps_the_order_of_a_ramp() -> None:
    ramp = np.repeat(np.repeat(np.arange(32, dtype=np.uint8)[None, :, None] * 8, 24, 0), 3, 2)
    result = warped(ramp, Warp(Box(0.0, 8.0, 24.0, 16.0)), border="reflect")[0, :, 0].astype(int)
    expected = 8 * (8.0 + 0.5 * np.arange(32) - 0.25)
    assert np.abs(result - expected).max() <= 1


def test_resizing_averages_where_it_shrinks() -> None:
    halves = PICTURE.reshape(12, 2, 16, 2, 3).astype(float).mean((1, 3))
    assert np.abs(resized_to(PICTURE, (12, 16)) - halves).max() <= 0.5
    assert resized_to(PICTURE, SIZE) is PICTURE
    assert resized_to(PICTURE, (48, 64)).shape == (48, 64, 3)
