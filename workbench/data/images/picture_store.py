"""Prepared pictures in one memory-mapped file: decoded and prepared once, by several processes.

Legend: N pictures, H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import PIL

from workbench.config.picture_prepare_config import PrepareConfig
from workbench.data.images import preparation
from workbench.data.images.decoding import Pixels
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.preparation import PictureStatistics
from workbench.errors import DataError, FileError
from workbench.runs import files as whole_files

VERSION = "1"
"""Of the files, and of what preparation does: raise it when either changes."""
CHUNK = 64
"""Pictures that a process is given at a time."""
FEW = 2000
"""Pictures up to which starting processes takes longer than it saves."""


@dataclass(frozen=True)
class StoredPictures:
    """Prepared pictures, in the order in which they were given."""

    pixels: npt.NDArray[np.uint8]
    """(N, H, W, 3), mapped from a file; black where a picture has a mistake."""
    mistakes: Mapping[int, str]
    """Why pictures cannot be read, by their index."""
    folder: Path
    decoded: int
    """Pictures that were decoded now; 0 where an earlier run had stored them."""


@dataclass(frozen=True)
class _Work:
    """What a process needs to know besides the pictures."""

    path: Path
    format: PictureFormat
    prepare: PrepareConfig
    max_pixels: int
    statistics: PictureStatistics | None


def store(
    files: Sequence[PictureFile],
    *,
    format: PictureFormat,
    prepare: PrepareConfig,
    max_pixels: int,
    workers: int | Literal["auto"],
    folder: Path,
    statistics: PictureStatistics | None = None,
) -> StoredPictures:
    """Decode and prepare pictures, or find them as an earlier run stored them in `folder`.

    Args:
        max_pixels: Of a file; larger ones are mistakes.
        workers: Processes that decode; 0 is this one. The result is the same.
        folder: Where stores are kept, each in a folder of its own.
        statistics: Of the training rows, for `standardise=data`.

    Raises:
        DataError: Decoding processes were killed.
        FileError: The store cannot be written.
    """
    work = _Work(Path(), format, prepare, max_pixels, statistics)
    path = folder / fingerprint(files, work)
    found = _opened(path)
    if found is not None and len(found.pixels) == len(files):
        return found
    with whole_files.new_folder(path) as aside:
        mistakes = _write(files, _Work(aside / _PIXELS, format, prepare, max_pixels, statistics), workers)
        index = {"mistakes": {str(key): text for key, text in mistakes.items()}, "checksum": _checksum(aside / _PIXELS)}
        (aside / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    written = _opened(path)
    if written is None:
        raise FileError(f"{path}: damaged right after it was written. Set WORKBENCH_CACHE to another disk.")
    return StoredPictures(written.pixels, written.mistakes, path, len(files))


_PIXELS, _INDEX = "pixels.npy", "index.json"


def fingerprint(files: Sequence[PictureFile], work: _Work) -> str:
    """A name for what prepared pictures depend on: contents, settings, and versions of the libraries."""
    settings = [
        VERSION, PIL.__version__, cv2.__version__, asdict(work.format), work.prepare.model_dump(), work.max_pixels,
        work.statistics if work.prepare.standardise == "data" else None,
    ]  # fmt: skip
    found = hashlib.sha256(json.dumps(settings, default=str).encode())
    for file in files:
        try:
            found.update(file.digest())
        except DataError as error:
            found.update(f"unreadable: {error}".encode())
    return found.hexdigest()[:32]


def _opened(path: Path) -> StoredPictures | None:
    """A store that is whole; None where there is none, or one that somebody damaged."""
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        if _checksum(path / _PIXELS) != index["checksum"]:
            return None
        pixels = np.load(path / _PIXELS, mmap_mode="r")
        return StoredPictures(pixels, {int(key): text for key, text in index["mistakes"].items()}, path, 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            found = zlib.crc32(block, found)
    return found


def _write(files: Sequence[PictureFile], work: _Work, workers: int | Literal["auto"]) -> dict[int, str]:
    """Fill the file of pixels; returns the mistakes."""
    shape = (len(files), work.format.height, work.format.width, 3)
    if not files:
        np.save(work.path, np.empty(shape, np.uint8))
        return {}
    pixels = np.lib.format.open_memmap(work.path, mode="w+", dtype=np.uint8, shape=shape)
    # A mapped file on a full disk would kill the process when it is written; this fails first.
    with work.path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, work.path.stat().st_size)
    chunks = [range(start, min(start + CHUNK, len(files))) for start in range(0, len(files), CHUNK)]
    count = min(_count(workers, len(files)), len(chunks))
    mistakes: dict[int, str] = {}
    if count == 0:
        for chunk in chunks:
            mistakes |= _fill(pixels, chunk, files[chunk.start : chunk.stop], work)
    else:
        for found in _in_processes(files, chunks, work, count):
            mistakes |= found
    pixels.flush()
    return mistakes


def _count(workers: int | Literal["auto"], pictures: int) -> int:
    if workers != "auto":
        return workers
    cores = len(os.sched_getaffinity(0))
    return cores if pictures > FEW and cores > 1 else 0


def _in_processes(
    files: Sequence[PictureFile], chunks: Sequence[range], work: _Work, count: int
) -> Iterator[dict[int, str]]:
    # New processes rather than forked ones: threads of this one may hold locks.
    with ProcessPoolExecutor(count, get_context("spawn"), initializer=_begin, initargs=(work,)) as pool:
        try:
            yield from pool.map(_fill_chunk, chunks, [files[chunk.start : chunk.stop] for chunk in chunks])
        except BrokenProcessPool:
            raise DataError(
                "A process that decodes pictures was killed: for lack of memory? Write image.workers=0, or lower "
                "image.max_pixels."
            ) from None


_work: _Work | None = None
"""Of a process that decodes, for as long as it lives."""


def _begin(work: _Work) -> None:
    global _work
    _work = work
    cv2.setNumThreads(1)


def _fill_chunk(chunk: range, files: Sequence[PictureFile]) -> dict[int, str]:
    assert _work is not None
    pixels = np.lib.format.open_memmap(_work.path, mode="r+")
    return _fill(pixels, chunk, files, _work)


def _fill(pixels: Pixels, chunk: range, files: Sequence[PictureFile], work: _Work) -> dict[int, str]:
    """Write the prepared pictures of a chunk to their places; returns the mistakes."""
    mistakes = {}
    for index, file in zip(chunk, files, strict=True):
        try:
            picture = file.decode(max_pixels=work.max_pixels)
            pixels[index] = preparation.prepare(picture, work.prepare, work.format, work.statistics)
        except DataError as error:
            mistakes[index] = str(error)
    return mistakes
