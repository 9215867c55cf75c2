"""Rows of pictures: class folders, zip and tar archives of them, idx files, and tables with a picture column.

A folder `plants/` with `plants/fern/1.jpg` has the row {image: that file, label: "fern"}; folders inside a class folder
belong to the class. An archive is read like the folder that it holds; `plants.zip/train` is its folder `train`.
A folder without class folders has rows without labels, for predictions; so has a single picture.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.data import hub_datasets, rows, starter
from workbench.data.images import decoding, idx_files, picture_archives, picture_trees
from workbench.data.images.picture_files import PictureFile
from workbench.data.rows import RawRow, excerpt
from workbench.errors import DataError
from workbench.schema import did_you_mean

__all__ = ["PictureFile", "fingerprint", "read_rows", "require_classes"]

LABEL = "label"
"""Column of the class that folders and idx files say."""


def read_rows(source: str, column: str = "image") -> Iterator[RawRow]:
    """Yield the rows of a source of pictures; each has a `PictureFile` in `column`.

    Args:
        source: A folder, a zip or tar archive or a folder inside one, an idx file of images, a single picture, a table,
            a folder of tables, or a hub data set.
        column: The picture in a table: a path from the table's folder, the bytes of a file, or both, as `datasets` do;
            in a table of text the bytes in base64, or a data URI.

    Raises:
        DataError: The source is missing, holds no pictures, or does not say clearly which class they have.
    """
    path = _path(source)
    if idx_files.is_idx(path):
        yield from idx_files.read_rows(path, column, LABEL)
    elif picture_trees.is_tree(path):
        yield from picture_trees.read_rows(path, column, LABEL)
    elif _is_picture(path):
        yield RawRow(str(path), {column: PictureFile(str(path), path)})
    else:
        _require_readable(source, path)
        yield from _rows_of_table(source, path, column)


def require_classes(source: str, row: RawRow) -> None:
    """Refuse a row that has no label: a picture alone, or one of a folder or an archive without class folders."""
    path = _path(source)
    if LABEL in row.columns:
        return
    if _is_picture(path):
        raise DataError(f"{source}: a single picture, which has no label. Name its folder.")
    if picture_trees.is_tree(path):
        raise DataError(
            f"{source}: holds pictures without class folders, so that they have no labels. Name the folder "
            "above, with a folder for each class, or a table of paths and labels."
        )


def fingerprint(source: str, column: str = "image") -> str:
    """Identify the content of all files of a source by SHA-256, with their names; of a hub data set, id@commit."""
    path = _path(source)
    if idx_files.is_idx(path):
        return idx_files.fingerprint(path)
    hasher = hashlib.sha256()
    if not picture_trees.is_tree(path) and not _is_picture(path):
        table = rows.fingerprint(source)
        if not os.path.exists(path):
            return table
        hasher.update(table.encode())
    for row in read_rows(source, column):
        file = row.columns.get(column)
        if isinstance(file, PictureFile) and (file.path is not None):
            hasher.update(f"{row.place}\0{row.columns.get(LABEL)}\0".encode())
            hasher.update(file.digest_or_fault())
    return hasher.hexdigest()


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


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in picture_trees.PICTURES and path.is_file()


_ARCHIVES = (".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")


def _require_readable(source: str, path: Path) -> None:
    """Refuse what is neither of pictures nor a table."""
    suffix = path.suffix.lower()
    if path.is_file() and suffix in _ARCHIVES:
        raise DataError(
            f"{path}: compressed archives of this kind are not read. Unpack it and name the folder; zip and tar "
            "archives are read as they are."
        )
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
    if (content := _of_text(value, column)) is not None:
        return PictureFile(place, content=content)
    shown = value if len(value) <= _LONGEST_SHOWN else excerpt(value)
    if folder is None and not os.path.isabs(value):  # `datasets` names its downloaded files with their whole path
        raise DataError(f"`{column}` is the path {excerpt(value)}, which a data set on the hub does not bring along.")
    path = (folder or Path()) / os.path.expanduser(value.strip())
    try:
        if path.is_file():
            return PictureFile(value.strip(), path)
        kind = "is a folder" if path.is_dir() else "does not exist"
    except (OSError, ValueError):  # longer than a path may be, or with a sign that none has
        raise DataError(f"`{column}`: {shown} is neither a path nor a picture in base64.") from None
    raise DataError(
        f"`{column}`: {shown} {kind} ({folder or Path()}/{shown}). Paths are taken from the table's folder."
    )


_LONGEST_SHOWN = 200
"""Characters of a path that a message shows."""
_DATA_URI = re.compile(r"data:(?P<kind>[^,]{0,200}),", re.IGNORECASE)


def _of_text(value: str, column: str) -> bytes | None:
    """The bytes of a picture that text holds as a data URI or in base64; None of other text.

    Raises:
        DataError: A data URI that holds no base64.
    """
    uri = _DATA_URI.match(text := value.strip())
    if uri is None:
        # Whether a picture begins is told by the first signs, so that a path costs nothing.
        start = _decoded(text[:64])
        content = _decoded(text) if start is not None and decoding.looks_like_picture(start) else None
        return content if content is not None and len(content) > len(start or b"") else None
    content = _decoded(text[uri.end() :]) if uri["kind"].lower().endswith(";base64") else None
    if content is None:
        raise DataError(f"`{column}`: {excerpt(value)} is a data URI without whole base64. Write it again, or a path.")
    return content


def _decoded(text: str) -> bytes | None:
    """Bytes of base64, with or without its filling signs and line ends, and also as addresses write it."""
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return None
