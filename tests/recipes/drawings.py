"""Pictures of three shapes, each in a colour of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"circle": (220, 40, 40), "square": (40, 200, 60), "bar": (60, 60, 230)}


def draw(folder: Path, rows: int, *, seed: int = 0) -> Path:
    """Class folders of noisy drawings whose shape and colour say their class."""
    rng = np.random.default_rng(seed)
    for number in range(rows):
        name = list(COLOURS)[number % 3]
        picture = Image.fromarray(rng.integers(0, 120, (40, 40, 3), dtype=np.uint8))
        left, top = rng.integers(2, 14, 2).tolist()
        box = (left, top, left + 18, top + (5 if name == "bar" else 18))
        shape = ImageDraw.Draw(picture)
        (shape.ellipse if name == "circle" else shape.rectangle)(box, fill=COLOURS[name])
        (folder / name).mkdir(parents=True, exist_ok=True)
        picture.save(folder / name / f"{number:04}.png")
    return folder
