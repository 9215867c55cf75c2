"""Planted copies of pictures that are found, real pictures that get a false partner, and the time for many.

    python scripts/bench/picture_duplicates.py PICTURES... [--side 64] [--scale 50000 10000]

PICTURES are folders of class folders or zip archives of them. Of each, COPIES pictures of a test set are copies of
others: resized to 70 %, compressed (JPEG, quality 40), shifted by 2 pixels, made 30 % brighter or darker, flipped,
turned, cropped to 90 % or 80 % of each side, or cropped, flipped and brightened. Real pictures of one set that are
found to be duplicates of each other are counted, and written side by side into pairs.png to be judged by eye. With
--scale so many training and test pictures, others mixed with each other, are compared, and the time is printed.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measuring import machine
from PIL import Image, ImageEnhance

from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.data.images import picture_duplicates
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_sources import read_rows

COPIES = 400


def main(arguments: argparse.Namespace) -> None:
    print(machine("cpu", ("torch", "opencv-python-headless")))
    threshold = arguments.threshold or DuplicatesConfig().cutoff(pictures=True)
    print(f"threshold {threshold:g}")
    print(f"{'':24} {'pictures':>8} {' '.join(f'{name:>10}' for name in COPY)} {'all':>7} {'real ones paired':>17}")
    for source in arguments.pictures:
        _planted(source, threshold, arguments)
    if arguments.scale:
        _many(arguments.pictures[0], threshold, arguments)


def _planted(source: Path, threshold: float, arguments: argparse.Namespace) -> None:
    pictures = _pictures(source, arguments.limit)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(pictures), min(COPIES, len(pictures)), replace=False)
    kinds = [list(COPY)[number % len(COPY)] for number in range(len(chosen))]
    copies = [COPY[kind](pictures[index]) for kind, index in zip(kinds, chosen, strict=True)]
    stored = [_stored(picture, arguments.side) for picture in [*pictures, *copies]]
    part_N = np.repeat([0, 1], [len(pictures), len(copies)])
    cluster_N = picture_duplicates.find(stored, threshold=threshold, part_N=part_N).cluster_N
    found = cluster_N[chosen] == cluster_N[len(pictures) :]
    shares = {kind: float(found[[each == kind for each in kinds]].mean()) for kind in COPY}

    real = picture_duplicates.find(stored[: len(pictures)], threshold=threshold)
    _, inverse, count = np.unique(real.cluster_N, return_inverse=True, return_counts=True)
    paired = count[inverse] > 1
    words = " ".join(f"{shares[kind]:10.3f}" for kind in COPY)
    possible = len(pictures) * (len(pictures) - 1) // 2
    share = f"{paired.sum():8,} ({paired.mean():.2%}), pairs {len(real.pairs_P2)} of {possible:,}"
    print(f"{source.stem[:24]:24} {len(pictures):8,} {words} {found.mean():7.3f} {share}")
    if len(real.pairs_P2):
        first = {int(each): row for row, each in reversed(list(enumerate(real.distinct_N)))}
        pairs = [tuple(stored[first[int(each)]] for each in pair) for pair in real.pairs_P2[:24]]
        columns = [np.concatenate(pair) for pair in pairs]
        Image.fromarray(np.concatenate(columns, axis=1)).save(f"{source.stem}-pairs.png")


def _many(source: Path, threshold: float, arguments: argparse.Namespace) -> None:
    pictures = [_stored(picture, arguments.side) for picture in _pictures(source, arguments.limit)]
    rng = np.random.default_rng(0)
    many = []
    for number in range(sum(arguments.scale)):
        one, two = pictures[number % len(pictures)], pictures[int(rng.integers(len(pictures)))]
        many.append(((one.astype(np.uint16) + np.roll(two, number % 17, axis=1)) // 2).astype(np.uint8))
    began, cpu = time.perf_counter(), time.process_time()
    found = picture_duplicates.find(many, threshold=threshold, part_N=np.repeat([0, 1], arguments.scale))
    took, used = time.perf_counter() - began, time.process_time() - cpu
    print(f"{len(many):,} pictures: {took:.1f} s, {used:.1f} s of processors, {len(found.pairs_P2):,} pairs")


def _pictures(source: Path, limit: int) -> list[Pixels]:
    rows = list(read_rows(str(source)))
    return [row.columns["image"].decode(max_pixels=10**8) for row in rows[:limit]]


def _stored(picture: Pixels, side: int) -> Pixels:
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))


def _resized(picture: Pixels) -> Pixels:
    height, width = picture.shape[:2]
    size = (round(0.7 * width), round(0.7 * height))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))


def _compressed(picture: Pixels) -> Pixels:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=40)
    return np.asarray(Image.open(buffer).convert("RGB"))


def _shifted(picture: Pixels) -> Pixels:
    return np.pad(picture, ((2, 0), (2, 0), (0, 0)), mode="edge")[: picture.shape[0], : picture.shape[1]]


def _lit(factor: float) -> Callable[[Pixels], Pixels]:
    return lambda picture: np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(factor))


def _cropped(share: float) -> Callable[[Pixels], Pixels]:
    chance = np.random.default_rng(0)

    def crop(picture: Pixels) -> Pixels:
        height, width = picture.shape[:2]
        down, across = round(share * height), round(share * width)
        top, left = chance.integers(height - down + 1), chance.integers(width - across + 1)
        part = Image.fromarray(picture[top : top + down, left : left + across])
        return np.asarray(part.resize((width, height), Image.Resampling.BICUBIC))

    return crop


COPY: dict[str, Callable[[Pixels], Pixels]] = {
    "resized": _resized,
    "compressed": _compressed,
    "shifted": _shifted,
    "brighter": _lit(1.3),
    "darker": _lit(0.7),
    "flipped": lambda picture: np.ascontiguousarray(picture[:, ::-1]),
    "turned": lambda picture: np.ascontiguousarray(np.rot90(picture)),
    "90 %": _cropped(0.9),
    "80 %": _cropped(0.8),
    "all three": lambda picture: _lit(1.2)(_cropped(0.85)(np.ascontiguousarray(picture[:, ::-1]))),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, nargs="+")
    parser.add_argument("--side", type=int, default=64, help="pixels at which pictures are stored")
    parser.add_argument("--limit", type=int, default=10**6)
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--scale", type=int, nargs=2, metavar=("TRAIN", "TEST"))
    main(parser.parse_args())
