"""Findings on the rows of a recipe: lengths, languages, scripts, files, labels, duplicates, and what rules flag.

Legend: N rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from workbench.config.sections.cleaning_config import DUPLICATE_RULES
from workbench.data.batching import Indices
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters, normalised
from workbench.data.leaks import Copies
from workbench.data.text.quality import cleaning
from workbench.data.text.quality.cleaning import Flag
from workbench.data.text.quality.rules import RULES, SET_RULES, RowText
from workbench.errors import DataError

REPORT_RULES: dict[str, str] = {
    "also_in_evaluation": "equals a held-out or test row, but for case, spaces and punctuation",
    "copy_of_training": "is a copy of a training row",
    "conflicting_label": "has another label than a duplicate",
    "perplexity": "perplexity by the backbone is far from that of most rows",
    "unreadable": "cannot be read, or learnt from",
}  # rules that only report: `data.clean` has none of them, as other settings answer what they find
ANSWER_REPEATS = 10  # mean rows of an answer above which answers are counted like classes
DEVIATIONS = 3.0  # robust standard deviations (of the median absolute deviation) of log-perplexity that are far


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source, as they were read."""

    title: str
    """Train, Held-out or Test, with its name where there are several, such as `Train: stories`."""
    source: str
    rows: Sequence[RowText]
    tokens_N: Indices | None
    """Tokens of each row before it is cut; None for pictures."""
    trains: bool
    """Whether they are learnt, or evaluated by."""
    labels: Sequence[tuple[str, ...]] | None = None
    """Classes of each row; None where rows have none."""
    numbers: Sequence[float] | None = None
    """Labels that are numbers."""
    unreadable: tuple[str, ...] = ()
    """Place and reason of each row that is left out."""
    clusters: DuplicateClusters | None = None
    """Duplicates by the recipe's own measure, numbered together for all training sources, for pictures for all sources;
    None where texts are compared to flagging.NEAR."""
    perplexities: Mapping[int, float] = field(default_factory=dict)
    """Perplexity of some rows, by their number, by the backbone."""
    notes: tuple[str, ...] = ()
    """Measures that could not be taken, and why."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of each picture as it comes."""
    jpeg: Callable[[int], bytes] | None = None
    """A small JPEG of the picture of a row, by its number; None where rows are texts."""
    copies: Copies = ()
    """Rows that are copies of training rows."""


@dataclass(frozen=True)
class Findings:
    """The rows of one source, and what is wrong with them."""

    read: SourceRows
    flags: tuple[Flag, ...]
    languages: Mapping[str, int]
    """Rows of each language; the empty name stands for too short to tell."""
    scripts: Mapping[str, int]
    """Letters of each script."""
    files: Mapping[str, int]
    """Rows of each file."""
    classes: Mapping[str, int] = field(default_factory=dict)
    """Rows of each label, the most frequent first; or of each answer, where few answers come again and again."""
    notes: tuple[str, ...] = ()
    """Measures that could not be taken, and why."""

    @property
    def counts(self) -> Counter[str]:
        """Rows that each rule flags."""
        return Counter(flag.rule for flag in self.flags)

    def text(self, flag: Flag) -> str:
        """The text of a flagged row; empty where it cannot be read, or is a picture."""
        return self.read.rows[flag.row].text if flag.row >= 0 else ""

    def cut(self, most: int) -> int:
        """Rows of more than `most` tokens."""
        return 0 if self.read.tokens_N is None else int((self.read.tokens_N > most).sum())


def describe(rule: str) -> str:
    """A row that a rule flags, in words."""
    return RULES[rule].says if rule in RULES else {**SET_RULES, **REPORT_RULES}[rule]


def origin(rule: str) -> str:
    """Where a rule comes from."""
    return RULES[rule].source if rule in RULES else "workbench"


def examine(read: Sequence[SourceRows]) -> list[Findings]:
    """Judge the rows of all sources of a recipe; duplicates are looked for among all that train."""
    train, others = [each for each in read if each.trains], [each for each in read if not each.trains]
    flags, notes = _in_evaluation(train, others), {}
    for group in [train, *([each] for each in others)]:
        group_flags, notes[group[0].title] = _compared(group)
        for each, own in zip(
            group, cleaning.flags_by_set(group_flags, [len(each.rows) for each in group]), strict=True
        ):
            flags[each.title] = [*own, *flags.get(each.title, [])]
    for each in others:
        flags[each.title] += [
            Flag(copy.row, copy.place, "copy_of_training", 1.0, f"{copy.kind} ({copy.of})")
            for copy in each.copies or ()
        ]
    return [_examined(each, flags[each.title], notes.get(each.title, ())) for each in read]


def training(findings: Sequence[Findings]) -> Findings:
    """Findings on all training rows as those of one source."""
    parts = [each for each in findings if each.read.trains]
    if len(parts) == 1:
        return parts[0]
    read = [each.read for each in parts]
    tokens = [each.tokens_N for each in read if each.tokens_N is not None]
    starts = itertools.accumulate((len(each.rows) for each in read), initial=0)
    return Findings(
        SourceRows(
            "Train",
            " + ".join(each.source for each in read),
            [row for each in read for row in each.rows],
            np.concatenate(tokens) if len(tokens) == len(read) else None,
            trains=True,
        ),
        tuple(
            flag if flag.row < 0 else flag._replace(row=start + flag.row)
            for start, each in zip(starts, parts, strict=False)
            for flag in each.flags
        ),
        _added([each.languages for each in parts]),
        _added([each.scripts for each in parts]),
        _added([each.files for each in parts]),
        _added([each.classes for each in parts]),
    )


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()).most_common())


def _examined(read: SourceRows, compared: Sequence[Flag], notes: tuple[str, ...]) -> Findings:
    """Findings in a source by itself, and those `compared` with others."""
    rows, notes = read.rows, (*read.notes, *notes)
    reasons = [reason.partition(": ") for reason in read.unreadable]
    flags = [Flag(-1, place, "unreadable", 1.0, why) for place, _, why in reasons]
    files = _pooled(Counter(row.place.rpartition(", row ")[0] or row.place for row in rows))
    if read.tokens_N is None:  # pictures have no words
        return Findings(read, (*flags, *compared), {}, {}, files, _classes(read), notes)
    flags += cleaning.flags_by_row(rows, list(RULES))
    flags += cleaning.flags_by_comparison(rows, ["other_language"])
    flags += [*compared, *_unlikely(read)]
    scripts: Counter[str] = Counter()
    for row in rows:
        scripts.update(row.scripts)
    return Findings(read, tuple(flags), Counter(row.language for row in rows), scripts, files, _classes(read), notes)


def _compared(group: Sequence[SourceRows]) -> tuple[list[Flag], tuple[str, ...]]:
    """Flags on duplicates among the rows of all sources of a group, one after another, and why there may be none."""
    rows = [row for each in group for row in each.rows]
    titles = [each.title for each in group for _ in each.rows]
    parts = [each.clusters for each in group]
    known = [each for each in parts if each is not None]
    clusters = replace(known[0], distinct_N=np.concatenate([each.distinct_N for each in known])) if known else None
    if group[0].tokens_N is None:
        if clusters is None:
            return [], ()
        # Equal pixels, and pictures that are alike.
        keys, near_keys = clusters.distinct_N.tolist(), clusters.cluster_N.tolist()
        repeated = cleaning.duplicate_flags(rows, DUPLICATE_RULES, keys, lambda: near_keys, titles)
        return [*repeated, *_conflicts(group, rows, clusters)], ()
    flags = cleaning.flags_by_comparison(rows, ["exact_duplicate"], titles=titles)
    try:
        near = cleaning.near_duplicates([row.text for row in rows]) if clusters is None else clusters
    except DataError as error:
        return flags, (f"Near-duplicates of {' + '.join(each.source for each in group)} were not counted: {error}",)
    flags += cleaning.flags_by_comparison(rows, ["near_duplicate"], near=lambda _: near, titles=titles)
    return [*flags, *_conflicts(group, rows, near)], ()


def _in_evaluation(train: Sequence[SourceRows], others: Sequence[SourceRows]) -> dict[str, list[Flag]]:
    """Flags on the rows of each training source that equal, or as pictures are like, one to evaluate by."""
    place_of: dict[object, str] = {}
    for each in others:
        for key, row in zip(_keys(each), each.rows, strict=False):
            place_of.setdefault(key, f"{row.place} ({each.title})")
    return {
        each.title: [
            Flag(number, row.place, "also_in_evaluation", 1.0, place_of[key])
            for number, (key, row) in enumerate(zip(_keys(each), each.rows, strict=False))
            if key in place_of
        ]
        for each in train
    }


def _keys(read: SourceRows) -> Sequence[object]:
    """Equal for texts that are equal but for case and punctuation, and for pictures that are alike; none if unknown."""
    if read.tokens_N is not None:
        return [(normalised(row.text), row.shown) for row in read.rows]
    return [] if read.clusters is None else read.clusters.cluster_N.tolist()


def _conflicts(group: Sequence[SourceRows], rows: Sequence[RowText], clusters: DuplicateClusters) -> list[Flag]:
    """Rows of clusters of duplicates that have different labels."""
    labels = [label for each in group for label in each.labels or ()]
    if len(labels) < len(rows):
        return []
    flags = []
    for numbers in duplicates.report(clusters, labels).conflicts:
        listing = "; ".join(f"{', '.join(labels[number])} ({rows[number].place})" for number in numbers[:4])
        flags += [Flag(number, rows[number].place, "conflicting_label", 1.0, listing) for number in numbers]
    return flags


def _unlikely(read: SourceRows) -> list[Flag]:
    """Flags on rows whose log-perplexity is more than DEVIATIONS from the median."""
    if not read.perplexities:
        return []
    numbers = list(read.perplexities)
    logs_N: npt.NDArray[np.float64] = np.log([read.perplexities[number] for number in numbers])
    middle = float(np.median(logs_N))
    spread = 1.4826 * float(np.median(np.abs(logs_N - middle)))
    return [
        Flag(
            number, read.rows[number].place, "perplexity", read.perplexities[number], "high" if log > middle else "low"
        )
        for number, log in zip(numbers, logs_N.tolist(), strict=True)
        if abs(log - middle) > DEVIATIONS * spread > 0
    ]


def _classes(read: SourceRows) -> dict[str, int]:
    if read.labels is not None:
        return dict(Counter(name for row in read.labels for name in row).most_common())
    answers = Counter(row.exchanges[-1].answer.strip() for row in read.rows if row.exchanges)
    return dict(answers.most_common()) if ANSWER_REPEATS * len(answers) <= answers.total() else {}


def _pooled(files: Counter[str]) -> dict[str, int]:
    """Files with their rows, the largest first; all but 20 together, as pictures are files of their own."""
    most = dict(files.most_common(20))
    rest = files.total() - sum(most.values())
    return most | ({f"{len(files) - len(most):,} more files": rest} if rest else {})
