"""The files that a source names, and their text, also where they are compressed."""

from __future__ import annotations

import bz2
import codecs
import difflib
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from workbench import bounds
from workbench.config import DataConfig
from workbench.data import hub_datasets, starter
from workbench.errors import DataError
from workbench.runs import addresses

AS_NAMED = DataConfig(train="rows")
"""How files are read about which nothing is said: as their names tell."""
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
    ".conll": "conll",
    ".conllu": "conll",
    ".iob": "conll",
    ".bio": "conll",
}
"""What a file holds, by the end of its name."""
_SELF_EVIDENT = ("jsonl", "json", "parquet", "arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KNOWN = f"{', '.join(KINDS)}, also compressed ({', '.join(COMPRESSED)})"
_SUBFOLDERS = "Subfolders are not read, unless data.format=image reads them as classes of pictures."


def local_path(source: str) -> Path:
    """The path that a source stands for; of an address, that of a copy in the cache."""
    if addresses.is_address(source):
        return addresses.fetched(source)
    return Path(os.path.expanduser(starter.resolve(source)))


def kind_of(path: Path, config: DataConfig = AS_NAMED) -> str | None:
    """What a file holds, by its name, or by `config.format`; None where neither tells."""
    by_name = KINDS.get(_suffix(path))
    if by_name in _SELF_EVIDENT or config.format in ("auto", "image"):
        return by_name
    if config.row_format == "auto":
        return config.format
    return by_name or _sniffed(path, config)


def _sniffed(path: Path, config: DataConfig) -> str | None:
    """What a file holds, by its beginning."""
    if not path.is_file():
        return None
    with readable(path), opened(path) as file:
        head = file.readline(4096)
    starts = {b"PAR1": "parquet", b"ARROW1": "arrow", b"{": "jsonl", b"[": "json"}
    found = next((kind for start, kind in starts.items() if head.lstrip().startswith(start)), None)
    return found or ("txt" if config.format == "text" else "tsv" if b"\t" in head else "csv")


def _suffix(path: Path) -> str:
    """The end of a file's name that says what it holds."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def data_files(source: str, config: DataConfig = AS_NAMED) -> list[Path] | None:
    """The files of a path, or None where `source` names a hub data set. `config`: says what files hold whose names do
    not tell."""
    path = local_path(source)
    if os.path.isdir(path):
        if (saved := _saved_to_disk(path)) is not None:
            return saved
        # Readme and licence files are ignored; any other unknown file is refused: it could be data that goes unread.
        paths = [p for p in sorted(path.iterdir()) if p.is_file() and p.suffix not in ("", ".md") and p.name[0] != "."]
        if not paths:
            raise DataError(f"{path}: the folder holds no data file. Known: {_KNOWN}. {_SUBFOLDERS}")
        for each in paths:
            if kind_of(each, config) is None:
                raise DataError(f"{each}: unknown kind of file `{_suffix(each)}`. Known: {_KNOWN}. Move it elsewhere.")
        kinds = {kind_of(each, config): each.name for each in paths}
        if len(kinds) > 1:
            raise DataError(
                f"{path}: the folder mixes kinds of files: {', '.join(kinds.values())}. "
                "Keep one kind, or name a single file."
            )
        return paths
    if bounds.is_endless(path):
        raise DataError(f"{path}: is a pipe or a device, which has no end. Write it to a file.")
    if os.path.exists(path):
        if kind_of(path, config) is None:
            raise DataError(
                f"{path}: unknown kind of file `{_suffix(path)}`. Known: {_KNOWN}. Write data.format=tsv, or "
                "what else it holds: csv, jsonl, txt, label_first (a label and a text on each line)."
            )
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


def _saved_to_disk(folder: Path) -> list[Path] | None:
    """The files of a Dataset that `save_to_disk` wrote, of the split `train` of a DatasetDict; None for others."""
    try:
        if (listed := folder / "dataset_dict.json").is_file():
            splits = json.loads(listed.read_text())["splits"]
            if "train" not in splits:
                raise DataError(
                    f"{folder}: a DatasetDict of the splits {', '.join(splits)}. Write {folder / splits[0]} for one."
                )
            folder /= "train"
        if not (state := folder / "state.json").is_file():
            return None
        return [folder / each["filename"] for each in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataError(f"{folder}: not a data set that can be read ({error}). Save it again.") from None


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


def text_lines(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Decoded lines with their line ends; raises DataError with line and byte where one cannot be decoded."""
    offset = number = 0
    with opened(path) as file:
        if "\n".encode(encoding) != b"\n":  # utf-16 and the like
            try:
                with io.TextIOWrapper(file, encoding, newline="\n") as text_file:
                    yield from text_file
            except UnicodeError as error:
                raise DataError(
                    f"{path}: not {encoding} text: {error}. Write data.encoding=utf-8, or another."
                ) from None
            return
        # Split bytes on \n: text mode hides the offset, and str.splitlines also splits on characters inside a row.
        for block in file:
            # A file without \n has the line ends of old Macs.
            for raw in block.splitlines(keepends=True) if not (number or block.endswith(b"\n")) else (block,):
                number += 1
                try:
                    text = raw.decode(encoding)
                except UnicodeDecodeError as error:
                    likely = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
                    raise DataError(
                        f"{path}: not {encoding.upper()} text: byte 0x{raw[error.start]:02X} at offset "
                        f"{offset + error.start} (line {number}). Write data.encoding={likely}, or what it is."
                    ) from None
                yield text.removeprefix("\ufeff") if number == 1 else text
                offset += len(raw)
