"""Labelled rows split into folds, with test and unlabelled rows, free of duplicates that would leak labels.

Legend: N rows, T test rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.config import RunConfig
from workbench.data.folds import duplicates, stratified_folds
from workbench.data.folds.duplicates import DuplicateClusters, DuplicateReport, Ints
from workbench.data.folds.stratified_folds import FoldAssignment, Groups, Split, singletons
from workbench.data.labelled import labels, records
from workbench.data.labelled.labelled_data import (
    LabelledSet,
    cleaned,
    decontaminated,
    encode,
    encode_each,
    read_each,
    read_training,
    separate,
)
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.record_table import RawRows
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.text import decontamination
from workbench.data.text.decontamination import Contamination
from workbench.errors import ConfigError, DataError

Features: TypeAlias = Callable[[Sequence[RecordSource]], NDArray[np.float32]]
"""From sources to features (N, D) of all their rows together, in their order."""
Find: TypeAlias = Callable[[Sequence[RecordSource]], DuplicateClusters]


class FoldData(NamedTuple):
    """Rows of a cross-validation."""

    rows: LabelledSet
    folds: FoldAssignment
    cluster_N: Ints
    """Cluster of near-duplicates of each row."""
    labels: Labels
    test: LabelledSet | None
    cluster_T: Ints | None
    unlabelled: LabelledSet | None
    duplicates: DuplicateReport | None
    """None where duplicates were not looked for."""
    conflicts: tuple[tuple[str, ...], ...]
    """Places of the rows of each cluster whose rows have different labels."""
    leak: int
    """Rows that would have a near-duplicate in the training rows of their fold, were the folds not grouped."""
    disputed: RecordSource | None = None
    """Rows of `conflicts` that were left out of `rows`; None where all of them are there."""
    past: LabelledSet | None = None
    """The first rows in time, which every fold trains on and none validates; None where folds are in no order."""
    group_P: Ints | None = None
    """Their groups, as `folds.ordered_N` has those of `rows`."""
    outer: RecordSource | None = None
    """The rows of the outer fold that `data.fold` leaves out of everything; None where there is none."""

    def training(self, split: Split) -> LabelledSet:
        """The rows that the adapter of a fold trains on."""
        own = self.rows.subset(split.train_N)
        if self.past is None:
            return own
        assert self.folds.ordered_N is not None and self.group_P is not None
        seen_P = np.isin(self.group_P, self.folds.ordered_N[split.validation_N])
        return self.past.subset(~seen_P).concatenated(own)


class _Deduplicated(NamedTuple):
    """Training rows after `duplicates.on_duplicate` was applied."""

    source: RecordSource
    weight_N: labels.Floats
    groups: Groups
    cluster_N: Ints
    cluster_T: Ints | None
    report: DuplicateReport | None
    conflicts: tuple[tuple[str, ...], ...]
    leak: int
    disputed: RecordSource | None = None


def load(config: RunConfig, reader: RowReader, features: Features | None = None) -> FoldData:
    """Read, find duplicates and split into folds; refuses rows whose scores would mislead.

    Args:
        features: Needed where `duplicates.features` compares them.
    """
    assert not config.data.streaming.on, "streamed rows are files of this machine by now"
    trains, test = read_training(config, reader), read_each(config.data.test_files, reader)
    for each in trains.values():
        stratified_folds.require_labelled(RawRows(each.records), each.labels)
    trains, left_out = cleaned(trains, config, reader)
    sets, contamination_reports = decontamination.evaluation_sets({}, test), list[Contamination | None]()
    for name, each in trains.items():
        trains[name], matched = decontaminated(each, sets, config, reader)
        contamination_reports.append(matched)
    find = partial(_duplicates, reader=reader, config=config, features=features)
    trains, copies = separate(trains, sets, config, find)
    train = records.join_sources(trains)
    outer = None
    if config.data.fold.of is not None:
        outer_N = _outer(train, find, config)
        outer, train = train.subset(outer_N), train.subset(~outer_N)
    clean = _deduplicate(train, list(test.values()), find, config)
    meaning = labels.fit(config.classes.kind, clean.source.labels, source=train.name)
    meaning = replace(meaning, metric=config.evaluate.judge)
    folds = stratified_folds.make_folds(
        config.folds,
        RawRows(clean.source.records),
        clean.source.labels,
        clusters=clean.groups,
        seed=config.rows_seed,
    )
    rows = replace(
        encode(clean.source, reader, meaning).reweighted(clean.weight_N),
        contamination=decontamination.join_contaminations(
            contamination_reports, records.source_prefixes(trains).values()
        ),
        cleaning=left_out,
    )
    scored_N = folds.fold_RN[0] >= 0
    return FoldData(
        rows=rows if scored_N.all() else rows.subset(scored_N),
        past=None if scored_N.all() else rows.subset(~scored_N),
        group_P=None if folds.ordered_N is None else folds.ordered_N[~scored_N],
        folds=folds.subset(scored_N),
        cluster_N=clean.cluster_N[scored_N],
        labels=meaning,
        test=encode_each(test, reader, meaning, copies, "data.test") if test else None,
        cluster_T=clean.cluster_T,
        unlabelled=_unlabelled(
            config, [train, *test.values(), *([] if outer is None else [outer])], reader, meaning, find
        ),
        duplicates=clean.report,
        conflicts=clean.conflicts,
        leak=clean.leak,
        disputed=clean.disputed,
        outer=outer,
    )


def _outer(train: RecordSource, find: Find, config: RunConfig) -> duplicates.Mask:
    """Which rows are in the outer fold that `data.fold` leaves out, with their near-duplicates and their group."""
    fold = config.data.fold
    folds = config.folds.model_copy(update={"k": fold.of, "repeats": 1})
    alone = config.duplicates.on_duplicate == "ignore"
    groups = singletons(train.keys) if alone else find([train]).groups
    try:
        rows = RawRows(train.records)
        dealt = stratified_folds.make_folds(folds, rows, train.labels, clusters=groups, seed=config.rows_seed)
    except (ConfigError, DataError) as error:
        raise type(error)(str(error).replace("folds.k", "folds.nested")) from None
    outer_N: duplicates.Mask = dealt.fold_RN[0] == fold.number
    return outer_N


def _duplicates(
    sources: Sequence[RecordSource],
    part_N: Ints | None = None,
    *,
    reader: RowReader,
    config: RunConfig,
    features: Features | None,
) -> DuplicateClusters:
    """Near-duplicates by what rows hold, and by their features where the configuration says so."""
    clusters, threshold = reader.duplicates(sources, part_N), config.duplicates.features
    if threshold is None:
        return clusters
    assert features is not None, "whoever reads the rows of a cross-validation can compute them"
    return duplicates.joined(clusters, features(sources), threshold=threshold)


def _unlabelled(
    config: RunConfig, known: Sequence[RecordSource], reader: RowReader, meaning: Labels, find: Find
) -> LabelledSet | None:
    """Unlabelled rows, one of each cluster of near-duplicates, without near-duplicates of rows in `known`.

    Near-duplicates of training rows would look easier than new rows are.
    """
    path = config.pseudo_label.unlabelled
    if path is None:
        return None
    source = reader.read(path, labelled=False)
    if config.duplicates.on_duplicate != "ignore":
        cluster_N = find([*known, source]).cluster_N
        _, first = np.unique(cluster_N, return_index=True)
        new_N = np.isin(np.arange(len(cluster_N)), first)[-len(source.records) :]
        note = f"{int((~new_N).sum())} near-duplicates of rows with labels, of test rows and of each other"
        source = source if new_N.all() else source.subset(new_N, note)
    if not source.records:
        raise DataError(f"{path}: every row is a near-duplicate of one with a label. Give other rows.")
    return encode(source, reader, meaning)


def _deduplicate(train: RecordSource, test: Sequence[RecordSource], find: Find, config: RunConfig) -> _Deduplicated:
    """Find clusters among training and test rows, and apply `duplicates.on_duplicate`."""
    weight_N = np.asarray([record.weight for record in train.records])
    if config.duplicates.on_duplicate == "ignore":
        cluster_T = np.arange(sum(len(each.records) for each in test)) if test else None
        groups = singletons(train.keys)
        return _Deduplicated(train, weight_N, groups, np.arange(len(weight_N)), cluster_T, None, (), 0)
    both = find([train, *test])
    is_test = np.arange(len(both.distinct_N)) >= len(weight_N)
    clusters, cluster_T = both.subset(~is_test), both.subset(is_test).cluster_N if test else None
    report = duplicates.report(clusters, train.labels)
    conflicts = tuple(tuple(train.records[row].place for row in rows) for rows in report.conflicts)
    leak = stratified_folds.ungrouped_leak(clusters, train.labels, k=config.folds.k, seed=config.rows_seed)
    kept_N, factor_N = duplicates.resolve(clusters, train.labels, config.duplicates.on_duplicate)
    note = f"{int((~kept_N).sum())} rows that are near-duplicates of one that is kept"
    lost_N = ~kept_N & np.isin(np.arange(len(kept_N)), [row for rows in report.conflicts for row in rows])
    disputed = train.subset(lost_N) if lost_N.any() else None
    train, clusters, weight_N = _subset(train, clusters, weight_N * factor_N, kept_N, note)
    return _Deduplicated(
        train, weight_N, clusters.groups, clusters.cluster_N, cluster_T, report, conflicts, leak, disputed
    )


def _subset(
    source: RecordSource, clusters: DuplicateClusters, weight_N: labels.Floats, kept_N: duplicates.Mask, note: str
) -> tuple[RecordSource, DuplicateClusters, labels.Floats]:
    if kept_N.all():
        return source, clusters, weight_N
    return source.subset(kept_N, note), clusters.subset(kept_N), weight_N[kept_N]
