"""Folders, tables and files of pictures in which mistakes are made."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image
from transformers import LevitConfig, LevitForImageClassification

from tests.mistakes.cases import Prepare, file
from tests.vision_backbones import save_vision

ROWS = 8
"""Pictures of each class."""


def picture(seed: int, size: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "PNG")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pictures(name: str, *, start: int = 0, rows: int = ROWS) -> Prepare:
    """A folder with pictures that differ."""

    def make(folder: Path) -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(rows):
            (folder / name / f"{number}.png").write_bytes(picture(start + number))

    return make


def both(*steps: Prepare) -> Prepare:
    def make(folder: Path) -> None:
        for step in steps:
            step(folder)

    return make


def moved(old: str, new: str) -> Prepare:
    return lambda folder: (folder / old).rename(folder / new)


def made(name: str) -> Prepare:
    return lambda folder: (folder / name).mkdir(parents=True)


def table(header: str, *cells: str, name: str = "pets.csv") -> Prepare:
    return file(name, "\n".join([header, *cells]) + "\n")


def listed(header: str = "image,label") -> Prepare:
    """A table of the pictures in the class folders."""
    cells = [f"pets/{label}/{number}.png,{label}" for number in range(ROWS) for label in ("cat", "dog")]
    return table(header, *cells)


def zipped(folder: Path) -> None:
    """An archive of two splits."""
    with zipfile.ZipFile(folder / "pets.zip", "w") as archive:
        for path in sorted((folder / "pets").rglob("*.png")):
            for split in ("train", "test"):
                archive.write(path, f"{split}/{path.relative_to(folder / 'pets')}")


def backslashes(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pets.zip", "w") as archive:
        archive.writestr("cat\\0.png", picture(0))


def bytes_without_labels(folder: Path) -> None:
    rows = [{"image": {"bytes": picture(number), "path": None}, "kind": "cat"} for number in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "pets.parquet")


def all_equal(folder: Path) -> None:
    for path in (folder / "pets").rglob("*.png"):
        path.write_bytes(picture(0))


def truncated(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    (folder / "pets/cat/9.jpg").write_bytes(encoded(Image.fromarray(pixels), "JPEG")[:-600])


def zeroed(folder: Path) -> None:
    """What a download leaves that reserved its room and broke off."""
    truncated(folder)
    with (folder / "pets/cat/9.jpg").open("ab") as file:
        file.write(bytes(20_000))


def deep(folder: Path) -> None:
    Image.fromarray(np.full((12, 12), 3000, np.uint16)).save(folder / "deep.png")


def ended(folder: Path) -> None:
    """What a program leaves that writes the end marker after however much it got."""
    truncated(folder)
    with (folder / "pets/cat/9.jpg").open("ab") as file:
        file.write(b"\xff\xd9")


animals = both(*(pictures(f"other/{name}", start=50 + 10 * n) for n, name in enumerate(("cat", "cow", "dog"))))


def animated(folder: Path) -> None:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    (folder / "pets/cat/9.gif").write_bytes(encoded(first, "GIF", save_all=True, append_images=[second]))


def unreadable(folder: Path) -> None:
    for path in (folder / "pets").rglob("*.png"):
        path.write_bytes(b"not a picture")


def locked(folder: Path) -> None:
    (folder / "pets/cat").chmod(0)


def grey_backbone(folder: Path) -> None:
    save_vision(folder / "grey", "ViT", num_channels=1)


def one_size_backbone(folder: Path) -> None:
    """A LeViT, whose attention has a bias for each pair of patches."""
    sizes = {"image_size": 32, "hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "depths": [1, 1]}
    config = LevitConfig(**sizes, key_dim=[8, 8], mlp_ratio=[2, 2], attention_ratio=[2, 2])
    config.down_ops = [["Subsample", 8, 2, 4, 2, 2]]
    LevitForImageClassification(config).save_pretrained(folder / "levit")


def function(body: str) -> Prepare:
    return file("mine.py", f"import numpy as np\n\ndef views(picture):\n    return {body}\n")


def copied(old: str, new: str) -> Prepare:
    return lambda folder: shutil.copytree(folder / old, folder / new)
