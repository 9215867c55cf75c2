"""Prepared pictures in one memory-mapped file: decoded and prepared once, by several processes.

Stores that were used longest ago are deleted where pictures would take too much of the disk, never those in use: beside
a store `NAME/` stands `NAME.used`, whose time is that of the last use, and who uses the store holds a shared lock on
it, which ends with the process. `NAME.lock` is held by who makes the store.

Legend: N pictures, H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import cv2
import numpy as np
import numpy.typing as npt
import PIL

from workbench.data import ordered_processes
from workbench.data.images import preparation
from workbench.data.images.picture_files import NO_RANGES, PictureFile, ValueRanges
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.preparation import PictureStatistics
from workbench.data.stored_files import StoredFile
from workbench.errors import ConfigError, DataError, FileError
from workbench.runs import files as whole_files
from workbench.runs import units

if TYPE_CHECKING:  # decoding processes start four times as fast without the configuration
    from workbench.config.sections.image_config import PrepareConfig


Mistakes = dict[int, str]  # why pictures cannot be read, by their index, without the pictures' names


@dataclass(frozen=True)
class Work:
    """The steps that each picture goes through, and the file of pixels that it is written to."""

    path: Path  # a .npy file of shape (N, H, W, 3)
    offset: int  # bytes of the file before the first picture
    format: PictureFormat
    prepare: PrepareConfig
    max_pixels: int
    statistics: PictureStatistics | None
    ranges: ValueRanges = NO_RANGES


def fill(chunk: range, files: Sequence[PictureFile], work: Work) -> Mistakes:
    """Write the prepared pictures of a chunk to their places."""
    mistakes = {}
    # Written rather than assigned to a mapped array: a page that is first touched costs more than its copy.
    with work.path.open("r+b", buffering=0) as pixels:
        for index, file in zip(chunk, files, strict=True):
            try:
                image = file.image(max_pixels=work.max_pixels, ranges=work.ranges)
                prepared = preparation.prepare(image, work.prepare, work.format, work.statistics)
            except DataError as error:
                mistakes[index] = str(error).removeprefix(f"{file.name}: ")
            else:
                pixels.seek(work.offset + index * prepared.nbytes)
                pixels.write(np.ascontiguousarray(prepared).data)
    return mistakes


def fill_by_several(chunks: Sequence[range], files: Sequence[PictureFile], work: Work, *, others: int) -> Mistakes:
    """Write the prepared pictures of all chunks, by this process and `others` beside it. Raises DataError: one of the
    processes was killed. `files`: all pictures; chunks are of their indices."""
    # Other processes start four times as fast without the configuration.
    settings = cast("PrepareConfig", SimpleNamespace(**work.prepare.model_dump()))
    mistakes: Mistakes = {}
    for part in ordered_processes.results(
        partial(_fill_chunk, replace(work, prepare=settings)),
        ((chunk, files[chunk.start : chunk.stop]) for chunk in chunks),
        processes=1 + min(others, len(chunks) - 1),
        own=0,
        killed="A process that decodes pictures was killed: for lack of memory? Write image.workers=0, or lower "
        "image.max_pixels.",
    ):
        mistakes |= part
    return mistakes


def _fill_chunk(work: Work, item: tuple[range, Sequence[PictureFile]]) -> Mistakes:
    return fill(*item, work)


VARIABLE = "WORKBENCH_CACHE_GB"  # environment variable: gigabytes that prepared pictures may take together
SHARE = 0.5  # share of the disk's room, what they take and what is free, that they may take where VARIABLE is not set
_log = logging.getLogger(__name__)


def use(store: Path) -> Callable[[], None]:
    """Mark a store as in use until the function that is returned is called, or this process ends."""
    with suppress(OSError):  # a folder that may only be read is not cleared either
        used = store.with_suffix(".used").open("a")
        with suppress(OSError):
            fcntl.flock(used, fcntl.LOCK_SH)
            os.utime(used.fileno())
        return used.close
    return lambda: None


def make_room(folder: Path, needed: int) -> None:
    """Delete stores in `folder` until there is room for `needed` more bytes within the limit, and tell which. Raises
    ConfigError: the limit is no number."""
    size_of: dict[Path, int] = {}
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            size_of[path] = 0
            with suppress(OSError):  # another process deletes it
                size_of[path] = sum(file.stat().st_size for file in path.iterdir())
    taken = sum(size_of.values())
    limit, given = SHARE * (taken + shutil.disk_usage(folder).free), os.environ.get(VARIABLE)
    if given:
        limit = math.nan
        with suppress(ValueError):
            limit = float(given) * 1e9
        if not math.isfinite(limit) or limit < 0:
            raise ConfigError(f"{VARIABLE}={given}: expected a number of gigabytes, such as 50.")
    for path in sorted(size_of, key=_last_use):
        if taken + needed <= limit:
            return
        try:  # unless a process uses or makes it
            with path.with_suffix(".used").open("a") as used, path.with_suffix(".lock").open("a") as lock:
                for file in (used, lock):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
        except OSError:  # in use, deleted by another process, or not ours to delete
            continue
        taken -= size_of[path]
        _log.warning(
            "%s: prepared pictures (%s) were deleted, used longest ago; all may take %s. Set %s to keep more.",
            *(path, units.size(size_of[path]), units.size(limit), VARIABLE),
        )


def _last_use(store: Path) -> float:
    for path in (store.with_suffix(".used"), store):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


VERSION = "3"  # raise it when the files, or what preparation does, change
CORES = len(os.sched_getaffinity(0))  # cores that this process may use
CHUNK = 8  # pictures that a process is given at a time
PATIENCE = 0.3
"""Seconds of work that are left, at the pace of the first pictures, from which `auto` starts processes: the time of
reading files, and processor time, since on a busy machine starting a process takes as many times longer as decoding."""
BLOCK = 2**20  # bytes of a file that are checked at a time, and stay in the processor's cache
TRIAL = 0.03  # seconds of such work that `auto` does in this process before it judges


@dataclass(frozen=True)
class StoredPictures:
    """Prepared pictures or recordings, in the order in which they were given."""

    pixels: npt.NDArray[Any]  # of uint8 (N, H, W, 3), mapped from a file; black where a picture has a mistake
    mistakes: Mapping[int, str]  # why pictures cannot be read, by their index
    folder: Path
    decoded: int  # pictures that were decoded now; 0 where an earlier run had stored them


def store(
    files: Sequence[PictureFile],
    *,
    format: PictureFormat,
    prepare: PrepareConfig,
    max_pixels: int,
    workers: int | Literal["auto"],
    folder: Path,
    statistics: PictureStatistics | None = None,
    ranges: ValueRanges = NO_RANGES,
) -> StoredPictures:
    """Decode and prepare pictures, or find them as an earlier run stored them in `folder`. Raises DataError: decoding
    processes were killed; FileError: the store cannot be written.

    Args:
        max_pixels: Of a file; larger ones are mistakes.
        workers: Processes that decode beside this one; `auto`: as many as there are cores for, where it saves time.
            The result is the same.
        folder: Where stores are kept, each in a folder of its own.
        statistics: Of the training rows, for `standardise=data`.
        ranges: Of the training rows, for pictures of more than 8 bits a value.
    """
    work = Work(Path(), 0, format, prepare, max_pixels, statistics, ranges)
    shape = (format.height, format.width, 3)
    return keep(
        files,
        settings=_settings(work),
        shape=shape,
        descr="|u1",
        fill=lambda path, offset: _filled(files, replace(work, path=path, offset=offset), workers),
        folder=folder,
        what=f"prepared pictures of {format.width} x {format.height} pixels",
        cure="write a smaller image.size",
    )


def keep(
    files: Sequence[StoredFile],
    *,
    settings: Sequence[object],
    shape: tuple[int, ...],
    descr: str,
    fill: Callable[[Path, int], Mistakes],
    folder: Path,
    what: str,
    cure: str,
) -> StoredPictures:
    """What files become, or find it as an earlier run stored it in `folder`. Raises FileError: the store cannot be
    written.

    Args:
        settings: All that the result depends on besides the files.
        shape: Of the numbers of a file.
        descr: Their type, as NumPy writes it.
        fill: Writes the numbers of all files to their places in the file at a path, from an offset in bytes.
        what: The rows in words, and `cure` what makes them smaller, for messages.
    """
    path = folder / _fingerprint(files, settings)
    if (cached := _opened(path, files)) is not None:
        return cached
    lock = path.with_suffix(".lock")
    whole_files.require_writable(lock)
    with lock.open("a") as file:  # no other process makes this store, so that ranks of one run decode once
        fcntl.flock(file, fcntl.LOCK_EX)
        for unfinished in path.parent.glob(f".{path.name}.*"):  # left by a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        if (cached := _opened(path, files)) is not None:  # another process made it meanwhile
            return cached
        needed = len(files) * math.prod(shape) * np.dtype(descr).itemsize
        make_room(folder, needed)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise FileError(
                f"{folder}: {len(files):,} {what} take {units.size(needed)}, and {units.size(free)} are free. Set "
                f"WORKBENCH_CACHE to a folder on a larger disk, or {cure}."
            )
        with whole_files.new_folder(path, durable=False) as aside:  # `_read` compares the checksum
            with (aside / _PIXELS).open("wb") as numbers:
                header = {"descr": descr, "fortran_order": False, "shape": (len(files), *shape)}
                np.lib.format.write_array_header_1_0(numbers, header)
                offset = numbers.tell()
                if files:  # a disk that is too full fails here, not after hours
                    os.posix_fallocate(numbers.fileno(), offset, needed)
            mistakes = fill(aside / _PIXELS, offset)
            index = {"mistakes": list(mistakes.items()), "checksum": _checksum(aside / _PIXELS)}
            (aside / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        if (written := _opened(path, files, known_whole=True)) is None:
            raise FileError(f"{path}: damaged right after it was written. Set WORKBENCH_CACHE to another disk.")
    return replace(written, decoded=len(files))


_PIXELS, _INDEX = "pixels.npy", "index.json"


def _settings(work: Work) -> list[object]:
    """What prepared pictures depend on besides their files: settings, and versions of the libraries."""
    format, prepare = asdict(work.format), work.prepare
    # Pixels are stored before normalisation; its mean is the border's colour.
    del format["std"]
    if "pad" not in (work.format.fit, prepare.fit):
        del format["mean"]
    statistics = work.statistics if prepare.standardise == "data" else None
    versions = (VERSION, PIL.__version__, cv2.__version__)
    return [versions, format, prepare.model_dump(), work.max_pixels, statistics, work.ranges]


def _fingerprint(files: Sequence[StoredFile], settings: Sequence[object]) -> str:
    """A name for what stored rows depend on."""
    hasher = hashlib.sha256(json.dumps(settings, default=str).encode())
    for file in files:
        hasher.update(file.digest_or_fault())
    return hasher.hexdigest()[:32]


def _opened(path: Path, files: Sequence[StoredFile], *, known_whole: bool = False) -> StoredPictures | None:
    """A store that is whole, in use from now on; None where there is none, or one that somebody damaged."""
    if not path.exists():
        return None
    release = use(path)
    pictures = _read(path, files, known_whole=known_whole)
    if pictures is None:
        release()
    else:
        weakref.finalize(pictures.pixels, release)
    return pictures


def _read(path: Path, files: Sequence[StoredFile], *, known_whole: bool) -> StoredPictures | None:
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        if not known_whole and _checksum(path / _PIXELS) != index["checksum"]:
            return None
        pixels = np.load(path / _PIXELS, mmap_mode="r").view(np.ndarray)  # whose rows cost a tenth of a memmap's
        # By today's names: other files may have the same contents.
        mistakes = {place: f"{files[place].name}: {text}" for place, text in sorted(index["mistakes"])}
        return StoredPictures(pixels, mistakes, path, decoded=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _checksum(path: Path) -> int:
    """A checksum of checksums of blocks, several at a time."""
    starts = range(0, path.stat().st_size, BLOCK)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        block_checksums = ordered_processes.by_threads(
            lambda start: zlib.crc32(os.pread(descriptor, BLOCK, start)), starts, size=BLOCK
        )
    finally:
        os.close(descriptor)
    return zlib.crc32(np.asarray(block_checksums, np.uint32).tobytes())


def _filled(files: Sequence[PictureFile], work: Work, workers: int | Literal["auto"]) -> Mistakes:
    """Fill the file of pixels; returns the mistakes."""
    if workers == 0 or (workers == "auto" and CORES < 2):
        return fill(range(len(files)), files, work)
    mistakes: Mistakes = {}
    done = _fill_few(files, work, mistakes) if workers == "auto" else 0
    chunks = [range(start, min(start + CHUNK, len(files))) for start in range(done, len(files), CHUNK)]
    if chunks:
        mistakes |= fill_by_several(chunks, files, work, others=CORES - 1 if workers == "auto" else workers)
    return mistakes


def _fill_few(files: Sequence[PictureFile], work: Work, mistakes: Mistakes) -> int:
    """Fill pictures in this process for as long as others would not save time; returns how many."""
    spent_s = 0.0
    for index, file in enumerate(files):
        if spent_s > TRIAL and spent_s / index * (len(files) - index) > PATIENCE:
            return index
        began_s = time.monotonic()
        held = file.loaded()
        spent_s += time.monotonic() - began_s
        began_s = time.thread_time()
        mistakes |= fill(range(index, index + 1), [held], work)
        spent_s += time.thread_time() - began_s
    return len(files)
