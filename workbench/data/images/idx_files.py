"""Pictures in idx files, as MNIST comes: `NAME-images-idx3-ubyte` with its labels in `NAME-labels-idx1-ubyte` beside.

Legend: N pictures, H height, W width.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from workbench.data.images.decoding import Pixels
from workbench.data.images.picture_files import PictureFile
from workbench.data.rows import RawRow, place
from workbench.errors import DataError
from workbench.runs import files

_NAME = re.compile(r".*[-.]idx[1-4]-ubyte(\.gz)?")


def is_idx(path: Path) -> bool:
    """Whether a path is named like an idx file."""
    return _NAME.fullmatch(path.name) is not None and not path.is_dir()


def read_rows(path: Path, column: str, label: str) -> Iterator[RawRow]:
    """Yield the grey pictures of an idx file, with labels where their file is beside it.

    Raises:
        DataError: It is missing or damaged, or holds labels, or other than as many labels.
    """
    if "labels" in path.name:
        raise DataError(f"{path}: holds labels without pictures. Name {_renamed(path, 'images', 3).name} beside it.")
    images_NHW = _read(path, 3)
    labels_file = _renamed(path, "labels", 1)
    labels_N = _read(labels_file, 1) if labels_file != path and labels_file.exists() else None
    if labels_N is not None and len(labels_N) != len(images_NHW):
        raise DataError(
            f"{labels_file}: holds {len(labels_N)} labels, but {path.name} {len(images_NHW)} pictures. "
            "Copy both again, or move the labels elsewhere to read pictures only."
        )
    for index, image_HW in enumerate(images_NHW):
        location = place(path.name, index + 1)
        shape = (image_HW.shape[0], image_HW.shape[1])
        columns: dict[str, object] = {column: PictureFile(location, content=image_HW.tobytes(), shape=shape)}
        if labels_N is not None:
            columns[label] = str(labels_N[index])
        yield RawRow(location, columns)


def fingerprint(path: Path) -> str:
    """SHA-256 over both files."""
    labels = _renamed(path, "labels", 1)
    found = [files.digest(each) for each in (path, labels) if each.exists()]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def _renamed(path: Path, kind: str, dimensions: int) -> Path:
    name = re.sub(r"images|labels", kind, path.name)
    return path.with_name(re.sub(r"idx\d", f"idx{dimensions}", name))


def _read(path: Path, dimensions: int) -> Pixels:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{path}: cannot be read ({why}). Copy or download it again.") from None
    shape = tuple(int(size) for size in np.frombuffer(content[4 : 4 + 4 * dimensions], ">u4"))
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) != 4 + 4 * dimensions + int(np.prod(shape)):
        raise DataError(
            f"{path}: not a whole idx file of bytes with {dimensions} dimension(s). Copy or download it again."
        )
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
