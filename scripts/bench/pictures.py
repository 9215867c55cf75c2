"""Pictures per second of a first epoch and of later ones: ours, and a plain Dataset with Pillow and a DataLoader.

    python scripts/bench/pictures.py [SOURCE ...] [--size 224] [--pairs 3] [--workers 2] [--augment]

The plain side does what torchvision's ImageFolder, Resize, ToTensor and Normalize do with Pillow: it decodes, resizes
and normalises in every epoch. Ours decodes and resizes once into a store on disk, then reads and normalises. Both give
the same float32 batches, which is checked; sides take turns. With --augment both crop at random, flip, and change
brightness, contrast and saturation in every epoch, ours by `image.augment` on stored pictures.

Without a SOURCE (as `data.train` of pictures), 2,000 photograph-like JPEGs of 500 x 375 pixels are drawn.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, Dataset

from workbench.config.sections.image_config import AugmentConfig, PrepareConfig
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_reader import Augmenter, PictureRows
from workbench.data.images.picture_sources import read_rows
from workbench.data.images.picture_store import StoredPictures, store

BATCH = 64
AUGMENT = AugmentConfig.model_validate(
    {"crop_scale": (0.35, 1), "horizontal_flip": 0.5, "brightness": 0.3, "contrast": 0.3, "saturation": 0.3}
)
Side = Callable[[], Iterator[npt.NDArray[np.float32]]]


class PlainPictures(Dataset[torch.Tensor]):
    """Pictures decoded, resized and normalised one at a time, as torchvision's transforms do."""

    def __init__(self, files: Sequence[PictureFile], format: PictureFormat, *, augmented: bool) -> None:
        self.files, self.format, self.augmented = files, format, augmented
        self.mean_3HW, self.std_3HW = (torch.tensor(values).view(3, 1, 1) for values in (format.mean, format.std))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(io.BytesIO(self.files[index].read())) as opened:
            box = _random_crop(opened.size) if self.augmented else None
            picture = opened.convert("RGB").resize((self.format.width, self.format.height), self.format.resample, box)
        if self.augmented:
            picture = _jittered(picture)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
        return tensor.sub_(self.mean_3HW).div_(self.std_3HW)


def _random_crop(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """As torchvision's RandomResizedCrop: a share of the area, and a ratio of the sides."""
    width, height = size
    area, ratio = random.uniform(0.35, 1) * width * height, math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    across, down = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = random.uniform(0, width - across), random.uniform(0, height - down)
    return left, top, left + across, top + down


def _jittered(picture: Image.Image) -> Image.Image:
    """As torchvision's RandomHorizontalFlip and ColorJitter."""
    if random.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        picture = enhance(picture).enhance(random.uniform(0.7, 1.3))
    return picture


def plain(
    files: Sequence[PictureFile], format: PictureFormat, workers: int, *, augmented: bool
) -> Iterator[npt.NDArray[np.float32]]:
    """Batches of an epoch of the plain side."""
    pictures = PlainPictures(files, format, augmented=augmented)
    for batch in DataLoader(pictures, batch_size=BATCH, num_workers=workers):
        yield batch.numpy()


def ours(files: Sequence[PictureFile], format: PictureFormat, folder: Path) -> StoredPictures:
    """The store, made or found."""
    return store(files, format=format, prepare=PrepareConfig(), max_pixels=10**8, workers="auto", folder=folder)


def batches(stored: StoredPictures, format: PictureFormat, *, augmented: bool) -> Iterator[npt.NDArray[np.float32]]:
    """Batches of an epoch of ours, as a run reads them."""
    count = len(stored.pixels)
    place_N2 = np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)
    augmenter = Augmenter(AUGMENT, seed=0, epochs=1, multiple=1) if augmented else None
    rows = PictureRows((stored.pixels,), place_N2, np.arange(count), format, patches=1, augmenter=augmenter)
    for start in range(0, count, BATCH):
        found = rows.batch(np.arange(start, min(start + BATCH, count)), epoch=0)
        yield found.inputs["pixel_values"].numpy()


def drawn(folder: Path, count: int = 2000) -> list[PictureFile]:
    """JPEG files of 500 x 375 with the detail of photographs, about 50 kB each."""
    found = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        soft = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        grain = Image.fromarray(draw.integers(0, 256, (375, 500, 3), np.uint8)).filter(ImageFilter.GaussianBlur(1))
        path = folder / f"{seed:05}.jpg"
        Image.blend(soft, grain, 0.3).save(path, quality=90)
        found.append(PictureFile(path.name, path))
    return found


def seconds(epoch: Callable[[], Iterator[npt.NDArray[np.float32]]]) -> tuple[float, float]:
    """Time of an epoch whose batches are only counted, on the clock and of processors, other processes included."""
    began, before = time.perf_counter(), sum(os.times()[:4])
    for _ in epoch():
        pass
    return time.perf_counter() - began, sum(os.times()[:4]) - before


def compare(
    name: str, files: Sequence[PictureFile], *, size: int, pairs: int, workers: int, augmented: bool
) -> dict[str, Any]:
    """Pictures per second of both sides, `pairs` times in turn; `workers` of the plain side, ours chooses."""
    plainly, read = (partial(side, augmented=augmented) for side in (plain, batches))
    format = PictureFormat.read({"image_processor_type": "ViTImageProcessor"}, {}, size=size)
    took: dict[str, list[tuple[float, float]]] = {"plain": [], "first": [], "reopened": [], "later": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(pairs):
            took["plain"].append(seconds(lambda: plainly(files, format, workers)))
            place = folder / str(number)
            took["first"].append(seconds(lambda place=place: read(ours(files, format, place), format)))  # type: ignore[misc]
            took["reopened"].append(seconds(lambda place=place: read(ours(files, format, place), format)))  # type: ignore[misc]
            stored = ours(files, format, place)
            took["later"].append(seconds(lambda stored=stored: read(stored, format)))  # type: ignore[misc]
        if not augmented:
            for one, other in zip(plainly(files, format, 0), read(stored, format), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
    wall, cpu = ({side: median(each[kind] for each in times) for side, times in took.items()} for kind in (0, 1))
    return {
        **{"source": name, "pictures": len(files), "size": size, "workers": workers, "augmented": augmented},
        "per_s": {side: round(len(files) / each) for side, each in wall.items()},
        "ratios": {side: round(wall["plain"] / each, 2) for side, each in wall.items()},
        "cpu_ratios": {side: round(cpu["plain"] / each, 2) for side, each in cpu.items()},
    }


def main() -> None:
    """Compare both sides on each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--size", type=int, default=224, help="side of the square, in pixels")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    settings = {"size": options.size, "pairs": options.pairs, "workers": options.workers, "augmented": options.augment}
    torch.set_num_threads(1)
    for source in options.sources:
        files = [row.columns["image"] for row in read_rows(source)]
        print(json.dumps(compare(Path(source).name, files, **settings)))
    if not options.sources:
        with tempfile.TemporaryDirectory() as folder:
            files = drawn(Path(folder))
            print(json.dumps(compare("drawn, 500 x 375", files, **settings)))


if __name__ == "__main__":
    main()
