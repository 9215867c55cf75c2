"""Rows that rules flag.

Legend: N rows.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from workbench.config.sections.clean_rules import DUPLICATE_RULES
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.folds.similarity import normalised
from workbench.data.text.quality import languages
from workbench.data.text.quality.row_texts import RowText
from workbench.data.text.quality.rules import RULES

NEAR = 0.8
"""Jaccard similarity of near-duplicates, by sequences of four characters."""

Near = Callable[[Sequence[str]], DuplicateClusters]


class Flag(NamedTuple):
    """A row that a rule flags."""

    row: int
    """Its number, from 0."""
    place: str
    rule: str
    value: float
    """The measured value; 1 where a rule only says yes."""
    note: str = ""
    """Details, such as the row that this one repeats."""


def near_duplicates(texts: Sequence[str]) -> DuplicateClusters:
    """Clusters of texts that are similar to NEAR.

    Raises:
        DataError: Thousands of different texts are similar, as if from one template.
    """
    return duplicates.find(texts, threshold=NEAR)


def by_rows(rows: Iterable[RowText], names: Sequence[str]) -> list[Flag]:
    """Flags by the rules among `names` that judge a row by itself, in one pass over the rows."""
    rules = [RULES[name] for name in names if name in RULES]
    return [
        Flag(number, row.place, rule.name, value)
        for number, row in enumerate(rows)
        for rule in rules
        if (value := rule.value(row)) is not None
    ]


def by_comparison(
    rows: Sequence[RowText], names: Sequence[str], near: Near = near_duplicates, titles: Sequence[str] = ()
) -> list[Flag]:
    """Flags by the rules among `names` that compare a row with the others.

    Args:
        titles: See `repeats`.

    Raises:
        DataError: As `near_duplicates`, where they are looked for.
    """
    flags = _other_languages(rows) if "other_language" in names else []
    if not set(DUPLICATE_RULES) & set(names):
        return flags
    keys = [normalised(row.text) for row in rows]
    return flags + by_keys(rows, names, keys, lambda: near_keys(rows, near([row.text for row in rows])), titles)


def by_keys(
    rows: Sequence[RowText],
    names: Sequence[str],
    exact: Sequence[object],
    near: Callable[[], Sequence[object]],
    titles: Sequence[str] = (),
) -> list[Flag]:
    """Flags on duplicates by the rules among `names`, a near-duplicate where it is no exact one.

    Args:
        exact: Equal for rows that are the same.
        near: Gives what is equal for rows that are alike.
        titles: See `repeats`.
    """
    same = repeats("exact_duplicate", rows, exact, titles)
    flags = same if "exact_duplicate" in names else []
    if "near_duplicate" in names:
        known = {flag.row for flag in same}
        flags = flags + [flag for flag in repeats("near_duplicate", rows, near(), titles) if flag.row not in known]
    return flags


def apart(flags: Iterable[Flag], sizes: Sequence[int]) -> list[list[Flag]]:
    """The flags of each of several sets of rows, which stand one after another and have these sizes."""
    ends = list(itertools.accumulate(sizes))
    flags_by_set: list[list[Flag]] = [[] for _ in sizes]
    for flag in flags:
        number = bisect.bisect_right(ends, flag.row)
        flags_by_set[number].append(flag._replace(row=flag.row - ends[number] + sizes[number]))
    return flags_by_set


def near_keys(rows: Sequence[RowText], clusters: DuplicateClusters) -> list[tuple[int, int]]:
    """Equal for rows that are in one cluster by their texts, and by what is asked and answered in them."""
    asked = [row.asked_and_answered for row in rows]
    same = asked == [row.text for row in rows]
    asked_N = clusters.cluster_N if same else near_duplicates(asked).cluster_N
    return list(zip(clusters.cluster_N.tolist(), asked_N.tolist(), strict=True))


def common_language(rows: Iterable[RowText]) -> str:
    """The language of most rows that are long enough to tell; empty where none are."""
    return next(iter(dict(Counter(row.language for row in rows if row.language).most_common(1))), "")


def _other_languages(rows: Sequence[RowText]) -> list[Flag]:
    common = common_language(rows)
    return [
        Flag(number, row.place, "other_language", 1.0, f"{row.language}, not {common}")
        for number, row in enumerate(rows)
        if row.language not in ("", common, languages.NO_LANGUAGE)
    ]


def repeats(rule: str, rows: Sequence[RowText], keys: Sequence[object], titles: Sequence[str] = ()) -> list[Flag]:
    """Flags on all rows but the first of each key.

    Args:
        titles: The set that each row is of, which a note names where the first row is of another one.
    """
    first: dict[object, int] = {}
    return [
        Flag(number, row.place, rule, 1.0, _elsewhere(number, first[key], rows, titles))
        for number, (row, key) in enumerate(zip(rows, keys, strict=True))
        if first.setdefault(key, number) != number
    ]


def _elsewhere(row: int, first: int, rows: Sequence[RowText], titles: Sequence[str]) -> str:
    """Place of a row's first occurrence."""
    place = rows[first].place
    return f"{place} ({titles[first]})" if titles and titles[first] != titles[row] else place
