"""Pictures augmented in a second on one core, by several settings, and by Pillow with torchvision's steps.

    python scripts/bench/augmentation.py pictures.zip [--sides 64 224] [--count 400] [--rounds 3] [--json FILE]

The zip holds pictures in any folders; they are resized to each side before the clock runs, as stored pictures are. The
best round counts. Pillow's side does the work of the first setting in torchvision's order: crop, flips, affine,
brightness, contrast, saturation, hue, erasing, each with its own pass over the pixels.
"""

from __future__ import annotations

import argparse
import io
import math
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import measuring
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from workbench.config.sections.image_config import AugmentConfig
from workbench.data.images.augmentation import augment

Picture = NDArray[np.uint8]

FLIPS = {"horizontal_flip": 0.5, "vertical_flip": 0.5}
COLOURS = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.1}
PLACE = {**FLIPS, "crop_scale": [0.3, 1], "rotation": 15, "translate": 0.1, "shear": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "flips, crop, affine, colour, erasing": {**PLACE, **COLOURS, "erasing": 0.5},
    "the same, gamma, blur": {**PLACE, **COLOURS, "erasing": 0.5, "gamma": 0.3, "blur": 1.5},
    "crop, flip, RandAugment 2": {"crop_scale": [0.3, 1], "horizontal_flip": 0.5, "randaugment": 2},
    "crop, flip, TrivialAugment": {"crop_scale": [0.3, 1], "horizontal_flip": 0.5, "trivialaugment": True},
    "preset light": {"preset": "light"},
    "preset strong, before mixing": {"preset": "strong"},
}


def main(arguments: argparse.Namespace) -> None:
    cv2.setNumThreads(1)
    machine = measuring.machine("cpu", ("opencv-python-headless", "numpy", "pillow"))
    print(machine)
    found: dict[str, dict[str, float]] = {}
    for side in arguments.sides:
        pictures = _pictures(arguments.pictures, side, arguments.count)
        for name, settings in SETTINGS.items():
            config = AugmentConfig.model_validate(settings)

            def ours(picture: Picture, row: int, config: AugmentConfig = config) -> Picture:
                return augment(picture, config, seed=0, epoch=0, row=row)

            found.setdefault(name, {})[str(side)] = _speed(ours, pictures, arguments.rounds)
        pillow = found.setdefault("the first one by Pillow", {})
        pillow[str(side)] = _speed(_by_pillow, pictures, arguments.rounds)
    for name, speeds in found.items():
        print(f"{name:40} " + "  ".join(f"{side} x {side}: {speed:8,.0f}/s" for side, speed in speeds.items()))
    measuring.write_report(arguments, machine=machine, pictures_per_second=found)


def _pictures(path: Path, side: int, count: int) -> list[Picture]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg", ".png"))]
        opened = (Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in names[:count])
        return [np.asarray(image.resize((side, side))) for image in opened]


def _speed(change: Callable[[Picture, int], Picture], pictures: Sequence[Picture], rounds: int) -> float:
    """Pictures in a second, of the best round."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for row, picture in enumerate(pictures):
            change(picture, row)
        seconds.append(time.perf_counter() - started)
    return len(pictures) / min(seconds)


def _by_pillow(picture: Picture, row: int) -> Picture:
    rng, image, bilinear = np.random.default_rng(row), Image.fromarray(picture), Image.Resampling.BILINEAR
    side = image.width
    root = math.sqrt(rng.uniform(0.3, 1)) * side
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)) / 2)
    width, height = (min(side, round(each)) for each in (root * ratio, root / ratio))
    left, top = int(rng.integers(side - width + 1)), int(rng.integers(side - height + 1))
    image = image.resize((side, side), bilinear, box=(left, top, left + width, top + height))
    for flip in (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM):
        image = image.transpose(flip) if rng.random() < 0.5 else image
    angle, slope = math.radians(rng.uniform(-15, 15)), math.tan(math.radians(rng.uniform(-5, 5)))
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    linear = np.linalg.inv(turn @ np.array([[1.0, slope], [0.0, 1.0]]))
    offset = np.full(2, side / 2) - linear @ (np.full(2, side / 2) + rng.uniform(-0.1, 0.1, 2) * side)
    matrix = np.column_stack([linear, offset]).ravel().tolist()
    image = image.transform(image.size, Image.Transform.AFFINE, matrix, bilinear)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(0.7, 1.3))
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(rng.integers(-25, 26))).astype(np.uint8)
    image = Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
    result = np.array(image)
    if rng.random() < 0.5:
        root = math.sqrt(rng.uniform(0.02, 1 / 3)) * side
        ratio = math.exp(rng.uniform(math.log(0.3), math.log(10 / 3)) / 2)
        width, height = (min(side, round(each)) for each in (root * ratio, root / ratio))
        left, top = int(rng.integers(side - width + 1)), int(rng.integers(side - height + 1))
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        result[top : top + height, left : left + width] = noise
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="a zip of pictures")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 224])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())
