"""Crop, flips, rotation, shear and shift of a picture in one interpolation, and resizing.

Legend: H and W of the picture, h and w of a resized one, 3 channels. A pixel's coordinates are those of its centre.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

Border = Literal["reflect", "edge", "black"]

_BORDERS: dict[Border, int] = {
    "reflect": cv2.BORDER_REFLECT_101,
    "edge": cv2.BORDER_REPLICATE,
    "black": cv2.BORDER_CONSTANT,
}


class Box(NamedTuple):
    """A rectangle of a picture in pixels, whose corners may lie between pixels."""

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class Warp:
    """Crop, then flips, then shear, rotation and shift of the cropped picture, which has the size of the whole one."""

    box: Box
    """The crop, which is resized to the picture's size."""
    flip_x: bool = False
    """Exchange left and right."""
    flip_y: bool = False
    """Exchange top and bottom."""
    degrees: float = 0.0
    """Rotation about the centre, counter-clockwise."""
    shear_degrees: float = 0.0
    """Horizontal shear about the centre."""
    shift_x: float = 0.0
    """Pixels to the right."""
    shift_y: float = 0.0
    """Pixels downwards."""

    def keeps_pixels(self, size: tuple[int, ...]) -> bool:
        """Whether flips are all that is done to a picture of this height and width."""
        moves = self.degrees or self.shear_degrees or self.shift_x or self.shift_y
        return not moves and self.box == Box(0.0, 0.0, *size)

    def inverse(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Matrix (2, 3) from a pixel of the result to its place in the picture, both as (x, y, 1)."""
        height, width = size
        angle, slope = math.radians(self.degrees), math.tan(math.radians(self.shear_degrees))
        sine, cosine = math.sin(angle), math.cos(angle)
        across = self.box.width / width * (-1.0 if self.flip_x else 1.0)
        down = self.box.height / height * (-1.0 if self.flip_y else 1.0)
        # The inverse of the turn after the shear. Rows grow downwards, which exchanges the sines of a turn.
        xx, xy = across * (cosine - slope * sine), across * (-sine - slope * cosine)
        yx, yy = down * sine, down * cosine
        x, y = (width - 1) / 2 + self.shift_x, (height - 1) / 2 + self.shift_y
        source_x, source_y = self.box.left + (self.box.width - 1) / 2, self.box.top + (self.box.height - 1) / 2
        return np.array([[xx, xy, source_x - xx * x - xy * y], [yx, yy, source_y - yx * x - yy * y]])


def warped(picture_HW3: NDArray[np.uint8], warp: Warp, *, border: Border) -> NDArray[np.uint8]:
    """The picture after `warp`, interpolated linearly at most once; pixels are exact where flips are all it does."""
    size = picture_HW3.shape[:2]
    if warp.keeps_pixels(size):
        if not (warp.flip_x or warp.flip_y):
            return picture_HW3
        return _bytes(cv2.flip(picture_HW3, -1 if warp.flip_x and warp.flip_y else int(warp.flip_x)))
    return affine(picture_HW3, warp.inverse(size), border=border)


def affine(picture_HW3: NDArray[np.uint8], inverse: NDArray[np.float64], *, border: Border) -> NDArray[np.uint8]:
    """The picture under a matrix (2, 3) from a pixel of the result to its place in the picture, both as (x, y, 1)."""
    height, width = picture_HW3.shape[:2]
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return _bytes(cv2.warpAffine(picture_HW3, inverse, (width, height), flags=flags, borderMode=_BORDERS[border]))


def resized(picture_HW3: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The picture with another height and width: antialiased where it shrinks, linear where it grows."""
    height, width = size
    if picture_HW3.shape[:2] == size:
        return picture_HW3
    shrinks = height <= picture_HW3.shape[0] and width <= picture_HW3.shape[1]
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return _bytes(cv2.resize(picture_HW3, (width, height), interpolation=how))


def _bytes(picture: object) -> NDArray[np.uint8]:
    return np.asarray(picture, dtype=np.uint8)
