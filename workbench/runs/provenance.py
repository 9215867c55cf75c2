"""Digests of a run's inputs in manifest.json. A resumed run must read the same inputs, or it says what changed.

Otherwise its curve would be that of two runs, and nobody would see where the first one ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import ResumeError
from workbench.runs.run_directory import Run

WHOLE = 64 << 20
"""Files up to so many bytes are hashed whole; of larger ones the size and BLOCKS blocks of one MiB, the first and the
last included, so that weights of any size are compared within a second."""
BLOCKS = 32
SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
"""Suffixes of the files in a model's folder that determine what it computes."""


def note_data(run: Run, sets: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Record the rows of a run by split, each as its `facts` describe it.

    Raises:
        ResumeError: The run began with other rows.
    """
    before = run.manifest.get("data") or {}
    changed = []
    for name, now in sets.items():
        then = before.get(name)
        if now and then and then["fingerprint"] != now["fingerprint"]:
            counts = f"{then['rows']:,} rows then, {now['rows']:,} now"
            same = "other content in as many rows" if then["rows"] == now["rows"] else counts
            digests = f"fingerprint {then['fingerprint'][:12]} then, {now['fingerprint'][:12]} now"
            changed.append(f"{now['source']} ({name.replace('_', '-')}): {same}; {digests}")
    _refuse(run, changed)
    run.note(data={**before, **sets})


def note_files(run: Run, kind: str, hashes: Mapping[str, str], *, corrected: bool = False) -> None:
    """Record the digests of files that a run reads, of one kind such as `backbone`, by name.

    Args:
        corrected: The run failed on these files, so that they may have changed.

    Raises:
        ResumeError: A file has changed since the run began, is gone, or is new.
    """
    before = run.manifest.get("inputs", {})
    then = before.get(kind, hashes)
    changed = [
        f"{name} ({kind}): {'new' if name not in then else 'gone' if name not in hashes else 'other content'}"
        for name in sorted({*then, *hashes})
        if then.get(name) != hashes.get(name)
    ]
    _refuse(run, [] if corrected else changed)
    run.note(inputs={**before, kind: dict(hashes)})


def digests(folder: Path, *, title: str) -> dict[str, str]:
    """Digests of the files of a model or adapter, by `title`/name."""
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file())
    return {f"{title}/{path.name}": digest(path) for path in paths}


def digest(path: Path) -> str:
    """SHA-256 of a file, or of its size and a sample of it where it is larger than WHOLE."""
    size, hasher = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.sha256(file.read()).hexdigest()
        hasher.update(str(size).encode())
        last = size - (1 << 20)
        for number in range(BLOCKS):
            file.seek(last * number // (BLOCKS - 1))
            hasher.update(file.read(1 << 20))
    return hasher.hexdigest()


def _refuse(run: Run, changed: list[str]) -> None:
    if run.resumed and changed:
        raise ResumeError(
            "\n  ".join([f"{run.home} began with other files:", *changed])
            + "\n  Put back what it began with, or start a new run with another --out."
        )
