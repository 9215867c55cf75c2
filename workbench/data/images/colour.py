"""Tone, colour and blur of pictures.

Legend: H, W, 3 channels RGB. A grey picture, whose channels are equal, stays grey.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

LUMA = np.array([0.299, 0.587, 0.114])
"""Shares of red, green and blue in brightness (ITU-R BT.601)."""
_YIQ = np.array([LUMA, [0.59590059, -0.27455667, -0.32134392], [0.21153661, -0.52273617, 0.31119955]])
_FROM_YIQ = np.linalg.inv(_YIQ)
_LEVELS = np.arange(256, dtype=np.float64)
LEAST_SIGMA = 0.15
"""Pixels below which a Gaussian leaves an 8-bit picture as it is."""


def looked_up(picture_HW3: NDArray[np.uint8], table: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.uint8]:
    """Replace each level by that of a table (256,), or (256, 3) with one for each channel, rounded and clipped."""
    exact = table.astype(np.float64, copy=False)
    # The table itself, rounded and clipped in one call: a sum of weights 1 and 0.
    levels = np.asarray(cv2.addWeighted(exact, 1.0, exact, 0.0, 0.0, dtype=cv2.CV_8U)).reshape(table.shape)
    if levels.ndim == 2:
        levels = np.ascontiguousarray(levels[:, None, :])
    return np.asarray(cv2.LUT(picture_HW3, levels), dtype=np.uint8)


def toned(
    picture_HW3: NDArray[np.uint8], *, brightness: float = 1.0, contrast: float = 1.0, exponent: float = 1.0
) -> NDArray[np.uint8]:
    """Multiply levels, then their distance from the mean grey, then raise them to a power, in one rounding.

    Args:
        brightness: Factor of all levels; 0 is black.
        contrast: Factor of the distance from the mean grey of the brightened picture; 0 is grey.
        exponent: Power of the levels as shares of 255 (gamma correction); below 1 is brighter.
    """
    table = np.minimum(_LEVELS * brightness, 255.0)
    if contrast != 1.0:
        grey = mean_grey(picture_HW3) * brightness
        table = grey + contrast * (table - grey)
    if exponent != 1.0:
        table = 255.0 * (np.clip(table, 0.0, 255.0) / 255.0) ** exponent
    return looked_up(picture_HW3, table)


def tinted(picture_HW3: NDArray[np.uint8], *, saturation: float = 1.0, turn: float = 0.0) -> NDArray[np.uint8]:
    """Multiply the distance from grey and turn the hue, both at equal brightness: one matrix on the three channels.

    Args:
        saturation: Factor of the distance from grey; 0 is grey.
        turn: Share of a full turn of the colour circle.
    """
    angle = 2 * math.pi * turn
    cosine, sine = saturation * math.cos(angle), saturation * math.sin(angle)
    chroma = np.array([[1.0, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])
    return np.asarray(cv2.transform(picture_HW3, _FROM_YIQ @ chroma @ _YIQ), dtype=np.uint8)


def blurred(picture_HW3: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    """The picture under a Gaussian of standard deviation `sigma` in pixels, mirrored beyond its edges."""
    if sigma < LEAST_SIGMA:
        return picture_HW3
    blurry = cv2.GaussianBlur(picture_HW3, (0, 0), sigma, borderType=cv2.BORDER_REFLECT_101)
    return np.asarray(blurry, dtype=np.uint8)


def mean_grey(picture_HW3: NDArray[np.uint8]) -> float:
    """Mean brightness of a picture, from 0 to 255."""
    return float(LUMA @ cv2.mean(picture_HW3)[:3])
