"""Pictures that tests make: smooth gradients with shapes in them, as photographs are, from a seed."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
from PIL import Image

from workbench.data.images.picture_files import Pixels


def photograph(height: int, width: int, *, seed: int = 0) -> Pixels:
    """Pixels (height, width, 3) of soft colours with sharp shapes."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (5, 5, 3), np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).copy()
    for _ in range(6):
        centre = (int(draw.integers(width)), int(draw.integers(height)))
        radius = int(draw.integers(1, max(2, min(height, width) // 3)))
        cv2.circle(picture, centre, radius, [int(value) for value in draw.integers(0, 256, 3)], thickness=-1)
    return np.asarray(picture, np.uint8)


def encoded(image: Image.Image | Pixels, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()
