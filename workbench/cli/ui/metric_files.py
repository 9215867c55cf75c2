"""metrics.jsonl of runs, read on while they grow, as columns that a plot draws.

Legend: N rows.
"""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.json

from workbench.errors import FileError

POINTS = 4000
"""Rows that are sent as they are; of more, each is the mean of several."""
_KEPT = 64
"""Files that are kept in memory."""
_MANY = 5000
"""Lines at once that are worth a faster parser."""
_ROW_BYTES = 1024
"""Room for a row at the end of a file."""
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
        file_stat = os.fstat(descriptor)
        if file_stat.st_ino != self._inode or file_stat.st_size < self._offset:
            self._forget(file_stat.st_ino)
        file.seek(self._offset)
        text: bytes = file.read(file_stat.st_size - self._offset)
        whole = text[: text.rfind(b"\n") + 1]  # a live run may be in the middle of its last line
        lines = whole.splitlines(keepends=True)
        try:
            self._extend(_parsed(whole, lines), len(lines))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{self._path}: damaged ({error}).") from None
        self._ends.extend((self._offset + np.cumsum([len(line) for line in lines], dtype=np.int64)).tolist())

    def _extend(self, columns: dict[str, npt.NDArray[np.float64]], rows: int) -> None:
        seen = self._columns.get("tokens_seen")
        tokens_N = np.nan_to_num(columns.get("tokens", np.zeros(rows)))
        columns["tokens_seen"] = (seen[-1] if seen else 0.0) + np.cumsum(tokens_N)
        count, unknown_N = len(self._ends), np.full(rows, math.nan)
        for name in columns.keys() | self._columns.keys():
            column = self._columns.setdefault(name, array("d", [math.nan]) * count)
            column.frombytes(columns.get(name, unknown_N).tobytes())

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


def last_rows(path: Path, rows: int) -> list[dict[str, float]]:
    """At most so many of the newest rows, from the end of the file alone: a list shows many runs."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - rows * _ROW_BYTES))
            text = file.read()
    except FileNotFoundError:
        return []
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    whole = lines[1:] if size > rows * _ROW_BYTES else lines
    try:
        records = [json.loads(line) for line in whole[-rows:]]
        return [{key: value for key, value in row.items() if isinstance(value, (int, float))} for row in records]
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{path}: damaged ({error}).") from None


def _parsed(text: bytes, lines: list[bytes]) -> dict[str, npt.NDArray[np.float64]]:
    """The columns of lines that hold a JSON object each; of many, by a parser that reads no NaN, where it can."""
    if len(lines) >= _MANY:
        try:
            table = pyarrow.json.read_json(pyarrow.BufferReader(text))
            if table.num_rows == len(lines):
                kept = [field.name for field in table.schema if pyarrow.types.is_primitive(field.type)]
                return {name: table[name].cast(pyarrow.float64()).to_numpy() for name in kept}
        except pyarrow.ArrowInvalid:
            pass
    rows = json.loads(b"[" + b",".join(lines) + b"]")
    if len(rows) != len(lines):
        raise ValueError("a line holds several values")
    names = dict.fromkeys(name for row in rows for name in row.keys())  # noqa: SIM118, refuses what is no object
    return {name: _numbers([row.get(name) for row in rows]) for name in names}


def _numbers(values: list[Any]) -> npt.NDArray[np.float64]:
    """NaN where there is none, or something else than a number."""
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], dtype=np.float64)


def thinned(columns: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    """At most POINTS rows: means of as many rows each, and for the loss the lowest and highest of them too."""
    rows = len(columns.get("step", ()))
    width = -(-rows // POINTS)
    if width <= 1:
        return columns
    downsampled: dict[str, npt.NDArray[np.float64]] = {}
    starts = np.arange(0, rows, width)
    ends = np.append(starts[1:], rows) - 1
    for name, values_N in columns.items():
        if name in _LAST:
            downsampled[name] = values_N[ends]
            continue
        known = np.isfinite(values_N)
        count = np.add.reduceat(known, starts, dtype=np.int64)
        total = np.add.reduceat(np.where(known, values_N, 0.0), starts)
        downsampled[name] = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
        if name == "loss":
            downsampled["loss_low"] = np.fmin.reduceat(values_N, starts)
            downsampled["loss_high"] = np.fmax.reduceat(values_N, starts)
    return downsampled


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
