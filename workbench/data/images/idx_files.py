"""Pictures in idx files, as MNIST comes: `NAME-images-idx3-ubyte` with its labels in `NAME-labels-idx1-ubyte` beside.

Colours have a fourth dimension, `NAME-images-idx4-ubyte`. Both files may stand in a zip or tar archive.

Legend: N pictures, H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath

import numpy as np

from workbench.data.images import picture_archives
from workbench.data.images.decoding import Pixels
from workbench.data.images.picture_files import PictureFile
from workbench.data.rows import RawRow, place
from workbench.errors import DataError

_NAME = re.compile(r".*[-.]idx[1-4]-ubyte(\.gz)?")
_OTHER_NUMBERS = (b"\x09", b"\x0b", b"\x0c", b"\x0d", b"\x0e")
"""Types of numbers other than unsigned bytes: signed ones, of 16 and 32 bits, floats."""


def is_idx(path: Path) -> bool:
    """Whether a path is named like an idx file, and no folder."""
    return is_named_so(path) and not path.is_dir()


def is_named_so(path: PurePath) -> bool:
    """Whether a path is named like an idx file."""
    return _NAME.fullmatch(path.name) is not None


def read_rows(path: Path, column: str, label: str) -> Iterator[RawRow]:
    """Yield the pictures of an idx file, grey or in colour, with labels where their file is beside it.

    Raises:
        DataError: It is missing or damaged, or holds labels, or other than as many labels.
    """
    if "labels" in path.name:
        of_colours, of_grey = (_renamed(path, "images", dimensions) for dimensions in (4, 3))
        name = (of_colours if _content(of_colours) else of_grey).name
        raise DataError(f"{path}: holds labels without pictures. Name {name} beside it.")
    images = _read(path)
    if images.ndim == 4:
        images = _colours_last(images, path)
    elif images.ndim != 3:
        raise DataError(
            f"{path}: has {images.ndim} dimension(s), and pictures have 3, or 4 in colour. Name another one."
        )
    labels_file = _renamed(path, "labels", 1)
    labels_N = _read(labels_file) if labels_file != path and _content(labels_file) else None
    if labels_N is not None and labels_N.shape != (len(images),):
        raise DataError(
            f"{labels_file}: holds {len(labels_N)} labels, but {path.name} {len(images)} pictures. "
            "Copy both again, or move the labels elsewhere to read pictures only."
        )
    for index, image in enumerate(images):
        location = place(path.name, index + 1)
        columns: dict[str, object] = {column: PictureFile(location, content=image.tobytes(), shape=image.shape)}
        if labels_N is not None:
            columns[label] = str(labels_N[index])
        yield RawRow(location, columns)


def fingerprint(path: Path) -> str:
    """SHA-256 over both files."""
    contents = (_bytes(content) for each in (path, _renamed(path, "labels", 1)) if (content := _content(each)))
    return hashlib.sha256(" ".join(hashlib.sha256(each).hexdigest() for each in contents).encode()).hexdigest()


def _content(path: Path) -> PictureFile | None:
    """The file, on disk or in an archive; None where there is none."""
    archive = picture_archives.archive_of(path)
    if archive is None:
        return PictureFile(str(path), path) if path.is_file() else None
    inside = path.relative_to(archive).as_posix()
    matches = (each for each in picture_archives.members(archive) if str(each.path) == inside and not each.is_folder)
    return next((PictureFile(str(path), archive, inside, span=each.span) for each in matches), None)


def _renamed(path: Path, kind: str, dimensions: int) -> Path:
    name = re.sub(r"images|labels", kind, path.name)
    return path.with_name(re.sub(r"idx\d", f"idx{dimensions}", name))


def _bytes(file: PictureFile) -> bytes:
    if file.path is None or file.member:
        return file.read()
    try:
        return file.path.read_bytes()  # however many pictures it holds
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({error.strerror}). Copy or download it again.") from None


def _colours_last(images: Pixels, path: Path) -> Pixels:
    """Pictures (N, H, W, 3), or (N, H, W) of a single channel, from channels that come last or first."""
    if images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.shape[3] not in (1, 3):
        shape = " x ".join(map(str, images.shape))
        raise DataError(f"{path}: its pictures, {shape}, have other than 1 or 3 channels. Write it again with 3.")
    return images[:, :, :, 0] if images.shape[3] == 1 else images


def _read(path: Path) -> Pixels:
    """The numbers of an idx file, of as many dimensions as it says."""
    if (file := _content(path)) is None:
        raise DataError(f"{path}: no such file. Name the file of images.")
    content = _bytes(file)
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}). Copy or download it again.") from None
    if content[:2] == b"\0\0" and content[2:3] in _OTHER_NUMBERS:
        raise DataError(f"{path}: holds other numbers than unsigned bytes. Write it again with those.")
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    sizes = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if content[:3] != b"\0\0\x08" or not sizes or len(content) != header + math.prod(sizes):
        raise DataError(f"{path}: not a whole idx file of unsigned bytes. Copy or download it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
