"""References to pictures, light enough to be sent to the processes that decode them."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from workbench.data.images import deep_pictures
from workbench.data.images.decoding import Pixels, decode_image, deep_values, size
from workbench.data.images.deep_pictures import NO_RANGES, ValueRanges, Values
from workbench.errors import DataError
from workbench.runs import files, units

MOST_BYTES = 2**30
"""Largest file that is read, unpacked: 100 million pixels of four channels in 16 bits take 0.8 GB. What is larger is
compressed to exhaust the memory, or no picture."""


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture: a file, a member of an archive, the bytes of a file, or pixels."""

    name: str
    """For messages: the file, or the row that holds it."""
    path: Path | None = None
    member: str | None = None
    """Name inside the archive `path`."""
    content: bytes = b""
    """Bytes of a file, or with `shape` the pixels; where there is no path."""
    shape: tuple[int, ...] | None = None
    """Shape of pixels: (height, width) of grey ones, (height, width, 3) of colours."""
    span: tuple[int, int] | None = None
    """Where the file begins in the tar archive `path`, and its bytes."""

    def read(self) -> bytes:
        """The bytes of the file, not decoded.

        Raises:
            DataError: It is missing, cannot be read, is no file, or has more than `MOST_BYTES`.
        """
        if self.path is None:
            return self.content
        try:
            if self.span is not None:
                return _part(self.path, *self.span)
            if self.member:
                return _member(_archive(os.getpid(), *_version(self.path)), self.member)
            return _whole(self.path)
        except _UNREADABLE as error:
            raise DataError(f"{self.name}: cannot be read ({_why(error)}). Copy it again, or remove it.") from None

    def loaded(self) -> PictureFile:
        """The same picture with its bytes in memory; one that cannot be read says why where it is decoded."""
        try:
            return self if self.path is None else PictureFile(self.name, content=self.read())
        except DataError:
            return self

    def decode(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Pixels:
        """Pixels (H, W, 3), read-only, as `decoding.decode` gives them."""
        return np.asarray(self.image(max_pixels=max_pixels, ranges=ranges))

    def image(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
        """An image of mode RGB, as `decoding.decode_image` gives it."""
        if self.shape is None:
            return decode_image(self.read(), self.name, max_pixels=max_pixels, ranges=ranges)
        return Image.fromarray(np.frombuffer(self.content, np.uint8).reshape(self.shape)).convert("RGB")

    def may_be_deep(self) -> bool:
        """Whether it can have more than 8 bits a value, by name and first bytes; False where it cannot be read."""
        if self.name.lower().endswith(_OF_8_BITS):
            return False
        try:
            return self.shape is None and deep_pictures.may_be_deep(self._start())
        except (DataError, *_UNREADABLE):
            return False

    def deep_values(self, *, max_pixels: int) -> Values | None:
        """Numbers of a picture of more than 8 bits, as `decoding.deep_values` gives them."""
        return None if self.shape is not None else deep_values(self.read(), self.name, max_pixels=max_pixels)

    def _start(self) -> bytes:
        if self.path is None:
            return self.content[:_START]
        if self.span is not None:
            return _part(self.path, self.span[0], min(self.span[1], _START))
        if self.member:
            with _archive(os.getpid(), *_version(self.path)).open(self.member) as file:
                return file.read(_START)
        if not self.path.is_file():  # reading a pipe would wait for ever
            return b""
        with self.path.open("rb", buffering=0) as file:
            return file.read(_START)

    def size(self) -> tuple[int, int]:
        """Height and width, without decoding the pixels."""
        return size(self.read(), self.name) if self.shape is None else (self.shape[0], self.shape[1])

    def digest(self) -> bytes:
        """SHA-256 that tells other contents apart: of the bytes, or of a zip archive and the member's name."""
        if self.path is not None and self.member and self.span is None:
            hasher = hashlib.sha256(_archive_digest(*_version(self.path)))
            hasher.update(self.member.encode())
        else:
            hasher = hashlib.sha256(self.read())
            hasher.update(repr(self.shape).encode())
        return hasher.digest()

    def digest_or_fault(self) -> bytes:
        """The digest, or why there is none: a file that cannot be read is refused, or left out, where it is decoded."""
        try:
            return self.digest()
        except DataError as error:
            return f"unreadable: {error}".encode()


_OF_8_BITS = (".jpg", ".jpeg", ".jfif", ".gif", ".webp", ".bmp")
"""Ends of names of files that are not opened to see whether they are deep: thousands would hold a first epoch up."""
_START = 32
"""Bytes that say of which kind a file is."""
_UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)
"""Errors of the disk, and those that a damaged zip archive raises."""


def _whole(path: Path) -> bytes:
    file_stat = path.stat()
    if not stat.S_ISREG(file_stat.st_mode):  # reading a pipe would wait for ever
        raise OSError("it is no file")
    _require_size(file_stat.st_size)
    return path.read_bytes()


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    _require_size(archive.getinfo(name).file_size)
    return archive.read(name)


def _require_size(size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(f"it has {units.size(size)}, more than a picture takes, at most {units.size(MOST_BYTES)}")


def _part(path: Path, start: int, size: int) -> bytes:
    _require_size(size)
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(size)
    if len(content) < size:
        raise EOFError("the archive is shorter than it was")
    return content


def _version(path: Path) -> tuple[Path, int, int]:
    """An archive as it is now, so that one which is replaced is opened again."""
    try:
        file_stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_why(error)}).") from None
    return path, file_stat.st_mtime_ns, file_stat.st_size


@functools.lru_cache(maxsize=4)
def _archive(process: int, path: Path, modified: int, size: int) -> zipfile.ZipFile:
    # A forked process would share the place in the file with its parent, so each opens it for itself.
    return zipfile.ZipFile(path)


@functools.lru_cache(maxsize=16)
def _archive_digest(path: Path, modified: int, size: int) -> bytes:
    return bytes.fromhex(files.digest(path))


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
