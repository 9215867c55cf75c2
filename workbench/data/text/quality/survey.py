"""Findings on the rows of a recipe: lengths, languages, scripts, files, labels, duplicates, and what rules flag.

Legend: N rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Indices
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.folds.similarity import normalised
from workbench.data.text.quality import flagging
from workbench.data.text.quality.flagging import Flag
from workbench.data.text.quality.row_texts import RowText
from workbench.data.text.quality.rules import RULES, SET_RULES
from workbench.errors import DataError

REPORT_RULES: dict[str, str] = {
    "also_in_evaluation": "equals a held-out or test row, but for case, spaces and punctuation",
    "conflicting_label": "has another label than a duplicate",
    "perplexity": "perplexity by the backbone is far from that of most rows",
    "unreadable": "cannot be read, or learnt from",
}
"""Rules that only report: `data.clean` has none of them, as other settings answer what they find."""
ANSWER_REPEATS = 10
"""Mean rows of an answer above which answers are counted like classes."""
DEVIATIONS = 3.0
"""Robust standard deviations (of the median absolute deviation) of log-perplexity that are far."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source, as they were read."""

    title: str
    """Train, Held-out or Test."""
    source: str
    rows: Sequence[RowText]
    tokens_N: Indices | None
    """Tokens of each row before it is cut; None for pictures."""
    labels: Sequence[tuple[str, ...]] | None = None
    """Classes of each row; None where rows have none."""
    numbers: Sequence[float] | None = None
    """Labels that are numbers."""
    unreadable: tuple[str, ...] = ()
    """Place and reason of each row that is left out."""
    clusters: DuplicateClusters | None = None
    """Duplicates by the recipe's own measure; None where texts are compared to flagging.NEAR."""
    perplexities: Mapping[int, float] = field(default_factory=dict)
    """Perplexity of some rows, by their number, by the backbone."""
    notes: tuple[str, ...] = ()
    """Measures that could not be taken, and why."""


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
    """Judge the rows of all sources of a recipe, training rows first."""
    found = [_examined(each) for each in read]
    evaluation: dict[str, str] = {}
    for each in read[1:]:
        for row in each.rows:
            evaluation.setdefault(normalised(row.text), row.place)
    if read[0].tokens_N is None:
        found[0] = replace(found[0], flags=(*found[0].flags, *_in_evaluation(read)))
    elif evaluation:
        shared = [
            Flag(number, row.place, "also_in_evaluation", 1.0, evaluation[key])
            for number, row in enumerate(read[0].rows)
            if (key := normalised(row.text)) in evaluation
        ]
        found[0] = replace(found[0], flags=(*found[0].flags, *shared))
    return found


def _examined(read: SourceRows) -> Findings:
    flags, notes = [_unreadable(reason) for reason in read.unreadable], list(read.notes)
    rows = read.rows
    clusters = read.clusters
    files = Counter(row.place.rpartition(", row ")[0] or row.place for row in rows)
    if read.tokens_N is None:  # pictures have no words
        flags += _repeated(rows, clusters)
        return Findings(read, (*flags, *_conflicts(read, clusters)), {}, {}, _pooled(files), _classes(read))
    flags += flagging.by_rows(rows, list(RULES))
    flags += flagging.by_comparison(rows, ["other_language", "exact_duplicate"])
    try:
        clusters = flagging.near_duplicates([row.text for row in rows]) if clusters is None else clusters
        found = clusters
        flags += flagging.by_comparison(rows, ["near_duplicate"], near=lambda _: found)
    except DataError as error:
        notes.append(f"Near-duplicates of {read.source} were not counted: {error}")
    flags += _conflicts(read, clusters)
    flags += _unlikely(read)
    scripts: Counter[str] = Counter()
    for row in rows:
        scripts.update(row.scripts)
    languages = Counter(row.language for row in rows)
    return Findings(read, tuple(flags), languages, scripts, _pooled(files), _classes(read), tuple(notes))


def _unreadable(reason: str) -> Flag:
    place, _, why = reason.partition(": ")
    return Flag(-1, place, "unreadable", 1.0, why)


def _repeated(rows: Sequence[RowText], clusters: DuplicateClusters | None) -> list[Flag]:
    """Pictures of which all pixels are those of an earlier one, and those that are like an earlier one."""
    if clusters is None:
        return []
    equal = flagging.repeats("exact_duplicate", rows, clusters.distinct_N.tolist())
    known = {flag.row for flag in equal}
    near = flagging.repeats("near_duplicate", rows, clusters.cluster_N.tolist())
    return [*equal, *(flag for flag in near if flag.row not in known)]


def _in_evaluation(read: Sequence[SourceRows]) -> list[Flag]:
    """Training pictures that are like one to evaluate by; clusters of all sources are numbered together."""
    place_of: dict[int, str] = {}
    for each in read[1:]:
        if each.clusters is not None:
            for cluster, row in zip(each.clusters.cluster_N.tolist(), each.rows, strict=True):
                place_of.setdefault(cluster, row.place)
    train = read[0]
    clusters = [] if train.clusters is None else train.clusters.cluster_N.tolist()
    return [
        Flag(number, train.rows[number].place, "also_in_evaluation", 1.0, place_of[cluster])
        for number, cluster in enumerate(clusters)
        if cluster in place_of
    ]


def _conflicts(read: SourceRows, clusters: DuplicateClusters | None) -> list[Flag]:
    """Rows of clusters of duplicates that have different labels."""
    if read.labels is None or clusters is None:
        return []
    flags = []
    for numbers in duplicates.report(clusters, read.labels).conflicts:
        labels = [f"{', '.join(read.labels[number])} ({read.rows[number].place})" for number in numbers[:4]]
        flags += [
            Flag(number, read.rows[number].place, "conflicting_label", 1.0, "; ".join(labels)) for number in numbers
        ]
    return flags


def _unlikely(read: SourceRows) -> list[Flag]:
    """Rows of which the logarithm of the perplexity is DEVIATIONS from the median."""
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
