"""Files that appear whole or not at all, also when the process is killed or the disk is full."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
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
    """A JSON object, empty where the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` (replacing an older one) when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.rglob("*"):
            _fsync(file)
        _fsync(aside)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.replaced")
            os.replace(path, old)
            os.replace(aside, path)
            shutil.rmtree(old)
        else:
            os.replace(aside, path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed process left behind in `folder`."""
    for path in [*folder.glob(".*.unfinished"), *folder.glob(".*.replaced")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
