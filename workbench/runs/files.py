"""Atomic writes: files appear whole or not at all, even when the process is killed or the disk is full."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from workbench.errors import FileError


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically and durably."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    with explained_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that `write_json` wrote, empty where the file does not exist; raises FileError if damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if os.path.isfile(path) else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(
            f"{path}: damaged, it holds no JSON object ({error}). Restore it, or start a new run."
        ) from None


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a text; raises ValueError that names the first line without one."""
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"line {number} holds no JSON object")
        records.append(value)
    return records


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the complete lines of a file that a live run may be writing; none where there is no file."""
    text = path.read_text(encoding="utf-8") if os.path.isfile(path) else ""
    return json_lines(text[: text.rfind("\n") + 1])


def cache_folder() -> Path:
    """Where tokenised data and other things worth keeping stand; WORKBENCH_CACHE moves it."""
    base = os.environ.get("WORKBENCH_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "peft-workbench"


def require_writable(path: Path) -> None:
    """Raise FileError where `path` could not be written, before the work whose result it will hold."""
    with explained_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def new_folder(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A folder to fill, which becomes `path` (replacing an older one) when the block ends without an error.

    Args:
        durable: Wait until a power cut would lose nothing. Not needed for a cache that is checked when it is read.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with explained_errors(path):
            begin(aside)
            yield aside
            complete(aside, path, durable=durable)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def begin(aside: Path) -> None:
    """Make an empty folder, which `complete` gives its name; it ends in `.unfinished`."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()


def complete(aside: Path, path: Path, *, durable: bool = True) -> None:
    """Make a folder that is filled `path`, in place of an older one; `durable` as `new_folder` says."""
    if durable:
        for file in aside.rglob("*"):
            fsync(file)
        fsync(aside)
    if path.exists():
        old = path.with_name(f".{path.name}.{os.getpid()}.replaced")
        os.replace(path, old)
        os.replace(aside, path)
        shutil.rmtree(old)
    else:
        os.replace(aside, path)
    fsync(path.parent)


def remove_unfinished(*folders: Path) -> None:
    """Delete what a killed process left behind in `folders`; what it was about to replace gets its name back."""
    for folder in folders:
        for old in folder.glob(".*.replaced"):
            if not (name := folder / old.name[1:].rsplit(".", 2)[0]).exists():
                os.replace(old, name)
        for path in [*folder.glob(".*.unfinished"), *folder.glob(".*.replaced")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, missing rights and the like into a FileError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise FileError(f"{path}: cannot be written ({why}). Make room there, or name another place.") from error


def fsync(path: Path) -> None:
    """Wait until a power cut would not lose a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
