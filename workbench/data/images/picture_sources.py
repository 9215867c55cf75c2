"""Rows of pictures: class folders, zip and tar archives of them, idx files, and tables with a picture column.

A folder `plants/` with `plants/fern/1.jpg` has the row {image: that file, label: "fern"}; folders inside a class folder
belong to the class. An archive is read like the folder that it holds; `plants.zip/train` is its folder `train`.
A folder without class folders has rows without labels, for predictions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.data import hub_datasets, rows, starter
from workbench.data.images import idx_files, picture_archives, picture_trees
from workbench.data.images.picture_files import PictureFile
from workbench.data.rows import RawRow, excerpt
from workbench.errors import DataError
from workbench.schema import did_you_mean

__all__ = ["PictureFile", "fingerprint", "lacks_classes", "read_rows"]

LABEL = "label"
"""Column of the class that folders and idx files say."""


def read_rows(source: str, column: str = "image") -> Iterator[RawRow]:
    """Yield the rows of a source of pictures; each has a `PictureFile` in `column`.

    Args:
        source: A folder, a zip or tar archive or a folder inside one, an idx file of images, a table, a folder of
            tables, or a hub data set.
        column: The picture in a table: a path from the table's folder, the bytes of a file, or both, as `datasets` do.

    Raises:
        DataError: The source is missing, holds no pictures, or does not say clearly which class they have.
    """
    path = _path(source)
    if idx_files.is_idx(path):
        yield from idx_files.read_rows(path, column, LABEL)
    elif picture_trees.is_tree(path):
        yield from picture_trees.read_rows(path, column, LABEL)
    else:
        _require_readable(source, path)
        yield from _rows_of_table(source, path, column)


def lacks_classes(source: str, row: RawRow) -> bool:
    """Whether a row is of a folder or an archive that has no class folders."""
    return LABEL not in row.columns and picture_trees.is_tree(_path(source))


def fingerprint(source: str, column: str = "image") -> str:
    """Identify the content of all files of a source by SHA-256, with their names; of a hub data set, id@commit."""
    path = _path(source)
    if idx_files.is_idx(path):
        return idx_files.fingerprint(path)
    found = hashlib.sha256()
    if not picture_trees.is_tree(path):
        table = rows.fingerprint(source)
        if not os.path.exists(path):
            return table
        found.update(table.encode())
    for row in read_rows(source, column):
        file = row.columns.get(column)
        if isinstance(file, PictureFile) and (file.path is not None):
            found.update(f"{row.place}\0{row.columns.get(LABEL)}\0".encode())
            found.update(file.digest_or_fault())
    return found.hexdigest()


def _path(source: str) -> Path:
    path = Path(os.path.expanduser(starter.resolve(source)))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):  # a hub data set, or a folder inside an archive
        pass
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read ({error.strerror}). Make it readable, or name another one."
        ) from None
    return path


_ARCHIVES = (".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")


def _require_readable(source: str, path: Path) -> None:
    """Refuse what is neither of pictures nor a table."""
    suffix = path.suffix.lower()
    if path.is_file() and suffix in _ARCHIVES:
        raise DataError(
            f"{path}: compressed archives of this kind are not read. Unpack it and name the folder; zip and tar "
            "archives are read as they are."
        )
    if path.is_file() and suffix in picture_trees.PICTURES:
        raise DataError(f"{path}: a single picture. Name its folder.")
    parent = path.parent
    if not path.exists() and (suffix in picture_archives.KINDS or (parent.name and parent.is_dir())):
        known = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
        raise DataError(f"{source}: no such file or folder.{picture_trees.nearest(path.name, known)}")


def _rows_of_table(source: str, path: Path, column: str) -> Iterator[RawRow]:
    folder = path if path.is_dir() else path.parent
    on_hub = not os.path.exists(path) and hub_datasets.is_id(source)
    known: list[str] | None = None
    for row in rows.read_rows(source):
        if row.mistake:
            yield row
            continue
        if known is None:
            known = list(row.columns)
            if column not in known:
                raise DataError(
                    f"{source}: has no column `{column}` that holds pictures.{did_you_mean(column, known)} "
                    "Write image.column with the name of the column."
                )
        try:
            file = _picture(row.columns.get(column), row.place, None if on_hub else folder, column)
        except DataError as error:
            yield RawRow(row.place, row.columns, str(error))
        else:
            yield RawRow(row.place, {**row.columns, column: file})


def _picture(value: Any, place: str, folder: Path | None, column: str) -> PictureFile:
    """The picture that a cell holds; a path is taken from `folder`."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return PictureFile(place, content=value)
    if not isinstance(value, str | None):
        raise DataError(f"`{column}` must be a path or the bytes of a picture file, found {excerpt(value)}.")
    if not value or not value.strip():
        raise DataError(f"`{column}` is empty: the row has no picture.")
    if value.lower().startswith(("http://", "https://")):
        raise DataError(f"`{column}` is an address, {excerpt(value)}. Download the pictures, and write their paths.")
    if folder is None and not os.path.isabs(value):  # `datasets` names its downloaded files with their whole path
        raise DataError(f"`{column}` is the path {excerpt(value)}, which a data set on the hub does not bring along.")
    path = (folder or Path()) / os.path.expanduser(value.strip())
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"`{column}`: {value} {kind} ({path}). Paths are taken from the table's folder.")
    return PictureFile(value.strip(), path)
