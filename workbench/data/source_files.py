"""The files that a source names, and their text, also where they are compressed."""

from __future__ import annotations

import bz2
import codecs
import difflib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from workbench.data import hub_datasets, starter
from workbench.errors import DataError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "txt",
    ".conll": "conll",
    ".conllu": "conll",
    ".iob": "conll",
    ".bio": "conll",
}
"""What a file holds, by the end of its name."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KNOWN = f"{', '.join(KINDS)}, also compressed ({', '.join(COMPRESSED)})"
_SUBFOLDERS = "Subfolders are not read, unless data.format=image reads them as classes of pictures."


def local_path(source: str) -> Path:
    """The path that a source stands for."""
    return Path(os.path.expanduser(starter.resolve(source)))


def kind_of(path: Path) -> str | None:
    """What a file holds, by its name; None where that does not tell."""
    return KINDS.get(_suffix(path))


def _suffix(path: Path) -> str:
    """The end of a file's name that says what it holds."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def data_files(source: str) -> list[Path] | None:
    """The files of a path, or None where `source` names a hub data set."""
    path = local_path(source)
    if os.path.isdir(path):
        # Readme and licence files are ignored; any other unknown file is refused: it could be data that goes unread.
        paths = [p for p in sorted(path.iterdir()) if p.is_file() and p.suffix not in ("", ".md") and p.name[0] != "."]
        if not paths:
            raise DataError(f"{path}: the folder holds no data file. Known: {_KNOWN}. {_SUBFOLDERS}")
        for each in paths:
            if kind_of(each) is None:
                raise DataError(f"{each}: unknown kind of file `{_suffix(each)}`. Known: {_KNOWN}. Move it elsewhere.")
        kinds = {kind_of(each): each.name for each in paths}
        if len(kinds) > 1:
            raise DataError(
                f"{path}: the folder mixes kinds of files: {', '.join(kinds.values())}. "
                "Keep one kind, or name a single file."
            )
        return paths
    if os.path.exists(path):
        if kind_of(path) is None:
            raise DataError(f"{path}: unknown kind of file `{_suffix(path)}`. Known: {_KNOWN}.")
        return [path]
    parent_exists = len(path.parts) > 1 and os.path.isdir(path.parent)
    if hub_datasets.is_id(source) and not parent_exists and kind_of(path) is None:
        return None
    if not os.path.isdir(path.parent):
        raise DataError(
            f"{source}: no such file; the folder {path.parent} does not exist either. "
            f"A path that does not start with / is looked for in {Path.cwd()}."
        )
    candidates = sorted(p.name for p in path.parent.iterdir() if p.is_dir() or kind_of(p) is not None)
    if closest := difflib.get_close_matches(path.name, candidates, n=1):
        raise DataError(f"{source}: no such file. Did you mean `{path.with_name(closest[0])}`?")
    raise DataError(
        f"{source}: neither a file or folder nor a hub data set, which is written owner/name such as openai/gsm8k. "
        f"Data files in {path.parent.absolute()}: {', '.join(candidates[:8]) or 'none'}."
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the file system, and of damaged archives, into DataErrors."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        what = getattr(error, "strerror", None) or error
        if _unpacker(path) is not None:
            raise DataError(f"{path}: damaged, or not all of it is there ({what}). Fetch it again.") from None
        raise DataError(f"{path}: cannot be read ({what}).") from None


# By their first bytes: a browser may unpack a file and keep its name. No text begins so.
_UNPACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma, b"\x28\xb5\x2f\xfd": "zstd"}


def _unpacker(path: Path) -> Any:
    """What unpacks a compressed file; None where it is not compressed, or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError:
        return None
    return next((unpacker for start, unpacker in _UNPACKERS.items() if head.startswith(start)), None)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, unpacked where it is compressed."""
    unpacker = _unpacker(path)
    if unpacker == "zstd":
        import pyarrow

        file: Any = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    else:
        file = (unpacker or io).open(path, "rb")
    with file:
        yield file


def text_lines(path: Path) -> Iterator[str]:
    """Decoded lines with their line ends; raises DataError with line and byte where one is not UTF-8."""
    offset = number = 0
    with opened(path) as file:
        # Split bytes on \n: text mode hides the offset, and str.splitlines also splits on characters inside a row.
        for block in file:
            # A file without \n has the line ends of old Macs.
            for raw in block.splitlines(keepends=True) if not (number or block.endswith(b"\n")) else (block,):
                number += 1
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
                    raise DataError(
                        f"{path}: not UTF-8 text: byte 0x{raw[error.start]:02X} at offset {offset + error.start} "
                        f"(line {number}). Convert it: iconv -f {encoding} -t utf-8 {path.name} > utf8-{path.name}"
                    ) from None
                yield text.removeprefix("\ufeff") if number == 1 else text
                offset += len(raw)
