"""Small labelled sets of pictures, read from files as runs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from PIL.Image import Resampling

from tests.workbench.data.images.pictures import photograph
from workbench.config import DataConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.config.sections.image_config import ImageConfig
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_reader import PictureReader
from workbench.data.labelled import labelled_data, labels
from workbench.data.labelled.labelled_data import LabelledSet

SIZE = 32


def write_pictures(folder: Path, *, rows: int, classes: tuple[str, ...] = ("a", "b"), side: int = 40) -> Path:
    """Class folders with as many pictures together."""
    for number in range(rows):
        place = folder / classes[number % len(classes)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(side, side, seed=number)).save(place / f"{number}.png")
    return folder


def picture_reader(
    train: Path | str = "pictures",
    *,
    size: int = SIZE,
    augment: dict[str, Any] | None = None,
    epochs: float = 4,
    **near: Any,
) -> PictureReader:
    """A reader of square pictures; `near` are settings of `duplicates`."""
    return PictureReader(
        PictureFormat(size, size, "stretch", (size, size), Resampling.BICUBIC, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)),
        DataConfig.model_validate({"train": str(train), "format": "image"}),
        ClassesConfig(),
        ImageConfig.model_validate({"augment": augment or {}, "workers": 0}),
        DuplicatesConfig.model_validate(near),
        patch=8,
        seed=3,
        epochs=lambda _: epochs,
    )


def picture_set(
    folder: Path, *, rows: int, size: int = SIZE, side: int = 40, **settings: Any
) -> tuple[LabelledSet, PictureReader]:
    """So many pictures of two classes, and their reader."""
    reader = picture_reader(folder / "pictures", size=size, **settings)
    source = reader.read(str(write_pictures(folder / "pictures", rows=rows, side=side)))
    return labelled_data.encode(source, reader, labels.fit("one", source.labels, source="pictures")), reader
