"""Copies of training rows among the rows that a run is scored by: found by one measure, then refused, dropped or told.

Legend: N rows of all splits, U distinct contents, P pairs of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from workbench.config.sections.basic_sections import Overlap
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import NEAR, DuplicateClusters, Ints, Mask, TooManyPairs
from workbench.data.held_out_split import KeyedSource, SourceT, without_overlap
from workbench.data.named_sets import WITHOUT
from workbench.errors import DataError
from workbench.runs import files
from workbench.runs.run_directory import Run

SHOWN = 5  # copies whose rows are named in the manifest
FILE = "copies.json"
MAX_CHARACTERS = 2**24
"""Characters of all texts up to which `data.overlap=auto` looks for near-duplicates: 12 s of one processor."""
MAX_PICTURES = 25_000
"""Pictures up to which it does: 26 s of one processor."""
TEMPLATE = (
    "Are they short rows of one template? Write data.overlap=tell to keep them and score with and without copies, or "
    "name other data as data.train."
)


class Copy(NamedTuple):
    """A row to score by that is a copy of a training row."""

    row: int  # its number in its set
    place: str
    of: str  # place of the training row
    kind: str  # what was done to it, in words


Copies: TypeAlias = tuple[Copy, ...] | None
"""None: near-duplicates were not looked for, as rows are too many or of one template."""
Find: TypeAlias = Callable[[Sequence[Any], Ints], DuplicateClusters]
"""From sources, and the part of the split that each row is in (0: training), to what is alike in different parts."""


def separate(
    trains: Mapping[str, SourceT], sets: Mapping[str, KeyedSource], find: Find, *, action: Overlap, but: str
) -> tuple[dict[str, SourceT], dict[str, Copies]]:
    """Training rows of each source as `data.overlap` leaves them, and the copies of them that stay in each set.

    Args:
        trains: Training rows by source.
        sets: Rows to score by.
        find: Finds near-duplicates.
        but: In what equal rows may differ; see `without_overlap`.

    Raises:
        DataError: There are copies that `action` refuses, or nothing would be left to train on.
    """
    kept = dict(trains)
    if action != "tell":
        for name in kept:
            for other in sets.values():
                kept[name] = without_overlap(kept[name], other, drop=action == "drop", but=but)
    if action == "exact":
        return kept, {}
    found, leaking_N = find_copies(kept, sets, find, action=action)
    if action in ("auto", "tell") or not any(found.values()):
        return kept, found
    named = " + ".join(other.name for other in sets.values())
    count = int(leaking_N.sum())
    if action == "refuse":
        every = [copy for copies in found.values() for copy in copies or ()]
        raise DataError(
            f"{count} training rows have near-duplicates in {named}, so that scores would be too good: "
            f"{in_words(every)}, such as {every[0].place} of {every[0].of}.\n"
            "  Write data.overlap=drop to leave them out of training, or data.overlap=tell to score with and without."
        )
    if leaking_N.all():
        raise DataError(f"every training row has a near-duplicate in {named}. {TEMPLATE}")
    start = 0
    for name, train in kept.items():
        own_N = leaking_N[start : start + len(train.records)]
        start += len(own_N)
        if own_N.all():
            raise DataError(f"{train.name}: every row has a near-duplicate in {named}. {TEMPLATE}")
        if own_N.any():
            kept[name] = train.subset(~own_N, f"{int(own_N.sum())} rows that are near-duplicates of rows in {named}")
    return kept, {}


def find_copies(
    trains: Mapping[str, KeyedSource], sets: Mapping[str, KeyedSource], find: Find, *, action: Overlap
) -> tuple[dict[str, Copies], Mask]:
    """The copies of training rows in each set, and which training rows have one, those of all sources in turn.

    Where `action` is `auto`, a search that would take long, or finds most rows alike, is left out.
    """
    every = [*trains.values(), *sets.values()]
    sizes = [len(each.records) for each in every]
    part_N = np.repeat([0] * len(trains) + [*range(1, len(sets) + 1)], sizes)
    if not sets or not trains:
        return {}, np.zeros(len(part_N), dtype=bool)
    auto, none_N = action == "auto", np.zeros(int((part_N == 0).sum()), dtype=bool)
    # The key of a picture, a digest of its pixels, is all of its content.
    pictured = [bool(each.records) and each.records[0].content == each.records[0].key for each in every]
    characters = (len(record.key) for each in every for record in each.records)
    if auto and (np.dot(sizes, pictured) > MAX_PICTURES or sum(characters) > MAX_CHARACTERS):
        return dict.fromkeys(sets), none_N
    try:
        clusters = find(every, part_N)
    except TooManyPairs:
        if auto:
            return dict.fromkeys(sets), none_N
        raise
    distinct_N, pairs_P2 = clusters.distinct_N, clusters.pairs_P2.reshape(-1, 2)
    train = np.flatnonzero(part_N == 0)
    scored_U = np.zeros(len(clusters.cluster_U), dtype=bool)
    scored_U[distinct_N[part_N > 0]] = True
    # The training row that each content is equal to, or like, and the pair that says so.
    equal_U = np.full(len(scored_U), -1)
    equal_U[distinct_N[train[::-1]]] = train[::-1]
    like_U, pair_U, leaking_U = equal_U.copy(), np.full(len(scored_U), -1), scored_U.copy()
    for first_P, second_P in (pairs_P2.T, pairs_P2.T[::-1]):
        leaking_U[first_P[scored_U[second_P]]] = True
        new = np.flatnonzero((equal_U[first_P] < 0) & (equal_U[second_P] >= 0))
        like_U[first_P[new]], pair_U[first_P[new]] = equal_U[second_P[new]], new
    records = [(source, row) for source, size in zip(every, sizes, strict=True) for row in range(size)]

    def copies(part: int) -> Iterator[Copy]:
        for number, at in enumerate(np.flatnonzero(part_N == part).tolist()):
            content = distinct_N[at]
            if like_U[content] >= 0:
                own, other = (source.records[row] for source, row in (records[at], records[like_U[content]]))
                near = clusters.kind_P[pair_U[content]] if clusters.kind_P else NEAR
                equal = "exact" if own.content == other.content else "other case or punctuation"
                yield Copy(number, own.place, other.place, equal if pair_U[content] < 0 else near)

    found: dict[str, Copies] = {name: tuple(copies(part)) for part, name in enumerate(sets, start=1)}
    return found, leaking_U[distinct_N[train]]


def of_texts(sources: Sequence[KeyedSource], part_N: Ints) -> DuplicateClusters:
    """Near-duplicates of texts by their keys."""
    return duplicates.find([record.key for each in sources for record in each.records], part_N=part_N)


def taken(copies: Copies, numbers: Ints) -> Copies:
    """The copies among some rows of a set, under their numbers there."""
    if not copies:
        return copies
    by_row = {copy.row: copy for copy in copies}
    return tuple(by_row[row]._replace(row=at) for at, row in enumerate(numbers.tolist()) if row in by_row)


def joined(sets: Mapping[str, KeyedSource], copies: Mapping[str, Copies], key: str) -> Copies:
    """The copies of several sets whose rows stand one after another; None where one of them is.

    Args:
        copies: Those in each set, by its setting.
        key: Setting that names these sets, such as `data.test`.
    """
    own = [copies.get(f"{key}.{name}" if name else key, ()) for name in sets]
    starts = np.cumsum([0, *(len(each.records) for each in sets.values())]).tolist()
    if None in own:
        return None
    return tuple(
        copy._replace(row=start + copy.row) for start, each in zip(starts, own, strict=False) for copy in each or ()
    )


def in_words(copies: Sequence[Copy]) -> str:
    """How many copies there are of each kind, such as `3 flipped, 1 cropped`."""
    return ", ".join(f"{count:,} {kind}" for kind, count in Counter(copy.kind for copy in copies).most_common())


class MayHaveCopies(Protocol):
    """Rows of a split, some of which may be copies of training rows."""

    def __len__(self) -> int: ...
    @property
    def copies(self) -> Copies: ...


def told(splits: Mapping[str, MayHaveCopies]) -> list[str]:
    """A sentence on each split that has copies, and one where near-duplicates were not looked for."""
    unsearched = [name.replace("_", "-") for name, rows in splits.items() if rows.copies is None]
    return [
        f"Rows of {' and '.join(unsearched)} were compared with training rows for equal ones alone: they are too many, "
        "or of one template. Write data.overlap=tell to look for near-duplicates as well, or data.overlap=exact to "
        "leave it at that."
        for _ in unsearched[:1]
    ] + [
        f"{len(rows.copies):,} of {len(rows):,} {name.replace('_', '-')} rows are copies of training rows "
        f"({in_words(rows.copies)}), such as {rows.copies[0].place} of {rows.copies[0].of}: their scores are too good. "
        f"Scores of the other rows stand beside those of all, as loss[{WITHOUT}]. data.overlap=drop leaves the "
        "originals out of training."
        for name, rows in splits.items()
        if rows.copies
    ]


def facts(copies: Copies) -> dict[str, Any]:
    """What the manifest says of the copies in a set; nothing where there are none."""
    if not copies:
        return {}
    kinds = dict(Counter(copy.kind for copy in copies).most_common())
    return {"copies": {"rows": len(copies), "kinds": kinds, "first": [copy._asdict() for copy in copies[:SHOWN]]}}


def write(run: Run, splits: Mapping[str, MayHaveCopies]) -> None:
    """Write all copies in each split into copies.json of a run; nothing where there are none."""
    found = {name: [copy._asdict() for copy in rows.copies] for name, rows in splits.items() if rows.copies}
    if found and run.ranks.first:
        files.write_json(run.path / FILE, found)
