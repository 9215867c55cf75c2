"""Files that rows name or hold: on disk, in an archive, or as bytes; light enough to be sent to other processes."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from workbench.errors import DataError
from workbench.runs import files, units

MOST_BYTES = 2**30
"""Largest file that is read, unpacked: 100 million pixels of four channels in 16 bits take 0.8 GB. What is larger is
compressed to exhaust the memory, or is no picture and no recording that one row reads."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, a member of an archive, or the bytes of a file."""

    name: str  # for messages: the file, or the row that holds it
    path: Path | None = None
    member: str | None = None  # name inside the archive `path`
    content: bytes = b""  # bytes of a file, or with `shape` the numbers that it would hold; where there is no path
    shape: tuple[int, ...] | None = None  # of pictures (height, width) or with (..., 3); of sound (samples, channels)
    span: tuple[int, int] | None = None  # where the file begins in the tar archive `path`, and its bytes

    @classmethod
    def from_cell(cls, value: Any, place: str) -> Self | None:
        """The file that a cell of a table holds in a form that only its kind has; None where it has none."""
        return None

    def read(self) -> bytes:
        """The bytes of the file, not decoded. Raises DataError: it is missing, cannot be read, is no file, or has more
        than `MOST_BYTES`."""
        if self.path is None:
            return self.content
        try:
            if self.span is not None:
                return _part(self.path, *self.span)
            if self.member:
                archive = _archive(os.getpid(), *_version(self.path))
                _require_size(archive.getinfo(self.member).file_size)
                return archive.read(self.member)
            file_stat = self.path.stat()
            if not stat.S_ISREG(file_stat.st_mode):  # reading a pipe would wait for ever
                raise OSError("it is no file")
            _require_size(file_stat.st_size)
            return self.path.read_bytes()
        except UNREADABLE as error:
            raise DataError(f"{self.name}: cannot be read ({_why(error)}). Copy it again, or remove it.") from None

    def start(self, count: int) -> bytes:
        """The first bytes; none of what is no file. Raises as `UNREADABLE` says."""
        if self.path is None:
            return self.content[:count]
        if self.span is not None:
            return _part(self.path, self.span[0], min(self.span[1], count))
        if self.member:
            with _archive(os.getpid(), *_version(self.path)).open(self.member) as file:
                return file.read(count)
        if not self.path.is_file():  # reading a pipe would wait for ever
            return b""
        with self.path.open("rb", buffering=0) as file:
            return file.read(count)

    def loaded(self) -> Self:
        """The same with its bytes in memory; one that cannot be read says why where it is decoded."""
        try:
            held = self if self.path is None else None
            return held or replace(self, content=self.read(), path=None, member=None, span=None)
        except DataError:
            return self

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


UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)
"""Errors of the disk, and those that a damaged zip archive raises."""


def _require_size(size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(f"it has {units.size(size)}, more than a row may take, at most {units.size(MOST_BYTES)}")


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


def stamp(path: str) -> str:
    """A file's path, size and time of change; empty where there is no file."""
    try:
        state = Path(path).stat()
    except OSError:
        return ""
    return f"{path}\0{state.st_size}\0{state.st_mtime_ns}"
