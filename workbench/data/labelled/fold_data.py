"""Labelled rows dealt into folds, with the test and unlabelled rows beside them, and what their duplicates would leak.

Legend: N rows, T test rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.folds_config import DuplicatesConfig
from workbench.data.folds import duplicates, stratification
from workbench.data.folds.duplicates import DuplicateClusters, DuplicateReport
from workbench.data.folds.row_split import FoldAssignment, Groups, alone
from workbench.data.folds.similarity import Ints, normalised
from workbench.data.labelled import labels
from workbench.data.labelled.labelled_data import Labelled, encode
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RecordSource, read
from workbench.data.labelled.text_fields import FieldTokenizer
from workbench.errors import DataError


class FoldData(NamedTuple):
    """Rows of a cross-validation: training, validation by folds, test, unlabelled."""

    rows: Labelled
    folds: FoldAssignment
    cluster_N: Ints
    """Rows of one cluster of near-duplicates have equal numbers."""
    labels: Labels
    test: Labelled | None
    cluster_T: Ints | None
    unlabelled: Labelled | None
    duplicates: DuplicateReport | None
    """None where none were looked for."""
    conflicts: tuple[tuple[str, ...], ...]
    """Places of the rows of each cluster that carries different labels."""
    leak: int
    """Rows that would validate beside a near-duplicate that trains, were the folds not grouped."""


class _Clean(NamedTuple):
    """Rows after their duplicates were treated."""

    source: RecordSource
    weight_N: labels.Floats
    groups: Groups
    cluster_N: Ints
    cluster_T: Ints | None
    report: DuplicateReport | None
    conflicts: tuple[tuple[str, ...], ...]
    leak: int


def load(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> FoldData:
    """Read, find duplicates, deal into folds and tokenise; refuses what would teach, measure or flatter wrongly."""
    train = read(config.data.train, config.data, config.classes, limit=config.data.limit)
    test = read(config.data.test, config.data, config.classes) if config.data.test else None
    stratification.require_labelled([record.row for record in train.records], train.labels)
    clean = _clean(train, test, config)
    found = labels.learn(config.classes.kind, clean.source.labels, source=config.data.train)
    dealt = stratification.make(
        config.folds,
        [record.row for record in clean.source.records],
        clean.source.labels,
        clusters=clean.groups,
        seed=config.seed,
    )
    writer = FieldTokenizer(tokenizer, config.classes, max_tokens=config.data.max_tokens)
    return FoldData(
        rows=encode(clean.source, writer, found).weighted(clean.weight_N),
        folds=dealt,
        cluster_N=clean.cluster_N,
        labels=found,
        test=None if test is None else encode(test, writer, found),
        cluster_T=clean.cluster_T,
        unlabelled=_unlabelled(config, [train, *([test] if test else [])], writer, found),
        duplicates=clean.report,
        conflicts=clean.conflicts,
        leak=clean.leak,
    )


def _unlabelled(
    config: RunConfig, known: Sequence[RecordSource], writer: FieldTokenizer, found: Labels
) -> Labelled | None:
    """Rows without labels, one of each cluster of near-duplicates, and none that is known with its label.

    A model that trained on a row's near-duplicate is judged more kindly on it than on what it will meet.
    """
    path = config.pseudo_label.unlabelled
    if path is None:
        return None
    source = read(path, config.data, config.classes, labelled=False)
    if config.duplicates.on_duplicate != "ignore":
        before = [text for each in known for text in _texts(each)]
        cluster_N = _find([*before, *_texts(source)], config.duplicates).cluster_N
        _, first = np.unique(cluster_N, return_index=True)
        new_N = np.isin(np.arange(len(cluster_N)), first)[len(before) :]
        note = f"{int((~new_N).sum())} near-duplicates of rows with labels, of test rows and of each other"
        source = source if new_N.all() else source.subset(new_N, note)
    if not source.records:
        raise DataError(f"{path}: every row is a near-duplicate of one with a label. Give other rows.")
    return encode(source, writer, found)


def _clean(train: RecordSource, test: RecordSource | None, config: RunConfig) -> _Clean:
    """Training rows that share no cluster with test rows, treated as `duplicates` says."""
    own_N = np.asarray([record.weight for record in train.records])
    if config.duplicates.on_duplicate == "ignore":
        singles_T = None if test is None else np.arange(len(test.records))
        return _Clean(train, own_N, alone(_texts(train)), np.arange(len(own_N)), singles_T, None, (), 0)
    both = _find([*_texts(train), *(_texts(test) if test else [])], config.duplicates)
    test_B = np.arange(len(both.text_N)) >= len(own_N)
    found, cluster_T = both.subset(~test_B), both.subset(test_B).cluster_N if test else None
    if test is not None:
        overlap = duplicates.without_overlap(
            both, test_B, action=config.duplicates.overlap, train=train.name, test=test.name
        )
        kept_N = overlap.kept_N[: len(own_N)]
        note = f"{overlap.train_rows} rows in a cluster of near-duplicates with rows of {test.name}"
        train, found, own_N = _kept(train, found, own_N, kept_N, note)
    report = duplicates.report(found, train.labels)
    conflicts = tuple(tuple(train.records[row].place for row in rows) for rows in report.conflicts)
    leak = stratification.ungrouped_leak(found, train.labels, k=config.folds.k, seed=config.seed)
    used_N, weight_N = duplicates.treat(found, train.labels, config.duplicates.on_duplicate)
    note = f"{int((~used_N).sum())} rows that are near-duplicates of one that is kept"
    train, found, own_N = _kept(train, found, own_N * weight_N, used_N, note)
    return _Clean(train, own_N, found.groups, found.cluster_N, cluster_T, report, conflicts, leak)


def _kept(
    source: RecordSource, found: DuplicateClusters, weight_N: labels.Floats, kept_N: duplicates.Mask, note: str
) -> tuple[RecordSource, DuplicateClusters, labels.Floats]:
    if kept_N.all():
        return source, found, weight_N
    return source.subset(kept_N, note), found.subset(kept_N), weight_N[kept_N]


def _find(texts: list[str], config: DuplicatesConfig) -> DuplicateClusters:
    return duplicates.find(texts, threshold=config.threshold, shingle=config.shingle, size=config.length)


def _texts(source: RecordSource) -> list[str]:
    return [normalised("\n".join(record.fields)) for record in source.records]
