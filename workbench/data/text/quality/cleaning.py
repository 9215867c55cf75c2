"""Rows that the quality rules flag, and training without them (`data.clean`).

Legend: N rows.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.cleaning_config import ANSWER_RULES, DUPLICATE_RULES
from workbench.data import starter
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters, normalised
from workbench.data.text import formats
from workbench.data.text.formats import Conversion
from workbench.data.text.quality.rules import NO_LANGUAGE, RULES, SET_RULES, RowText, row_text_of_example
from workbench.errors import DataError

NEAR = 0.8  # Jaccard similarity of near-duplicates, by sequences of four characters

OUTLOOK, MANY = 1000, 0.05  # rows that `check` judges, and the share of flagged rows from which it says so
LISTED = 20  # flags that the manifest lists

Near = Callable[[Sequence[str]], DuplicateClusters]


class Flag(NamedTuple):
    """A row that a rule flags."""

    row: int  # its number, from 0
    place: str
    rule: str
    value: float  # the measured value; 1 where a rule only says yes
    note: str = ""  # details, such as the row that this one repeats


def near_duplicates(texts: Sequence[str]) -> DuplicateClusters:
    """Clusters of texts that are similar to NEAR. Raises DataError: thousands of different texts are similar, as if
    from one template."""
    return duplicates.find(texts, threshold=NEAR)


def flags_by_row(rows: Iterable[RowText], names: Sequence[str]) -> list[Flag]:
    """Flags by the rules among `names` that judge a row by itself, in one pass over the rows."""
    rules = [RULES[name] for name in names if name in RULES]
    return [
        Flag(number, row.place, rule.name, value)
        for number, row in enumerate(rows)
        for rule in rules
        if (value := rule.value(row)) is not None
    ]


def flags_by_comparison(
    rows: Sequence[RowText], names: Sequence[str], near: Near = near_duplicates, titles: Sequence[str] = ()
) -> list[Flag]:
    """Flags by the rules among `names` that compare a row with the others. Raises DataError: as `near_duplicates`,
    where they are looked for. `titles`: see `repeat_flags`."""
    flags: list[Flag] = []
    if "other_language" in names:
        long_enough = Counter(row.language for row in rows if row.language)
        common = max(long_enough, key=lambda language: long_enough[language], default="")
        flags = [
            Flag(number, row.place, "other_language", 1.0, f"{row.language}, not {common}")
            for number, row in enumerate(rows)
            if row.language not in ("", common, NO_LANGUAGE)
        ]
    if not set(DUPLICATE_RULES) & set(names):
        return flags
    keys = [(normalised(row.text), row.shown) for row in rows]
    return flags + duplicate_flags(rows, names, keys, lambda: near_keys(rows, near([row.text for row in rows])), titles)


def duplicate_flags(
    rows: Sequence[RowText],
    names: Sequence[str],
    exact: Sequence[object],
    near: Callable[[], Sequence[object]],
    titles: Sequence[str] = (),
) -> list[Flag]:
    """Flags by the rules on duplicates among `names`; an exact duplicate is not flagged as a near-duplicate too.

    Args:
        exact: A key for each row, equal for rows that are the same.
        near: Computes such a key for each row, equal for rows that are alike.
        titles: See `repeat_flags`.
    """
    same = repeat_flags("exact_duplicate", rows, exact, titles)
    flags = same if "exact_duplicate" in names else []
    if "near_duplicate" in names:
        known = {flag.row for flag in same}
        flags = flags + [flag for flag in repeat_flags("near_duplicate", rows, near(), titles) if flag.row not in known]
    return flags


def flags_by_set(flags: Iterable[Flag], sizes: Sequence[int]) -> list[list[Flag]]:
    """Split flags on several sets of rows, one set after another, by set; `sizes` are the rows of each set."""
    ends = list(itertools.accumulate(sizes))
    split: list[list[Flag]] = [[] for _ in sizes]
    for flag in flags:
        number = bisect.bisect_right(ends, flag.row)
        split[number].append(flag._replace(row=flag.row - ends[number] + sizes[number]))
    return split


def near_keys(rows: Sequence[RowText], clusters: DuplicateClusters) -> list[tuple[int, int, str]]:
    """Keys that are equal for rows with the same pictures in one cluster, both by their texts and by what is asked and
    answered in them."""
    asked = [row.asked_and_answered for row in rows]
    asked_N = clusters.cluster_N if asked == [row.text for row in rows] else near_duplicates(asked).cluster_N
    return list(zip(clusters.cluster_N.tolist(), asked_N.tolist(), (row.shown for row in rows), strict=True))


def repeat_flags(rule: str, rows: Sequence[RowText], keys: Sequence[object], titles: Sequence[str] = ()) -> list[Flag]:
    """Flags on all rows but the first of each key. `titles`: the set that each row is of, which a note names where the
    first row is of another one."""
    first: dict[object, int] = {}

    def earlier(number: int, key: object) -> str:
        place, at = rows[first[key]].place, first[key]
        return f"{place} ({titles[at]})" if titles and titles[at] != titles[number] else place

    return [
        Flag(number, row.place, rule, 1.0, earlier(number, key))
        for number, (row, key) in enumerate(zip(rows, keys, strict=True))
        if first.setdefault(key, number) != number
    ]


@dataclass(frozen=True)
class Cleaning:
    """Rows that were left out of training, and by which rules."""

    rows: int  # training rows that were judged
    counts: dict[str, int]  # rows that each rule flags, in the order of `data.clean`; a row may be flagged by several
    flags: tuple[Flag, ...]

    @property
    def places(self) -> frozenset[str]:
        """File and row of each row that is left out."""
        return frozenset(flag.place for flag in self.flags)

    @property
    def sentence(self) -> str:
        """How many rows were left out, and how many by which rule."""
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in self.counts.items())
        return f"data.clean left {len(self.places):,} of {self.rows:,} training rows out: {by_rule}."

    def kept(self, places: Sequence[str]) -> npt.NDArray[np.bool_]:
        """True for each row, by its file and number, that stays in training."""
        out = self.places
        return np.asarray([place not in out for place in places], dtype=bool)

    def facts(self) -> dict[str, Any]:
        """For the manifest and the report."""
        listed = [{"row": flag.place, "rule": flag.rule, "value": flag.value} for flag in self.flags[:LISTED]]
        return {"rows": self.rows, "left_out": len(self.places), "rules": self.counts, "flags": listed}


def join_cleanings(parts: Sequence[Cleaning | None], prefixes: Iterable[str]) -> Cleaning | None:
    """Findings of the same rules in several sets of training rows. `prefixes`: the beginning of the places of each
    set's rows."""
    prefixed_reports = [(each, prefix) for each, prefix in zip(parts, prefixes, strict=True) if each is not None]
    reports = [each for each, _ in prefixed_reports]
    if not reports:
        return None
    counts = {rule: sum(each.counts[rule] for each in reports) for rule in reports[0].counts}
    flags = (flag._replace(place=prefix + flag.place) for each, prefix in prefixed_reports for flag in each.flags)
    return Cleaning(sum(each.rows for each in reports), counts, tuple(flags))


def row_texts_at(
    source: str,
    places: Iterable[str],
    config: DataConfig,
    *,
    limit: int | None = None,
    conversion: Conversion | None = None,
) -> Iterator[RowText]:
    """Read a file a second time and yield the texts of its rows at `places`. `conversion`: see `formats.read`."""
    wanted = set(places)
    for example in formats.read(starter.resolve(source), config, skipped=[], limit=limit, conversion=conversion):
        if example.place in wanted:
            yield row_text_of_example(example)
            wanted.remove(example.place)
            if not wanted:
                return


def outlook(rows: Iterable[RowText]) -> list[str]:
    """A sentence if rules that are not only for web documents flag many of the first rows; else none."""
    first = list(itertools.islice(rows, OUTLOOK))
    flags = flags_by_row(first, [name for name, rule in RULES.items() if rule.source == "workbench"])
    flags += flags_by_comparison(first, ["exact_duplicate"])
    share = len({flag.row for flag in flags}) / max(1, len(first))
    if share < MANY:
        return []
    most = ", ".join(f"{rule} {count:,}" for rule, count in Counter(flag.rule for flag in flags).most_common(3))
    return [
        f"Of the first {len(first):,} training rows {share:.0%} are flagged ({most}): `workbench data` shows them, and "
        "data.clean=[RULE] leaves them out of training."
    ]


def clean_sources(
    sources: Sequence[tuple[str, Iterable[RowText]]], rules: Sequence[str], *, repeats: Sequence[Flag] | None = None
) -> list[Cleaning]:
    """Judge the training rows of several files, each with its name; the first of duplicates across files stays.

    Otherwise as `clean`. `repeats`: flags of the rules on duplicates, over the rows of all files, one file after
    another; None: computed from the texts.
    """
    if repeats is None and (len(sources) == 1 or not set(DUPLICATE_RULES) & set(rules)):
        return [clean(name, rows, rules) for name, rows in sources]
    held = [list(rows) for _, rows in sources]
    if repeats is None:
        repeats = flags_by_comparison([row for rows in held for row in rows], list(set(DUPLICATE_RULES) & set(rules)))
    apart = flags_by_set(repeats, [len(rows) for rows in held])
    return [clean(name, rows, rules, repeats=own) for (name, _), rows, own in zip(sources, held, apart, strict=True)]


def clean(
    name: str, rows: Iterable[RowText], rules: Sequence[str], *, repeats: Sequence[Flag] | None = None
) -> Cleaning:
    """Judge training rows, read once in their order; only rules that compare rows hold them all in memory. Raises
    DataError: a rule asks about answers and no row has one, or no row would be left.

    Args:
        name: The training file, for messages.
        rules: Names of rules, as `data.clean` has them.
        repeats: Flags of the rules on duplicates; None: computed from these rows.
    """
    compared = [rule for rule in rules if rule in SET_RULES and (repeats is None or rule not in DUPLICATE_RULES)]
    counted, answered = 0, False

    def judged() -> Iterator[RowText]:
        nonlocal counted, answered
        for row in rows:
            counted += 1
            answered = answered or bool(row.exchanges)
            yield row

    if compared:
        held = list(judged())
        flags = flags_by_row(held, rules) + flags_by_comparison(held, compared)
    else:
        flags = flags_by_row(judged(), rules)
    flags += repeats or []
    asking = [rule for rule in rules if rule in ANSWER_RULES]
    if asking and not answered:
        raise DataError(
            f"{name}: data.clean names {', '.join(asking)}, which judge answers to prompts, and its rows are texts "
            f"without any. Leave {'it' if len(asking) == 1 else 'them'} out of data.clean."
        )
    rule_counts = Counter(flag.rule for flag in flags)
    cleaning = Cleaning(counted, {rule: rule_counts[rule] for rule in rules}, tuple(sorted(flags)))
    if len(cleaning.places) == counted:
        worst, most = max(cleaning.counts.items(), key=lambda item: item[1])
        rule = RULES.get(worst)
        meant = "" if rule is None or rule.source == "workbench" else ", made for web documents,"
        raise DataError(
            f"{name}: data.clean would leave none of its {counted:,} rows to train on; {worst}{meant} flags {most:,} "
            "of them. Leave it out of data.clean; `workbench data RECIPE` shows what each rule flags."
        )
    return cleaning
