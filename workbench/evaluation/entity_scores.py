"""Scores of predicted tags: of entities, equal to seqeval's, and of words; which entities are wrong, and how.

An entity is right where both its edges and its type are (Tjong Kim Sang and De Meulder 2003).

Legend: N rows, E types of entities, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from workbench.data.tagged_rows import EntitySpan, SpanRule, spans_of
from workbench.evaluation import metrics

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
TagRows = Sequence[Sequence[str]]  # tags of the words of each row
Match = tuple[EntitySpan | None, EntitySpan | None]
"""A true entity and the predicted one that stands for it; None where there is none."""
Kind = Literal["missed", "spurious", "wrong type", "wrong edges", "wrong type and edges"]
_AVERAGED = ("precision", "recall", "f1", "macro_precision", "macro_recall", "macro_f1")


@dataclass(frozen=True)
class WrongSpan:
    """An entity that was not predicted as it is."""

    row: int  # number of the row, from 0
    kind: Kind
    true: EntitySpan | None  # None where a spurious entity was predicted
    predicted: EntitySpan | None  # None where an entity was missed


@dataclass(frozen=True)
class EntityCounts:
    """Entities of each row and type; `of` counts them."""

    types: tuple[str, ...]
    right_NE: Counts
    predicted_NE: Counts
    true_NE: Counts

    @classmethod
    def of(cls, true: TagRows, predicted: TagRows, *, rule: SpanRule = "conlleval") -> EntityCounts:
        """Count the entities in tags; see `scores`."""
        pairs = list(_paired(true, predicted, rule))
        types = sorted({span.label for both in pairs for spans in both for span in spans})
        number = {label: at for at, label in enumerate(types)}
        counts = np.zeros((3, len(pairs), len(types)), dtype=np.int64)
        for row, (own, found) in enumerate(pairs):
            for which, spans in enumerate((set(own) & set(found), found, own)):
                for span in spans:
                    counts[which, row, number[span.label]] += 1
        return cls(tuple(types), *counts)


def scores(true: TagRows, predicted: TagRows, *, rule: SpanRule = "conlleval") -> dict[str, float]:
    """Scores of entities by name, as scores.json holds them; equal to seqeval's.

    `precision`, `recall` and `f1` are of all entities together (micro), `macro_...` means over types, `accuracy` the
    share of words whose tag is right. Each has a 95 % interval (bootstrap over rows) as NAME_low and NAME_high where
    there are two rows or more. A score without entities is 0.

    Args:
        true: Tags of each row's words.
        predicted: As many, for each word; an empty tag counts as `O` for entities, and as wrong for `accuracy`.
        rule: Which tags make an entity; see `spans_of`.

    Raises:
        ValueError: A row has another number of predicted tags than of tags.

    >>> scores([["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "O", "O"]])["f1"]
    0.6666666666666666
    """
    counts = EntityCounts.of(true, predicted, rule=rule)
    table_NE3 = np.stack([counts.right_NE, counts.predicted_NE, counts.true_NE], axis=2)
    flat_NK = table_NE3.reshape(len(table_NE3), 3 * len(counts.types))
    found = dict(zip(_AVERAGED, _averages(table_NE3.sum(0)[None].astype(float))[0].tolist(), strict=True))
    intervals = _intervals(
        _AVERAGED, flat_NK, lambda sums_RK: _averages(sums_RK.reshape(len(sums_RK), len(counts.types), 3))
    )
    return metrics.with_bounds(found, intervals) | _accuracy(true, predicted)


def tag_scores(true: TagRows, predicted: TagRows) -> dict[str, float]:
    """Scores of plain tags, such as parts of speech.

    `accuracy` is the share of words whose tag is right, with a 95 % interval (bootstrap over rows) where there are two
    rows or more; `macro_f1` is the mean F1 of the tags, and `row_accuracy` the share of rows whose every tag is right.
    Raises ValueError: a row has another number of predicted tags than of tags.

    Args:
        true: Tags of each row's words.
        predicted: As many, for each word; an empty one is wrong.
    """
    pairs = [pair for both in _checked(true, predicted) for pair in zip(*both, strict=True)]
    tags = sorted({tag for pair in pairs for tag in pair} - {""})
    number = {tag: at for at, tag in enumerate(tags)}
    count_3E = np.zeros((3, len(tags)))
    for own, other in pairs:
        count_3E[2, number[own]] += 1
        if other:
            count_3E[1, number[other]] += 1
            count_3E[0, number[other]] += own == other
    rows = [list(own) == list(other) for own, other in zip(true, predicted, strict=True)]
    extra = {
        "macro_f1": float(np.mean(_three(*count_3E)[:, 2])) if tags else 0.0,
        "row_accuracy": float(np.mean(rows)) if rows else 0.0,
    }
    return _accuracy(true, predicted) | extra


def wrong_spans(true: TagRows, predicted: TagRows) -> list[WrongSpan]:
    """The entities that are missed, spurious, or of a wrong type or wrong edges, in the order of rows and words."""
    wrong = []
    for row, both in enumerate(_paired(true, predicted, "conlleval")):
        for own, found in _matched(*both):
            if own != found:
                wrong.append(WrongSpan(row, _mistake(own, found), own, found))
    return wrong


def _mistake(own: EntitySpan | None, found: EntitySpan | None) -> Kind:
    if own is None or found is None:
        return "spurious" if own is None else "missed"
    if own[:2] == found[:2]:
        return "wrong type"
    return "wrong edges" if own.label == found.label else "wrong type and edges"


def _matched(true: Sequence[EntitySpan], predicted: Sequence[EntitySpan]) -> list[Match]:
    """Each true entity of a row with the predicted one that stands for it, each used once; in the order of words."""
    shared = [
        # Equal edges come first, then those that share most words, then equal types.
        (own[:2] != found[:2], -_shared_words(own, found), own.label != found.label, own, found)
        for own in true
        for found in predicted
        if _shared_words(own, found) > 0
    ]
    pairs: list[Match] = []
    free_true, free_found = set(true), set(predicted)
    for *_, own, found in sorted(shared):
        if own in free_true and found in free_found:
            pairs.append((own, found))
            free_true.remove(own)
            free_found.remove(found)
    pairs += [(own, None) for own in free_true] + [(None, found) for found in free_found]
    return sorted(pairs, key=lambda pair: [each for each in pair if each is not None])


def _shared_words(one: EntitySpan, other: EntitySpan) -> int:
    return min(one.end, other.end) - max(one.start, other.start)


def _paired(true: TagRows, predicted: TagRows, rule: SpanRule) -> Iterator[tuple[list[EntitySpan], list[EntitySpan]]]:
    for own, found in _checked(true, predicted):
        yield spans_of(own, rule=rule), spans_of(found, rule=rule)


def _checked(true: TagRows, predicted: TagRows) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    if len(true) != len(predicted):
        raise ValueError(f"{len(true)} rows, but {len(predicted)} of predicted tags")
    for number, (own, found) in enumerate(zip(true, predicted, strict=True)):
        if len(own) != len(found):
            raise ValueError(f"row {number} has {len(own)} tags, but {len(found)} predicted ones")
        yield own, found


def _divided(top: Floats, bottom: Floats) -> Floats:
    """The quotient, 0 where the divisor is 0."""
    return np.divide(top, bottom, out=np.zeros(np.broadcast_shapes(top.shape, bottom.shape)), where=bottom != 0)


def _three(right: Floats, predicted: Floats, true: Floats) -> Floats:
    """Precision, recall and F1 (..., 3), each 0 where it has nothing to divide by."""
    precision, recall = _divided(right, predicted), _divided(right, true)
    return np.stack([precision, recall, _divided(2 * precision * recall, precision + recall)], axis=-1)


def _averages(table_RE3: Floats) -> Floats:
    """The scores `_AVERAGED` (R, 6) of counts (R, E, 3) of right, predicted and true entities.

    The means over types are of those that have an entity, as seqeval takes them.
    """
    micro_R3 = _three(*np.moveaxis(table_RE3.sum(1), -1, 0))
    each_RE3 = _three(*np.moveaxis(table_RE3, -1, 0))
    types_R = np.maximum(1, (table_RE3[..., 1:].sum(-1) > 0).sum(1))
    return np.concatenate([micro_R3, each_RE3.sum(1) / types_R[:, None]], axis=1)


def _intervals(
    names: Sequence[str], count_NK: Counts, scores_of: Callable[[Floats], Floats]
) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of scores of the sums of counts over rows; none for a single row. `scores_of`: from the sums
    of resamples (r, K) to their scores (r, number of names)."""
    if len(count_NK) < 2 or not count_NK.shape[1]:
        return {}
    kinds_KK, rows_K = np.unique(count_NK, axis=0, return_counts=True)
    found = [scores_of(times_RK @ kinds_KK) for times_RK in metrics.resampled(rows_K)]
    return dict(zip(names, metrics.percentile_bounds(np.concatenate(found)), strict=True))


def _accuracy(true: TagRows, predicted: TagRows) -> dict[str, float]:
    """The share of words whose tag is right, with its interval."""
    rows = [(sum(map(str.__eq__, own, found)), len(own)) for own, found in _checked(true, predicted)]
    count_N2 = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
    right, words = count_N2.sum(0).tolist()
    accuracy = {"accuracy": right / words if words else 0.0}
    intervals = _intervals(["accuracy"], count_N2, lambda sums_R2: _divided(sums_R2[:, :1], sums_R2[:, 1:]))
    return metrics.with_bounds(accuracy, intervals)
