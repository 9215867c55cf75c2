"""Training rows that the rules of `data.clean` flag, which are left out of training."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.clean_rules import ANSWER_RULES, DUPLICATE_RULES
from workbench.data import starter
from workbench.data.text import formats
from workbench.data.text.formats import Conversion
from workbench.data.text.quality import flagging, row_texts
from workbench.data.text.quality.flagging import Flag
from workbench.data.text.quality.row_texts import RowText
from workbench.data.text.quality.rules import RULES, SET_RULES
from workbench.errors import DataError

OUTLOOK, MANY = 1000, 0.05
"""Rows that `check` judges, and the share of flagged ones that it tells of."""
LISTED = 20
"""Flags that the manifest lists."""


@dataclass(frozen=True)
class Cleaning:
    """Rows that were left out of training, and by which rules."""

    rows: int
    """Training rows that were judged."""
    counts: dict[str, int]
    """Rows that each rule flags, in the order of `data.clean`; a row may be flagged by several."""
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


def joined(parts: Sequence[Cleaning | None], prefixes: Iterable[str]) -> Cleaning | None:
    """Findings of the same rules in several sets of training rows.

    Args:
        prefixes: The beginning of the places of each set's rows.
    """
    prefixed_reports = [(each, prefix) for each, prefix in zip(parts, prefixes, strict=True) if each is not None]
    reports = [each for each, _ in prefixed_reports]
    if not reports:
        return None
    counts = {rule: sum(each.counts[rule] for each in reports) for rule in reports[0].counts}
    flags = (flag._replace(place=prefix + flag.place) for each, prefix in prefixed_reports for flag in each.flags)
    return Cleaning(sum(each.rows for each in reports), counts, tuple(flags))


def texts(
    source: str,
    places: Iterable[str],
    config: DataConfig,
    *,
    limit: int | None = None,
    conversion: Conversion | None = None,
) -> Iterator[RowText]:
    """The texts of the rows of a file that stand at `places`, read a second time, as far as they go.

    Args:
        conversion: See `formats.read`.
    """
    wanted = set(places)
    for example in formats.read(starter.resolve(source), config, skipped=[], limit=limit, conversion=conversion):
        if example.place in wanted:
            yield row_texts.of_example(example)
            wanted.remove(example.place)
            if not wanted:
                return


def outlook(rows: Iterable[RowText]) -> list[str]:
    """A sentence where rules that are not for web documents alone flag many of the first rows; none otherwise."""
    first = list(itertools.islice(rows, OUTLOOK))
    flags = flagging.by_rows(first, [name for name, rule in RULES.items() if rule.source == "workbench"])
    flags += flagging.by_comparison(first, ["exact_duplicate"])
    share = len({flag.row for flag in flags}) / max(1, len(first))
    if share < MANY:
        return []
    most = ", ".join(f"{rule} {count:,}" for rule, count in Counter(flag.rule for flag in flags).most_common(3))
    return [
        f"Of the first {len(first):,} training rows {share:.0%} are flagged ({most}): `workbench data` shows them, and "
        "data.clean=[RULE] leaves them out of training."
    ]


def find_in_sources(
    sources: Sequence[tuple[str, Iterable[RowText]]], rules: Sequence[str], *, repeats: Sequence[Flag] | None = None
) -> list[Cleaning]:
    """Judge the training rows of several files, each with its name: of duplicates in any of them the first stays.

    Otherwise as `find`.

    Args:
        repeats: Flags of its rules on duplicates, in the rows of all files one after another; None: they are looked
            for among the texts.
    """
    if repeats is None and (len(sources) == 1 or not set(DUPLICATE_RULES) & set(rules)):
        return [find(name, rows, rules) for name, rows in sources]
    held = [list(rows) for _, rows in sources]
    if repeats is None:
        wanted = list(set(DUPLICATE_RULES) & set(rules))
        repeats = flagging.by_comparison([row for rows in held for row in rows], wanted)
    apart = flagging.apart(repeats, [len(rows) for rows in held])
    return [find(name, rows, rules, repeats=own) for (name, _), rows, own in zip(sources, held, apart, strict=True)]


def find(
    name: str, rows: Iterable[RowText], rules: Sequence[str], *, repeats: Sequence[Flag] | None = None
) -> Cleaning:
    """Judge training rows, read once in their order; only rules that compare rows hold them all in memory.

    Args:
        name: The training file, for messages.
        rules: Names of rules, as `data.clean` has them.
        repeats: Flags of its rules on duplicates; None: they are looked for among these rows.

    Raises:
        DataError: A rule asks about answers and no row has one, or no row would be left.
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
        flags = flagging.by_rows(held, rules) + flagging.by_comparison(held, compared)
    else:
        flags = flagging.by_rows(judged(), rules)
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
