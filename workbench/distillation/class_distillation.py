"""Distillation of a classifier: its teachers, what they say of each row, and the loss on that and on labels.

What the teachers say is computed once, before training, and kept in the run directory.

Legend: B rows of a micro-batch, N rows, C outputs (classes, or 1 for a number), G questions that a row answers (1, or
one for each class where a row has several), E answers to each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors
from torch import Tensor

from workbench.config import RunConfig
from workbench.config.sections.classes_config import Kind
from workbench.config.sections.distill_config import BACKBONE, DistillConfig
from workbench.crossval import prediction, run_views
from workbench.crossval.prediction import OUT_OF_FOLD
from workbench.data.batching import Examples, Indices
from workbench.data.folds.duplicates import normalised
from workbench.data.labelled import labelled_data
from workbench.data.labelled.class_sampling import ClassBalancedRows, MixedLabelledRows, RepeatedRows, sampled_rows
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import NamedColumns, RowReader, named_columns
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, DataError
from workbench.evaluation import classification_scores
from workbench.losses.class_losses import Objective, squared_error
from workbench.losses.divergences import log_probs, scaled
from workbench.models import backbones, classifier, exported
from workbench.models.classifier import Classifier
from workbench.runs import files, run_directory
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training import preflight
from workbench.training.callbacks import Callback

KEPT = "teacher.safetensors"  # file of a run directory with the outputs of the teacher
_HEADS = ("ForSequenceClassification", "ForImageClassification")


@dataclass(frozen=True)
class ClassTeacher:
    """One teacher: how it reads a row, and what it predicts."""

    name: str
    """As the configuration names it."""
    labels: Labels
    """Classes, or numbers, of its outputs."""
    config: RunConfig
    """Its classes, data.columns and data.max_tokens decide how the teacher reads a row."""
    reader: RowReader
    predict: Callable[[LabelledSet], Floats]
    """Outputs (N, C) of rows as it reads them; its weights are in memory meanwhile, and no longer."""
    models: Sequence[tuple[Callable[[], Classifier], int]] = ()
    """What loads each model that answers, and how many adapters like its own, or views, answer with it."""

    def rows(self, labelled: LabelledSet, student: RunConfig) -> LabelledSet:
        """The rows as this teacher reads them, without their labels; raises what `require_columns` does."""
        columns = self.require_columns(labelled, student)
        read = [NamedColumns(record.row, each) for record, each in zip(labelled.records, columns, strict=True)]
        source = self.reader.reread(labelled.source, labelled.fingerprint, read)
        return labelled_data.encode(source, self.reader, self.labels)

    def require_columns(self, labelled: LabelledSet, student: RunConfig) -> list[dict[str, Any]]:
        """The columns of rows by the teacher's names; raises ConfigError where one is nowhere among them."""
        columns = [named_columns(record.row, student.data, self.config.data) for record in labelled.records]
        for name in self.reader.columns:
            if not any(name in each for each in columns):
                raise ConfigError(
                    f"distill.teacher.id={self.name} reads the column `{name}`, which {labelled.source} has not. Give "
                    "the rows that column, or take a teacher that reads what is there."
                )
        return columns

    def keys(self, rows: LabelledSet) -> list[str]:
        """By what a row is recognised: its text without case and punctuation, or the digest of its picture."""
        return [record.digest or normalised(self.reader.describe(record)) for record in rows.records]


def class_teachers(source: TeacherSource, student: RunConfig, labels: Labels) -> list[ClassTeacher]:
    """Those who teach together, none of them loaded. Raises ConfigError: they say nothing of classes, or of other ones.
    `student`: the distillation's configuration. `labels`: the student's."""
    if student.distill.teacher.id == BACKBONE:
        raise ConfigError(
            "distill.teacher.id=backbone: a backbone whose head starts at random knows nothing of classes. Write a run "
            "of recipe classify or crossval, or a model that has a classification head."
        )
    folds = _folded(source)
    if student.distill.teacher.out_of_fold and not folds:
        raise ConfigError(
            f"distill.teacher.out_of_fold: {source.name} is no cross-validation, so that nothing was said out of fold. "
            "Name a run of recipe crossval, or leave it out."
        )
    teachers = (
        [_crossval(source)] if folds else [t for each in source.each for t in _classifiers(each, student, labels)]
    )
    for teacher in teachers:
        name = f"distill.teacher.id={teacher.name}"
        if teacher.labels.kind != labels.kind:
            raise ConfigError(
                f"{name}: its labels are of kind {teacher.labels.kind}, the student's of kind {labels.kind}. Write "
                f"classes.kind={teacher.labels.kind}, with such labels, or take another teacher."
            )
        lacking, more = (
            ", ".join(f"`{each}`" for each in names[:8]) + (", ..." if len(names) > 8 else "")
            for names in (
                [each for each in labels.names if each not in teacher.labels.names],
                [each for each in teacher.labels.names if each not in labels.names],
            )
        )
        if lacking or more:
            differences = [f"it says nothing of {lacking}"] if lacking else []
            differences += [f"no training row has {more}, which it knows"] if more else []
            raise ConfigError(
                f"{name}: {', and '.join(differences)}. Teacher and student need the same classes, in any "
                "order: name them alike in data.train, give rows of each, or take a teacher that was trained on these."
            )
    return teachers


def require_one(source: TeacherSource) -> None:
    """Raise ConfigError where no single model teaches, whose layers a student's could be compared with."""
    if _folded(source) or source.models > 1:
        raise ConfigError(
            f"distill.match compares the layers of one model, and {source.name} is several. Name one run of recipe "
            "classify, or leave distill.match out."
        )


def _folded(source: TeacherSource) -> bool:
    return source.config is not None and source.config.crossvalidates


def load_one(source: TeacherSource, student: RunConfig, labels: Labels) -> Classifier:
    """The one model that teaches, loaded."""
    if source.run is None:
        return _stock(source, _stock_labels(source, labels.kind), student)
    return classifier.load(source.run, source.config_of(source.run))


def _classifiers(source: TeacherSource, student: RunConfig, labels: Labels) -> list[ClassTeacher]:
    if source.run is None:
        meant = _stock_labels(source, labels.kind)
        limit = preflight.longest_sequence(source.hub_config()) or student.data.max_tokens
        data = student.data.model_copy(update={"max_tokens": min(limit, student.data.max_tokens)})
        config = student.model_copy(update={"data": data})
        load = partial(_stock, source, meant, config)
        return [ClassTeacher(source.name, meant, config, source.reader(config), partial(_predict, load), [(load, 1)])]
    teachers = []
    for run in [folder.parent for folder in source.adapters] or [source.run]:
        config = source.config_of(run)
        if not config.task.labelled or config.over is not None:
            raise ConfigError(
                f"distill.teacher.id={run}: a run of recipe {config.recipe} says nothing of classes. Write one of "
                "recipe classify or crossval, or a model that has a classification head."
            )
        exported.require_saved(run, config, "classes.json", classifier.reader_file(config))
        meant, reader = classifier.read_labels(run / "adapter"), classifier.reader_of_run(run, config)
        load, passes = partial(classifier.load, run, config), run_views.passes(run, config)
        predict = partial(_told, run, config)
        teachers.append(ClassTeacher(str(run), meant, config, reader, predict, [(load, passes)]))
    return teachers


def _crossval(source: TeacherSource) -> ClassTeacher:
    assert source.run is not None
    run, config = source.run, source.config_of(source.run)
    context = replace(prediction.fold_context(run, config), trust=source.trusted)

    def predict(rows: LabelledSet) -> Floats:
        return classification_scores.outputs_of_values(context.labels, prediction.decided(run, context, rows))

    return ClassTeacher(
        source.name, context.labels, config, context.reader, predict, _members(run, config, source.trusted)
    )


def _members(run: Path, config: RunConfig, trust: Trust) -> list[tuple[Callable[[], Classifier], int]]:
    """See `ClassTeacher.models`: one of the adapters of each cross-validation stands for all of them."""
    if prediction.is_blend(run):
        parts = [prediction.part_folder(run, part) for part in files.read_json(run / "decision.json")["parts"]]
        return [each for part in parts for each in _members(part, run_directory.shipped_config(part, trust), trust)]
    folders = prediction.adapter_folders(run)
    return [(partial(classifier.load, folders[0].parent, config), len(folders))]


def _predict(load: Callable[[], Classifier], rows: LabelledSet) -> Floats:
    model = load()
    return classification_scores.predict_outputs(model.model, model.outputs, rows)


def _told(run: Path, config: RunConfig, rows: LabelledSet) -> Floats:
    return run_views.outputs(run, config, classifier.load(run, config), rows)


def _stock(source: TeacherSource, labels: Labels, config: RunConfig) -> Classifier:
    """A model that no run trained, which reads rows as `config` says."""
    reader = source.reader(config)
    with source.named_in_errors():
        backbone = backbones.load(source.model, reader.tokenizer, task=classifier.task(labels, seed=0)).model
    return classifier.classification_model(backbone, backbone, reader, labels)


def _stock_labels(source: TeacherSource, wanted: Kind) -> Labels:
    """Labels of a model that no run trained; its config.json cannot tell a pair from other classes."""
    hub: Any = source.hub_config()
    if not any(name.endswith(_HEADS) for name in hub.architectures or ()):
        raise ConfigError(
            f"distill.teacher.id={source.name}: {', '.join(hub.architectures or ('it',))} has no classification head "
            "for these classes. Train it by recipe classify first, or name a model whose config.json says "
            f"...{' or ...'.join(_HEADS)}."
        )
    problem = hub.problem_type or ("regression" if hub.num_labels == 1 else "single_label_classification")
    if problem == "regression":
        return Labels("number", ("value",))
    names = tuple(str(hub.id2label[number]) for number in range(hub.num_labels))
    if problem == "multi_label_classification":
        return Labels("several", names)
    return Labels("pair" if wanted == "pair" else "one", names)


class TeacherOutputs(NamedTuple):
    """Outputs (N, C) of the teacher in the student's order of classes: logits, or standardised numbers."""

    train_NC: Floats
    extra_NC: Floats | None
    held_out_NC: Floats
    test_NC: Floats | None


def teacher_outputs(
    config: RunConfig, source: TeacherSource, data: ClassSplits, extra: LabelledSet | None, run: Run, callback: Callback
) -> TeacherOutputs:
    """Teacher outputs for all rows; a resumed run reads those that it kept, if they are of the same rows.

    The first of several processes asks, and tells the others.

    Args:
        config: The distillation's.
        extra: Rows without labels.
    """
    said = run.ranks.agreed(_first_told(config, source, data, extra, run, callback) if run.ranks.first else {})
    return TeacherOutputs(said["train"], said.get("extra"), said["held_out"], said.get("test"))


def _first_told(
    config: RunConfig, source: TeacherSource, data: ClassSplits, extra: LabelledSet | None, run: Run, callback: Callback
) -> dict[str, Floats]:
    named = {"train": data.train, "extra": extra, "held_out": data.held_out, "test": data.test}
    sets = {name: rows for name, rows in named.items() if rows is not None}
    # Outputs are kept for these teachers, rows and classes, and for no others.
    rows_of = {name: [each.fingerprint, *(record.place for record in each.records)] for name, each in sets.items()}
    content = json.dumps([config.distill.teacher.model_dump(mode="json"), data.labels.facts, rows_of])
    path, wanted = run.path / KEPT, hashlib.sha256(content.encode()).hexdigest()
    if run.resumed:
        try:
            with safe_open(path, "np") as file:
                known = (file.metadata() or {}).get("rows") == wanted
        except (OSError, SafetensorError):
            known = False
        if known:
            return dict(safetensors.load_file(path))
    callback.say(f"Asking the teacher, {source.name}, about {sum(map(len, sets.values())):,} rows ...")
    outputs, share = outputs_of(config, source, data.labels, list(sets.values()))
    said = dict(zip(sets, outputs, strict=True))
    files.write_bytes(path, safetensors.save(said, {"rows": wanted}))
    facts = {name: len(rows) for name, rows in sets.items()}
    loss = classification_scores.loss(data.labels, said["held_out"], data.held_out.targets_NC)
    run.note(distill={**source.facts, "teacher_loss": loss, "rows": facts, "out_of_fold": share})
    return said


def unlabelled(config: RunConfig, data: ClassSplits, reader: RowReader) -> LabelledSet | None:
    """The rows of distill.unlabelled without those that are also held out or tested on; labels are not looked at.
    Raises DataError: nothing is left."""
    path = config.distill.unlabelled
    if path is None:
        return None
    source = reader.read(path, labelled=False)
    measured = [data.held_out, *([data.test] if data.test is not None else [])]
    known = {record.key for rows in measured for record in rows.records}
    new = np.asarray([record.key not in known for record in source.records])
    if not new.any():
        raise DataError(f"distill.unlabelled: every row of {path} is also held out or tested on. Give other rows.")
    if not new.all():
        source = source.subset(new, f"{int((~new).sum())} rows that are also held out or tested on")
    return labelled_data.encode(source, reader, data.labels)


def outputs_of(
    config: RunConfig, source: TeacherSource, labels: Labels, rows: Sequence[LabelledSet]
) -> tuple[list[Floats], float | None]:
    """Outputs (N, C) of the teachers together for each set of rows, in the student's classes.

    And the share of the training rows that was said out of fold, where that is asked.
    """
    teachers = class_teachers(source, config, labels)
    if config.distill.teacher.out_of_fold:
        assert source.run is not None
        return _out_of_fold(teachers[0], source.run, rows, config, labels)
    outputs = [_outputs(teacher, [teacher.rows(each, config) for each in rows], labels) for teacher in teachers]
    if len(outputs) == 1:
        return outputs[0], None  # what one says alone keeps the scale of its logits
    # Of several the mean of their values.
    values = [[labels.values(outputs_NC) for outputs_NC in each] for each in outputs]
    return [
        classification_scores.outputs_of_values(labels, np.mean(each, axis=0)) for each in zip(*values, strict=True)
    ], None


def _out_of_fold(
    teacher: ClassTeacher, run: Path, rows: Sequence[LabelledSet], student: RunConfig, labels: Labels
) -> tuple[list[Floats], float]:
    """Outputs of a cross-validation for each set, of its own rows by adapters that never trained on them.

    Args:
        run: The cross-validation's.
        rows: The student's training rows first.

    Returns:
        Outputs (N, C) of each set, and the share of the training rows that are the cross-validation's own, known by
        their text but for case and punctuation, or their picture.
    """
    known = _table(run / OUT_OF_FOLD, teacher)
    read = [teacher.rows(each, student) for each in rows]
    keys = [teacher.keys(each) for each in read]
    own = [np.asarray([key in known for key in each]) for each in keys]
    others = iter(_outputs(teacher, [each.subset(~mask) for each, mask in zip(read, own, strict=True)], labels))
    set_outputs = []
    for each, mask in zip(keys, own, strict=True):
        outputs_NC = np.zeros((len(each), len(labels.names)))
        outputs_NC[~mask] = next(others)
        if mask.any():
            values_nC = np.stack([known[key] for key in each if key in known])
            outputs_NC[mask] = _aligned(
                classification_scores.outputs_of_values(teacher.labels, values_nC), teacher.labels, labels
            )
        set_outputs.append(outputs_NC)
    return set_outputs, float(own[0].mean())


def require_own_rows(teacher: ClassTeacher, run: Path, train: LabelledSet, student: RunConfig) -> None:
    """Raise ConfigError where a cross-validation has seen less than half of the training rows, or forgot what it said.
    `run`: the cross-validation's."""
    path = run / OUT_OF_FOLD
    known = _table(path, teacher)
    own = sum(key in known for key in teacher.keys(teacher.rows(train, student)))
    if 2 * own < len(train):
        raise ConfigError(
            f"distill.teacher.out_of_fold: only {own} of the {len(train)} training rows of {train.source} stand in "
            f"{path}. Write distill.teacher.out_of_fold=false, or the data.train of the cross-validation, "
            f"{' + '.join(own.train for own in teacher.config.data.training_files.values())}."
        )


def _outputs(teacher: ClassTeacher, rows: Sequence[LabelledSet], labels: Labels) -> list[Floats]:
    """Outputs of one teacher for several sets, in the student's classes; it is loaded once, or not at all."""
    whole = rows[0]
    for each in rows[1:]:
        whole = whole.concatenated(each)
    outputs_NC = teacher.predict(whole) if len(whole) else np.zeros((0, len(teacher.labels.names)))
    return np.split(_aligned(outputs_NC, teacher.labels, labels), np.cumsum([len(each) for each in rows])[:-1])


def _aligned(outputs_NC: Floats, theirs: Labels, ours: Labels) -> Floats:
    """The same outputs in the student's order of classes, or in units of the student's numbers."""
    if ours.kind == "number":
        return classification_scores.outputs_of_values(ours, theirs.values(outputs_NC))
    return np.ascontiguousarray(outputs_NC[:, [theirs.names.index(name) for name in ours.names]])


def _table(path: Path, teacher: ClassTeacher) -> dict[str, Floats]:
    """Values (C,) by text or picture; of a row that stands there several times, such as once a repeat, their mean."""
    if not path.exists():
        raise ConfigError(
            f"distill.teacher.out_of_fold: no {path}. Restore it, or write distill.teacher.out_of_fold=false."
        )
    table = pd.read_parquet(path)
    labels, title = teacher.labels, teacher.reader.title
    columns = ["predicted"] if labels.kind == "number" else [f"p_{name}" for name in labels.names]
    key_N = table["digest"] if "digest" in table else table[title].map(normalised)
    means = table.groupby(key_N, sort=False)[columns].mean()
    return dict(zip(means.index, means.to_numpy(np.float64), strict=True))


def soft_criterion(
    hard: Objective, kind: Kind, config: DistillConfig, *, classes: int, progress: Callable[[], float]
) -> Objective:
    """(1 - alpha) * `hard` of the rows that have labels + alpha * divergence from the teacher of all rows.

    Its labels (B, 2 + 2C) are a row's weight, which multiplies both parts, its targets, the teacher's outputs, and
    whether it has a label (1 or 0), as `with_teacher` rows give them.

    Args:
        hard: The loss of the labels.
        classes: C.
        progress: Share of the run that is done, for what follows a schedule.
    """

    def objective(outputs_BC: Tensor, labels_B: Tensor, scale: float) -> Tensor:
        alpha, temperature = config.alpha_at(progress()), config.temperature_at(progress())
        weight_B1, target_BC, teacher_BC, labelled_B1 = labels_B.split([1, classes, classes, 1], dim=1)
        total = outputs_BC.new_zeros((), dtype=torch.float32)
        if alpha < 1:
            # A row of weight 0 moves nothing, whatever its targets are.
            total = total + (1 - alpha) * hard(outputs_BC, torch.cat([weight_B1 * labelled_B1, target_BC], 1), scale)
        if alpha > 0:
            soft = divergence(kind, config, outputs_BC, teacher_BC, weight_B1[:, 0], temperature=temperature)
            total = total + alpha * soft * scale
        return total

    return objective


def divergence(
    kind: Kind, config: DistillConfig, outputs_BC: Tensor, teacher_BC: Tensor, weight_B: Tensor, *, temperature: float
) -> Tensor:
    """Sum over the rows of weight * the configured divergence, its factor for the temperature included.

    Several classes are as many questions, yes or no. Numbers have no temperature: theirs is the squared error.
    """
    if kind == "number":
        return squared_error(outputs_BC, teacher_BC, weight_B)
    between = scaled(config.loss, temperature=temperature, beta=config.beta, skew=config.skew)
    # Which class, or of each class whether it is there, of which no is 0.
    student_BGE, said_BGE = (
        log_probs(torch.stack([each, torch.zeros_like(each)], -1) if kind == "several" else each[:, None], temperature)
        for each in (outputs_BC, teacher_BC)
    )
    # A divergence sums over its rows; mapped over them it gives each its own, to be weighted.
    each_B: Tensor = torch.vmap(between)(student_BGE, said_BGE)
    return (each_B * weight_B).sum()


def with_teacher(rows: LabelledSet, outputs_NC: Floats, *, labelled: bool) -> LabelledSet:
    """Rows with the outputs of a teacher, and whether their own targets are labels."""
    known_N1 = np.full((len(rows), 1), float(labelled))
    return replace(rows, extra_targets_NC=np.concatenate([outputs_NC, known_N1], axis=1).astype(np.float32))


def examples(config: RunConfig, train: LabelledSet, extra: LabelledSet | None) -> Examples:
    """Training rows sampled as `classes` or `data.sources` say, and further rows, each once in an epoch."""
    first = sampled_rows(train, config)
    if extra is None:
        return first
    assert not isinstance(first, MixedLabelledRows), "distill.unlabelled beside data.sources is refused"
    if isinstance(first, LabelledSet):
        return first.concatenated(extra)
    return MixedSampling(train.concatenated(extra), first)


@dataclass(frozen=True, eq=False)
class MixedSampling(RepeatedRows):
    """Sampler of the first rows by their own rule, and of all others once each in an epoch."""

    first: ClassBalancedRows  # samples among the first rows

    def __len__(self) -> int:
        return len(self.first) + len(self.rows) - len(self.first.rows)

    def table(self, epoch: int) -> Indices:
        """The row of each sample of an epoch (M,): those of `first` come first."""
        first = self.first
        own_M = first.row_of(first.sample(np.arange(len(first)), epoch=epoch))
        row_M = np.concatenate([own_M, np.arange(len(first.rows), len(self.rows))])
        return self.numbers(row_M, seed=first.seed, epoch=epoch)

    @property
    def most_draws(self) -> int:
        """Times that an epoch samples a row of `first` at most."""
        return self.first.most_draws
