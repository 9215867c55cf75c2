"""Members of zip and tar archives. A tar archive must not be compressed, so that each picture can be read alone."""

from __future__ import annotations

import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.errors import DataError

KINDS = (".zip", ".tar")


@dataclass(frozen=True, slots=True)
class Member:
    """A file or a folder in an archive."""

    path: PurePosixPath
    is_folder: bool
    span: tuple[int, int] | None = None
    """Where the content of a file begins in a tar archive, and how many bytes it has."""


def archive_of(path: Path) -> Path | None:
    """The archive that a path names, or that it leads into."""
    return next((each for each in (path, *path.parents) if each.suffix.lower() in KINDS and each.is_file()), None)


def members(archive: Path) -> list[Member]:
    """All files and folders of an archive.

    Raises:
        DataError: It is damaged, encrypted or compressed as a whole, or holds links or paths that lead out of it.
    """
    return _of_tar(archive) if archive.suffix.lower() == ".tar" else _of_zip(archive)


def _of_zip(archive: Path) -> list[Member]:
    try:
        with zipfile.ZipFile(archive) as opened:
            # Later ones replace earlier ones of the same name, as in unpacking.
            entries = {info.filename: info for info in opened.infolist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive}: not a zip archive that can be read ({error}). Copy or download it again."
        ) from None
    if any(info.flag_bits & 1 for info in entries.values()):
        raise DataError(f"{archive}: is encrypted. Unpack it, and name the folder.")
    if wrong := next((name for name in entries if "\\" in name), None):
        raise DataError(
            f"{archive}: holds {wrong}, with a backslash in place of /, as old programs for Windows write. Unpack it, "
            "and name the folder."
        )
    return [Member(_path(archive, name), info.is_dir()) for name, info in entries.items()]


def _of_tar(archive: Path) -> list[Member]:
    try:
        # Later ones replace earlier ones of the same name, as in unpacking.
        with tarfile.open(archive, "r:") as opened:
            entries = {info.name: info for info in opened.getmembers()}
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            f"{archive}: not a tar archive that can be read ({error}). A compressed one must be unpacked; name the "
            "folder. Else copy or download it again."
        ) from None
    return [_member(archive, info) for info in entries.values()]


def _member(archive: Path, info: tarfile.TarInfo) -> Member:
    path = _path(archive, info.name)
    if info.issym() or info.islnk():
        raise DataError(
            f"{archive}: {info.name} is a link to {info.linkname}. Pack it again with the files themselves: "
            "tar --dereference --hard-dereference -cf."
        )
    if info.isdir():
        return Member(path, is_folder=True)
    if not info.isfile() or info.issparse():
        raise DataError(f"{archive}: {info.name} is no plain file. Pack it again without.")
    return Member(path, is_folder=False, span=(info.offset_data, info.size))


def _path(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{archive}: holds {name}, a path that leads out of the archive. Pack it again without.")
    return path
