"""Facts about the rows of a data set, and rows of several named sets, each with scores of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from workbench.data import starter
from workbench.data.batching import Indices
from workbench.errors import DataError

MAX_BINS = 40
WITHOUT = "without copies"
"""Name under which the rows of a set that are no copies of training rows have scores of their own."""


class DatasetFacts(Protocol):
    """Tokenised rows of one file, folder or hub data set."""

    @property
    def source(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def lengths(self) -> Indices: ...
    @property
    def truncated(self) -> int: ...
    @property
    def skipped(self) -> Sequence[str]: ...


def shared_facts(rows: DatasetFacts, *, supervised_tokens: int) -> dict[str, Any]:
    """Source, rows, tokens, and a histogram of row lengths in tokens: edges `lengths`, heights `counts`."""
    counts, edges = np.histogram(rows.lengths, bins=min(MAX_BINS, max(1, len(np.unique(rows.lengths)))))
    return {
        "source": rows.source,
        "fingerprint": rows.fingerprint,
        "rows": len(rows.lengths),
        "tokens": int(rows.lengths.sum()),
        "supervised_tokens": supervised_tokens,
        "truncated": rows.truncated,
        "skipped": len(rows.skipped),
        "lengths": [round(float(edge), 1) for edge in edges],
        "counts": counts.tolist(),
    }


class RowsOfSets(Protocol):
    """Rows that know which of several sets each is from: their names (empty where there is one), and each row's."""

    @property
    def sources(self) -> Collection[str]: ...
    @property
    def source_N(self) -> Indices: ...


class ScoredRows(RowsOfSets, Protocol):
    """Rows of sets, some of which may be copies of training rows."""

    def __len__(self) -> int: ...
    @property
    def copies(self) -> Sequence[NumberedRow] | None: ...


class NumberedRow(Protocol):
    """One of some rows, by its number."""

    @property
    def row(self) -> int: ...


def rows_by_set(rows: RowsOfSets) -> dict[str, Indices]:
    """Numbers of the rows of each set that has any; empty where there is one set."""
    if not rows.sources:
        return {}
    set_indices = {name: np.flatnonzero(rows.source_N == number) for number, name in enumerate(rows.sources)}
    return {name: own for name, own in set_indices.items() if len(own)}


def sizes(rows: RowsOfSets) -> dict[str, int]:
    """Number of rows of each set; empty where there is one."""
    counts = np.bincount(rows.source_N, minlength=len(rows.sources)).tolist() if rows.sources else []
    return dict(zip(rows.sources, counts, strict=True))


def scored(rows: RowsOfSets, scores: Callable[[Indices], Mapping[str, float]]) -> dict[str, float]:
    """The scores of each set by their names in scores.json, such as `accuracy[SET]`; none where there is one set.
    `scores`: those of the rows of some numbers."""
    return {
        titled(score, name): value for name, own in rows_by_set(rows).items() for score, value in scores(own).items()
    }


def scored_apart(rows: ScoredRows, scores: Callable[[Indices], Mapping[str, float]]) -> dict[str, float]:
    """`scored`, and the scores of the rows that are no copies of training rows, where some are."""
    own: Indices = np.setdiff1d(np.arange(len(rows) * bool(rows.copies)), [copy.row for copy in rows.copies or ()])
    without = {titled(score, WITHOUT): value for score, value in scores(own).items()} if len(own) else {}
    return scored(rows, scores) | without


def titled(score: str, name: str) -> str:
    """The score of a named set; of all rows where the set has no name."""
    return f"{score}[{name}]" if name else score


def prefixes(paths: Mapping[str, str]) -> dict[str, str]:
    """The beginning of the place of each row of some sets: the set's name where files of two have one name, else empty.
    `paths`: the file, folder or hub data set of each."""
    if len(paths) < 2:
        return dict.fromkeys(paths, "")
    files: list[str] = []
    for path in paths.values():
        at = Path(starter.resolve(path)).expanduser()
        files += {each.name for each in at.iterdir()} if os.path.isdir(at) else {at.name}  # also of a name that is none
    return {name: f"{name}: " if len(set(files)) < len(files) else "" for name in paths}


@contextmanager
def naming(prefix: str) -> Iterator[None]:
    """Let what is wrong with a set's rows begin as their places do; see `prefixes`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{prefix}{error}") from None


def held_out_losses(scores: Mapping[str, float]) -> dict[str, float]:
    """The loss of each set by its name in metrics.jsonl, from scores by name."""
    return {f"held_out_{name}": value for name, value in scores.items() if name.startswith("loss[")}
