"""metrics.jsonl of runs, read on while they grow, as columns that a plot draws.

Legend: N rows.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import FileError

POINTS = 4000
"""Rows that are sent as they are; of more, each is the mean of several."""
_KEPT = 64
"""Files that are kept in memory."""
_LAST = ("step", "tokens_seen", "elapsed_s")
"""Columns that only grow: several rows become the last of them."""

Columns = dict[str, list[float | None]]


class MetricFile:
    """One metrics.jsonl. Only what is new is read; a file that was replaced, as a resumed run does, is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode = inode
        self._ends = array("q")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read the rows that have come; raises FileError for a line that is none."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._read(file.fileno(), file)
            except FileNotFoundError:
                self._forget(0)

    def _read(self, descriptor: int, file: Any) -> None:
        import os

        found = os.fstat(descriptor)
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._forget(found.st_ino)
        file.seek(self._offset)
        text: bytes = file.read(found.st_size - self._offset)
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)  # a live run may be in the middle of its last
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
            for line, row in zip(lines, rows, strict=True):
                self._append(row, len(line))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{self._path}: damaged ({error}).") from None

    def _append(self, row: dict[str, Any], size: int) -> None:
        count = len(self._ends)
        numbers = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        seen = self._columns.get("tokens_seen")
        numbers["tokens_seen"] = (seen[-1] if seen else 0.0) + numbers.get("tokens", 0.0)
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * count
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))
        self._ends.append(self._offset + size)

    @property
    def _offset(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def position(self) -> str:
        """Where reading goes on: the file, and the number of its bytes that were read."""
        return f"{self._inode:x}.{self._offset}"

    def after(self, position: str | None) -> tuple[bool, Columns]:
        """The rows behind a position, and whether they go on from there rather than begin anew."""
        with self._lock:
            inode, _, offset = (position or "").partition(".")
            if inode == f"{self._inode:x}" and offset.isdigit():
                first = bisect_left(self._ends, int(offset))
                if first < len(self._ends) and self._ends[first] == int(offset):
                    return True, self._sent(first + 1)
            return False, self._sent(0)

    def _sent(self, first: int) -> Columns:
        columns = {name: np.array(column[first:]) for name, column in self._columns.items()}
        return {name: _listed(values_N) for name, values_N in thinned(columns).items()}

    def last(self, rows: int) -> list[dict[str, float]]:
        """The newest rows."""
        with self._lock:
            columns = {name: column[-rows:] for name, column in self._columns.items()}
        count = min(rows, len(self._ends))
        return [{name: column[row] for name, column in columns.items()} for row in range(count)]


def thinned(columns: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    """At most POINTS rows: means of as many rows each, and for the loss the lowest and highest of them too."""
    rows = len(columns.get("step", ()))
    width = -(-rows // POINTS)
    if width <= 1:
        return columns
    found: dict[str, npt.NDArray[np.float64]] = {}
    starts = np.arange(0, rows, width)
    ends = np.append(starts[1:], rows) - 1
    for name, values_N in columns.items():
        if name in _LAST:
            found[name] = values_N[ends]
            continue
        known = np.isfinite(values_N)
        count = np.add.reduceat(known, starts, dtype=np.int64)
        total = np.add.reduceat(np.where(known, values_N, 0.0), starts)
        found[name] = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
        if name == "loss":
            found["loss_low"] = np.fmin.reduceat(values_N, starts)
            found["loss_high"] = np.fmax.reduceat(values_N, starts)
    return found


def _listed(values_N: npt.NDArray[np.float64]) -> list[float | None]:
    """As JSON has them: seven digits, and None for what is no number."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values_N.tolist()]


class MetricFiles:
    """The files that were read last."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, MetricFile] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> MetricFile:
        """The file at a path, up to its last whole row."""
        with self._lock:
            file = self._files.pop(path, None) or MetricFile(path)
            self._files[path] = file
            if len(self._files) > _KEPT:
                self._files.popitem(last=False)
        file.refresh()
        return file
