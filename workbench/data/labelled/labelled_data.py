"""Data sets of labelled rows: read, split without leaks, in the form that a backbone reads.

Legend: N rows, B rows of a micro-batch, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config import RunConfig
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data import leaks, named_sets, row_order, selection
from workbench.data.batching import Indices, MicroBatch, Weights, WholeRows
from workbench.data.folds import held_fold, stratified_folds
from workbench.data.folds.held_fold import FoldRow
from workbench.data.held_out_split import Splits, hold_out
from workbench.data.labelled import labels, record_table, records
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RecordSource, RowInputs, RowReader
from workbench.data.leaks import Copies
from workbench.data.text import decontamination
from workbench.data.text.decontamination import Contamination, TextRow
from workbench.data.text.quality import cleaning
from workbench.data.text.quality.cleaning import Cleaning
from workbench.data.text.quality.rules import RowText
from workbench.errors import DataError, WorkbenchError


def split_off(source: RecordSource, config: RunConfig, path: str) -> tuple[RecordSource, RecordSource]:
    """Split off held-out rows of the file `path`, stratified; equal rows stay on the same side.

    Raises:
        DataError: They are too few.
    """
    fold, share = config.data.fold, config.data.own_share
    if fold.of is not None:
        by_label = stratified_folds.strata_of(source.labels, k=fold.of)
        rows = [
            FoldRow(record.place, record.key, record.key, classes)
            for record, classes in zip(source.records, by_label, strict=True)
        ]
        read_as = config.data.model_copy(update={"train": path})
        part = held_fold.split(fold, rows, config=read_as, seed=config.rows_seed)
        return source.subset(part.train_N), source.subset(part.validation_N)
    assert share is not None
    strata = stratified_folds.strata_of(source.labels, k=max(2, round(1 / share)))
    held_out = hold_out(strata, groups=(record.key for record in source.records), share=share, seed=config.rows_seed)
    if not held_out.any():
        count, different = len(source.records), len(set(source.keys))
        equal = "" if count == different else f", of which {different} {'differs' if different == 1 else 'differ'},"
        raise DataError(
            f"{source.name}: {count} row(s){equal} are too few to hold out a share of {share}. "
            "Give more rows, or a file of its own as data.held_out."
        )
    return source.subset(~held_out), source.subset(held_out)


def require_measured(
    meaning: Labels, train: Sequence[Any], held_out: Mapping[str, RecordSource], config: RunConfig
) -> None:
    """Raise DataError where the held-out rows, all sets of them together, lack a class. `train`: the label of each
    training row."""
    if meaning.kind == "number" or not config.classes.every_class:
        return
    measured = labels.counts([label for source in held_out.values() for label in source.labels])
    trained, named = labels.counts(train), " + ".join(source.name for source in held_out.values())
    for name in meaning.names:
        if name not in measured:
            raise DataError(
                f"{named}: no held-out row has the class `{name}`, which has {trained[name]} training row(s). "
                "Give it more distinct rows, leave it out, or write classes.every_class=false to accept a class "
                f"without a score.{stratified_folds.several_in_one(meaning.names) if meaning.kind == 'one' else ''}"
            )


def require_kept(train: RecordSource, kept: RecordSource, sets: Mapping[str, RecordSource]) -> None:
    """Raise DataError where `data.overlap=drop` left no row of a class."""
    if kept is train:
        return
    rest, named = labels.counts(kept.labels), " + ".join(each.name for each in sets.values())
    for name, rows in labels.counts(train.labels).items():
        if name not in rest:
            raise DataError(
                f"{train.name}: all {rows} row(s) of the class `{name}` are also in {named}, or nearly, so that "
                "data.overlap=drop leaves none to learn from. Take them out of one of the two files, write "
                "data.overlap=tell to keep them and score with and without them, or give the class other training rows."
            )


Targets = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LabelledSet(WholeRows):
    """Rows with their targets, which may be probabilities, and their weights in the loss."""

    records: Sequence[LabelledRecord]
    inputs: RowInputs
    targets_NC: Targets
    """Zeros where a row has no label."""
    supervised: Weights
    """Weight of each row in the mean loss (N,) float64."""
    source: str
    fingerprint: str
    skipped: tuple[str, ...] = field(default=())
    """Rows that were left out, each with its reason."""
    extra_targets_NC: Targets | None = None
    """Further columns of `labels_N`, such as a teacher's outputs."""
    contamination: Contamination | None = None
    """Rows that held the text of evaluation rows, where they were looked for."""
    cleaning: Cleaning | None = None
    """Rows that `data.clean` left out."""
    difficulty: Floats | None = None
    """How hard each row is, where `data.curriculum` asks for it."""
    sources: tuple[str, ...] = ()
    """Names of the sets that rows are from; empty where there is one."""
    source_N: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the set of each row, where there are several."""
    copies: Copies = ()
    """Rows that are copies of training rows."""

    def __len__(self) -> int:
        return len(self.records)

    def place(self, index: int) -> str:
        return self.records[index].place

    def places(self) -> Iterator[str]:
        """File and row that each row came from."""
        return (record.place for record in self.records)

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> LabelledSet:
        """The same rows, with texts as pass `epoch` over them has rewritten them, and pictures as large as by then."""
        inputs = self.inputs.rewritten(epoch=epoch, progress=step / steps if steps else 1.0)
        return self if inputs is self.inputs else replace(self, inputs=inputs)

    def batch(self, indices: Indices, *, epoch: int | None = None, repeats: Indices | None = None) -> MicroBatch:
        """The rows `indices`, padded; `labels_N` holds weights, targets and `extra_targets_NC` (B, 1 + C...). `epoch`:
        pass over the training rows, which decides how pictures are augmented; None: rows as they are. `repeats`: how
        often the epoch has drawn each of them before (B,); None: never."""
        import torch

        inputs, positions_B, tokens, mix = self.inputs.batch(indices, epoch=epoch, repeats=repeats)
        extra = [] if self.extra_targets_NC is None else [self.extra_targets_NC[indices]]
        targets_BC: Targets | Floats = self.targets_NC[indices]
        if mix is not None:
            share_B1 = mix.share_B[:, None]
            targets_BC = share_B1 * targets_BC + (1 - share_B1) * self.targets_NC[mix.partner_B]
        labels_B = np.concatenate([self.supervised[indices, None], targets_BC, *extra], axis=1)
        return MicroBatch(
            inputs=inputs,
            positions_N=positions_B,
            labels_N=torch.from_numpy(labels_B.astype(np.float32)),
            tokens=tokens,
            rows_B=indices,
        )

    def subset(self, keep: Indices | npt.NDArray[np.bool_], note: str | None = None) -> LabelledSet:
        """The rows that `keep` selects, by indices or by a mask; `note` is added to `skipped`."""
        numbers = np.arange(len(self))[keep]
        return replace(
            self,
            records=record_table.taken(self.records, numbers),
            inputs=self.inputs.take(numbers),
            targets_NC=self.targets_NC[numbers],
            supervised=self.supervised[numbers],
            skipped=(note, *self.skipped) if note else self.skipped,
            extra_targets_NC=None if self.extra_targets_NC is None else self.extra_targets_NC[numbers],
            difficulty=None if self.difficulty is None else self.difficulty[numbers],
            source_N=self.source_N[numbers] if self.sources else self.source_N,
            copies=leaks.taken(self.copies, numbers),
        )

    def concatenated(self, other: LabelledSet) -> LabelledSet:
        """These rows, followed by those of `other`, as one set."""
        extra = [rows.extra_targets_NC for rows in (self, other) if rows.extra_targets_NC is not None]
        assert len(extra) in (0, 2), "labels of the two sets would differ in length"
        graded = [rows.difficulty for rows in (self, other) if rows.difficulty is not None]
        assert len(graded) in (0, 2), "rows without a difficulty would have no place in an order"
        return replace(
            self,
            records=record_table.joined(self.records, other.records),
            inputs=self.inputs.concatenated(other.inputs),
            targets_NC=np.concatenate([self.targets_NC, other.targets_NC]),
            supervised=np.concatenate([self.supervised, other.supervised]),
            extra_targets_NC=np.concatenate(extra) if extra else None,
            difficulty=np.concatenate(graded) if graded else None,
            sources=(),
        )

    def graded(self, curriculum: CurriculumConfig) -> LabelledSet:
        """The same rows with their difficulty, where a column or a user's function says it. Raises ConfigError: the
        user's file is wrong; DataError: a row has no number in the column."""
        if not curriculum.graded:
            return self
        return replace(self, difficulty=row_order.row_difficulty(curriculum, (record.row for record in self.records)))

    def with_targets(self, targets_NC: Targets) -> LabelledSet:
        """The same rows with other targets, such as a teacher's probabilities."""
        assert targets_NC.shape == self.targets_NC.shape
        return replace(self, targets_NC=targets_NC.astype(np.float32))

    def reweighted(self, factor_N: Floats) -> LabelledSet:
        """The same rows with their weights multiplied by `factor_N`."""
        return replace(self, supervised=self.supervised * factor_N)

    @property
    def lengths(self) -> Indices:
        return self.inputs.lengths

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """A hash of what the model reads of each row, and of its target: equal for exact duplicates."""
        rows = zip(self.inputs.arrays(), self.targets_NC, strict=True)
        hashes = (
            hashlib.sha256(f"{array.shape}".encode() + array.tobytes() + target_C.tobytes()) for array, target_C in rows
        )
        return np.fromiter((int.from_bytes(each.digest()[:8], "little") for each in hashes), dtype=np.uint64)

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that the model reads for each row."""
        return self.lengths

    @property
    def labels(self) -> list[labels.Label | None]:
        """The label of each row, as read."""
        return record_table.labels_of(self.records)

    @property
    def of_class_NG(self) -> npt.NDArray[np.bool_]:
        """Which rows each class has, of those that any has; all rows are one where labels are numbers."""
        of_class_NC = self.targets_NC > 0.5
        several = self.targets_NC.shape[1] > 1 and of_class_NC.any()
        return of_class_NC[:, of_class_NC.any(0)] if several else np.ones((len(self), 1), dtype=bool)

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Number of rows of each set; empty where there is one."""
        return named_sets.sizes(self)

    @property
    def truncated(self) -> int:
        """Number of rows that lost a part."""
        return self.inputs.truncated

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        classes = labels.counts([each for each in self.labels if each is not None])
        quality_facts = {} if self.contamination is None else {"contamination": self.contamination.facts()}
        quality_facts |= {} if self.cleaning is None else {"cleaning": self.cleaning.facts()}
        counted: dict[str, Any] = {"classes": dict(sorted(classes.items()))}
        numbers = [each for each in self.labels if isinstance(each, float)]
        counted |= {"mean_label": float(np.mean(numbers))} if numbers else {}
        counted |= {"sources": self.rows_by_source} if self.sources else {}
        return {
            **named_sets.shared_facts(self, supervised_tokens=len(self)),
            **counted,
            **quality_facts,
            **leaks.facts(self.copies),
        }


class ClassSplits(NamedTuple):
    """Training, held-out and test rows, and the meaning of their labels."""

    train: LabelledSet
    held_out: LabelledSet
    test: LabelledSet | None
    labels: Labels

    @property
    def rows(self) -> Splits[LabelledSet]:
        """The rows alone."""
        return Splits(self.train, self.held_out, self.test)


class LabelledSources(NamedTuple):
    """Rows of each split by the names of their files, before they are encoded, and the meaning of their labels."""

    train: dict[str, RecordSource]
    held_out: dict[str, RecordSource]
    test: dict[str, RecordSource]
    labels: Labels
    contamination: list[Contamination | None]
    cleaning: Cleaning | None
    copies: dict[str, Copies]
    """Rows that are copies of training rows, in each set to score by, by its setting."""


def split(config: RunConfig, reader: RowReader) -> LabelledSources:
    """Read and split, before there is a tokenizer; refuses data with nothing to learn or to measure."""
    assert not config.data.streaming.on, "streamed rows are files of this machine by now"
    held_out, test = (read_each(files, reader) for files in (config.data.held_out_files, config.data.test_files))
    trains, shares = read_training(config, reader), dict[str, RecordSource]()
    if config.data.own_share is not None:
        for name, train in trains.items():
            path = config.data.training_files[name].train
            trains[name], shares[name] = split_off(train, config, path)
    held_out = held_out or shares
    sets = decontamination.evaluation_sets(held_out, test)
    trains, left_out = cleaned(trains, config, reader)
    contamination_reports = list[Contamination | None]()
    scored = decontamination.evaluation_sets({} if config.data.fold.trains else held_out, test)
    trains, copies = separate(trains, scored, config, reader.duplicates)
    for name, train in trains.items():
        trains[name], matched = decontaminated(train, sets, config, reader)
        contamination_reports.append(matched)
    train_labels = [label for train in trains.values() for label in train.labels]
    meaning = labels.fit(
        config.classes.kind, train_labels, source=" + ".join(source.name for source in trains.values())
    )
    meaning = replace(meaning, metric=config.evaluate.judge)
    require_measured(meaning, train_labels, held_out, config)
    return LabelledSources(trains, held_out, test, meaning, contamination_reports, left_out, copies)


def load(config: RunConfig, reader: RowReader) -> ClassSplits:
    """Read and split; refuses data with nothing to learn or to measure."""
    trains, held_out, test, meaning, contamination_reports, left_out, copies = split(config, reader)
    weight_N = np.asarray([record.weight for train in trains.values() for record in train.records])
    rows = replace(
        encode_each(trains, reader, meaning).reweighted(weight_N),
        contamination=decontamination.join_contaminations(
            contamination_reports, records.source_prefixes(trains).values()
        ),
        cleaning=left_out,
    )
    return ClassSplits(
        train=_selected(rows, config, reader, meaning),
        held_out=encode_each(held_out, reader, meaning, copies, "data.held_out"),
        test=encode_each(test, reader, meaning, copies, "data.test") if test else None,
        labels=meaning,
    )


def separate(
    trains: dict[str, RecordSource], sets: Mapping[str, RecordSource], config: RunConfig, find: leaks.Find
) -> tuple[dict[str, RecordSource], dict[str, Copies]]:
    """See `leaks.separate`; refuses what leaves a class without rows."""
    but = "" if config.media else " but for case and punctuation"  # pictures are equal whole
    kept, copies = leaks.separate(trains, sets, find, action=config.data.overlap, but=but)
    for name, train in trains.items():
        require_kept(train, kept[name], sets)
    return kept, copies


def scored(config: RunConfig, reader: RowReader, meaning: Labels) -> LabelledSet:
    """The rows of `data.test`, which know those that are copies of training rows, where these can be read still."""
    test = read_each(config.data.test_files, reader)
    sets, copies = decontamination.evaluation_sets({}, test), dict[str, Copies]()
    if not config.data.streaming.on and config.data.overlap != "exact":
        try:
            trains = read_training(config, reader)
        except WorkbenchError:  # they have gone since the run
            trains = {}
        if config.data.own_share is not None and not config.crossvalidates:
            paths = {name: own.train for name, own in config.data.training_files.items()}
            trains = {name: split_off(train, config, paths[name])[0] for name, train in trains.items()}
        copies, _ = leaks.find_copies(trains, sets, reader.duplicates, action=config.data.overlap)
    return encode_each(test, reader, meaning, copies, "data.test")


def read_training(config: RunConfig, reader: RowReader) -> dict[str, RecordSource]:
    """The training rows of each source by name."""
    read = dict[str, RecordSource]()
    prefixes = named_sets.prefixes({name: own.train for name, own in config.data.training_files.items()})
    for name, own in config.data.training_files.items():
        with named_sets.naming(prefixes[name]):
            read[name] = reader.read(own.train, limit=own.limit, weighted=True, columns=own.columns)
            labels.require_classes(config.classes.kind, read[name].labels, source=own.train)
    return read


def training_keys(config: RunConfig, reader: RowReader) -> list[str]:
    """What the rows that a run trains on are known by; of a cross-validation all, as each adapter trains on most."""
    trains = read_training(config, reader) if config.crossvalidates else split(config, reader).train
    return [record.key for train in trains.values() for record in train.records]


def read_each(files: Mapping[str, str], reader: RowReader) -> dict[str, RecordSource]:
    """The rows of some files by name."""
    return {name: reader.read(path) for name, path in files.items()}


def encode_each(
    sets: Mapping[str, RecordSource],
    reader: RowReader,
    meaning: Labels,
    copies: Mapping[str, Copies] | None = None,
    key: str = "",
) -> LabelledSet:
    """As `encode`, the rows of several sets, which they know by name; of one that has none (``) as they are.

    Args:
        copies: Copies of training rows in each set, by its setting.
        key: Setting that names these sets, such as `data.test`.
    """
    rows = encode(records.join_sources(sets), reader, meaning)
    return replace(rows, copies=leaks.joined(sets, copies or {}, key))


def encode(source: RecordSource, reader: RowReader, meaning: Labels) -> LabelledSet:
    """Convert rows to inputs, and their labels to targets, each of weight 1; an unknown class is refused."""
    labels.require_known(meaning, source.labels, (record.place for record in source.records))
    return LabelledSet(
        records=source.records,
        inputs=reader.inputs(source),
        targets_NC=meaning.targets(source.labels),
        supervised=np.ones(len(source.records)),
        source=source.name,
        fingerprint=source.fingerprint,
        skipped=source.skipped,
        sources=source.sources,
        source_N=source.source_N,
    )


def cleaned(
    trains: Mapping[str, RecordSource], config: RunConfig, reader: RowReader
) -> tuple[dict[str, RecordSource], Cleaning | None]:
    """Training rows of each source without those that `data.clean` flags, duplicates in an earlier source included.

    And what it found; None where it names no rule.
    """
    if not config.data.clean:
        return dict(trains), None
    read = [(train.name, map(row_text, train.records)) for train in trains.values()]
    repeats = None
    if config.media:
        # Pictures and recordings that repeat an earlier one, in the rows of all sources one after another.
        every = [record for train in trains.values() for record in train.records]
        rows, keys = list(map(row_text, every)), [record.key for record in every]
        repeats = cleaning.duplicate_flags(
            rows, config.data.clean, keys, lambda: reader.duplicates(list(trains.values())).cluster_N.tolist()
        )
    cleaning_reports = cleaning.clean_sources(read, config.data.clean, repeats=repeats)
    return {
        name: train.subset(own.kept([record.place for record in train.records]))
        for (name, train), own in zip(trains.items(), cleaning_reports, strict=True)
    }, cleaning.join_cleanings(cleaning_reports, records.source_prefixes(trains).values())


def row_text(record: LabelledRecord) -> RowText:
    """A labelled row as rules of quality read it: its columns, and not its label."""
    return RowText(record.place, "\n".join(record.fields))


def decontaminated(
    train: RecordSource, sets: Mapping[str, RecordSource], config: RunConfig, reader: RowReader
) -> tuple[RecordSource, Contamination | None]:
    """Training rows after `data.decontaminate`, and what it found; None where it is off."""
    wanted = config.data.decontaminate
    if wanted.action == "off":
        return train, None
    contamination_report = decontamination.find_contamination(
        train.name,
        _texts(train),
        {name: _texts(source) for name, source in sets.items()}
        | {name: _texts(reader.read(name, labelled=False)) for name in wanted.against},
        wanted,
    )
    if wanted.action != "drop" or not contamination_report.matches:
        return train, contamination_report
    note = f"{len(contamination_report.matches)} rows that hold the text of evaluation rows"
    return train.subset(~contamination_report.contaminated_N, note), contamination_report


def target_rows(config: RunConfig, reader: RowReader, meaning: Labels) -> LabelledSet:
    """The labelled rows of `data.select.target`, whose gradients others are compared with."""
    assert config.data.select.target is not None
    return encode(reader.read(config.data.select.target), reader, meaning)


def _selected(train: LabelledSet, config: RunConfig, reader: RowReader, meaning: Labels) -> LabelledSet:
    """The rows of `train` that `data.select` keeps; where the backbone chooses, chance stands in for it."""
    if config.data.select.by == "all":
        return train
    if config.data.select.by == "gradient":
        target_rows(config, reader, meaning)  # what is wrong with them is told before anything trains
        require_room(train, config, meaning)
    kept, note = selection.selected(
        config.data.select,
        train.lengths,
        seed=config.rows_seed,
        texts=lambda: (" ".join(record.fields) for record in train.records),
        target=lambda name: (" ".join(record.fields) for record in reader.read(name, labelled=False).records),
    )
    selected_rows = train.subset(kept, note)
    if not config.data.select.by_backbone:
        require_every_class(train, selected_rows, meaning, cure="Keep more rows.")
    return selected_rows


def require_room(train: LabelledSet, config: RunConfig, meaning: Labels) -> None:
    """Raise DataError where `data.select` has fewer rows to keep than there are classes."""
    most, classes = selection.most_kept(config.data.select, train.lengths), train.of_class_NG.shape[1]
    if meaning.kind != "number" and most < classes:
        raise DataError(
            f"data.select keeps {most:,} rows at most, and the training rows have {classes:,} classes, some of which "
            "nothing would be learned about.\n  Keep more rows."
        )


def require_every_class(train: LabelledSet, kept: LabelledSet, meaning: Labels, *, cure: str) -> None:
    """Raise DataError where the rows that `data.select` keeps lack a class."""
    lost_C = (train.targets_NC > 0.5).any(0) & ~(kept.targets_NC > 0.5).any(0)
    if meaning.kind != "number" and lost_C.any():
        raise DataError(
            f"data.select keeps no training row of the class `{meaning.names[int(lost_C.argmax())]}`, which nothing "
            f"would be learned about.\n  {cure}"
        )


def _texts(source: RecordSource) -> Iterator[TextRow]:
    return (TextRow(record.place, (" ".join(record.fields),)) for record in source.records)
