"""Inputs of a run, as manifest.json holds them since it began; a resumed run reads the same, or says what changed.

Its curve would otherwise be that of two runs, and nobody would see where the one ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import ResumeError
from workbench.runs.run_directory import Run

WHOLE = 64 << 20
"""Bytes up to which all of a file counts; of a larger one its size and BLOCKS blocks of a MiB, first and last among
them, so that weights of any size are compared within a second."""
BLOCKS = 32
SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
"""Files of a model's folder that decide about what it computes."""


def note_data(run: Run, sets: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Note the rows of a run by the names of their sets, as `facts` describes each.

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
    """Note files that a run reads, of one kind such as `backbone`, by their names with their digests.

    Args:
        corrected: They ended the run with an error, and may be others now.

    Raises:
        ResumeError: One is not what it was when the run began, is gone, or is new.
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
    """Digests of the files of a model or adapter, by their names behind `title`."""
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file())
    return {f"{title}/{path.name}": digest(path) for path in paths}


def digest(path: Path) -> str:
    """SHA-256 of a file, or of its size and a sample of it where it is larger than WHOLE."""
    size, hasher = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.sha256(file.read()).hexdigest()
        hasher.update(str(size).encode())
        for place in _places(size):
            file.seek(place)
            hasher.update(file.read(1 << 20))
    return hasher.hexdigest()


def _places(size: int) -> Iterable[int]:
    last = size - (1 << 20)
    return (last * number // (BLOCKS - 1) for number in range(BLOCKS))


def _refuse(run: Run, changed: list[str]) -> None:
    if run.resumed and changed:
        raise ResumeError(
            "\n  ".join([f"{run.home} began with other files:", *changed])
            + "\n  Put back what it began with, or start a new run with another --out."
        )
