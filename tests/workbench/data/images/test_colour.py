"""Tone and colour keep grey pictures grey and equal the definitions of Pillow, written by its own filters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from workbench.data.images.augmentation import blurred, looked_up, mean_grey, tinted, toned

NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
GREY = np.repeat(np.random.default_rng(1).integers(0, 256, (16, 16, 1), dtype=np.uint8), 3, axis=2)


def pillow(enhance: type[ImageEnhance._Enhance], factor: float) -> NDArray[np.uint8]:
    return np.asarray(enhance(Image.fromarray(NOISE)).enhance(factor))


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 1.0, 1.2, 2.0])
def test_factors_mean_what_they_mean_in_pillow(factor: float) -> None:
    for ours, theirs in (
        (toned(NOISE, brightness=factor), pillow(ImageEnhance.Brightness, factor)),
        (toned(NOISE, contrast=factor), pillow(ImageEnhance.Contrast, factor)),
        (tinted(NOISE, saturation=factor), pillow(ImageEnhance.Color, factor)),
    ):
        assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_factors_of_one_change_nothing() -> None:
    np.testing.assert_array_equal(toned(NOISE), NOISE)
    np.testing.assert_array_equal(tinted(NOISE), NOISE)
    np.testing.assert_array_equal(blurred(NOISE, 0.0), NOISE)


@given(st.floats(0.2, 5))
def test_gamma_is_the_power_law(exponent: float) -> None:
    expected = 255 * (NOISE / 255) ** exponent
    assert np.abs(toned(NOISE, exponent=exponent) - expected).max() <= 0.5 + 1e-9


@given(st.floats(0, 2), st.floats(-0.5, 0.5))
def test_grey_pictures_stay_as_they_are_under_changes_of_colour(saturation: float, turn: float) -> None:
    np.testing.assert_array_equal(tinted(GREY, saturation=saturation, turn=turn), GREY)


@given(st.floats(-0.5, 0.5))
def test_turns_of_hue_keep_brightness_and_undo_each_other(turn: float) -> None:
    soft = (NOISE // 4 + 96).astype(np.uint8)  # far from the ends of the range, where colours are clipped
    turned = tinted(soft, turn=turn)
    luma = np.array([0.299, 0.587, 0.114])
    assert np.abs(turned @ luma - soft @ luma).max() <= 1
    assert np.abs(tinted(turned, turn=-turn).astype(int) - soft).max() <= 2


def test_a_third_of_a_turn_thrice_is_none() -> None:
    soft = (NOISE // 4 + 96).astype(np.uint8)
    thrice = tinted(tinted(tinted(soft, turn=1 / 3), turn=1 / 3), turn=1 / 3)
    assert np.abs(thrice.astype(int) - soft).max() <= 3


def test_blur_keeps_the_mean_and_lowers_the_variance() -> None:
    small, large = blurred(NOISE, 0.8), blurred(NOISE, 2.0)
    assert NOISE.std() > small.std() > large.std()
    np.testing.assert_allclose(large.mean(), NOISE.mean(), atol=2)


def test_a_table_for_each_channel() -> None:
    tables = np.stack([np.arange(256), 255 - np.arange(256), np.zeros(256)], axis=1)
    expected = np.stack([NOISE[..., 0], 255 - NOISE[..., 1], np.zeros_like(NOISE[..., 2])], axis=2)
    np.testing.assert_array_equal(looked_up(NOISE, tables), expected)
    assert mean_grey(GREY) == pytest.approx(GREY.mean())
