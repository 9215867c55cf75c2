"""Teachers of a classifier, each reading a row in its own way.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workbench.config import RunConfig
from workbench.config.sections.classes_config import Kind
from workbench.config.sections.distill_config import BACKBONE
from workbench.crossval import prediction
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import NamedColumns, RowReader
from workbench.data.text.formats import renamed
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.evaluation import row_outputs, target_scores
from workbench.models import backbones, classifier, exported, row_readers
from workbench.models.classifier import Classifier
from workbench.runs import run_directory
from workbench.training import preflight

_HEADS = ("ForSequenceClassification", "ForImageClassification")


@dataclass(frozen=True)
class ClassTeacher:
    """One teacher: how it reads a row, and what it says of it."""

    name: str
    """As the configuration names it."""
    labels: Labels
    """Classes, or numbers, of its outputs."""
    config: RunConfig
    """Its classes, data.columns and data.max_tokens decide how the teacher reads a row."""
    reader: RowReader
    predict: Callable[[LabelledSet], Floats]
    """Outputs (N, C) of rows as it reads them; its weights are in memory meanwhile, and no longer."""

    def rows(self, labelled: LabelledSet, student: RunConfig) -> LabelledSet:
        """The rows as this teacher reads them, without their labels; raises what `require_columns` does."""
        columns = self.require_columns(labelled, student)
        read = [NamedColumns(record.row, each) for record, each in zip(labelled.records, columns, strict=True)]
        source = self.reader.reread(labelled.source, labelled.fingerprint, read)
        return labelled_data.encode(source, self.reader, self.labels)

    def require_columns(self, labelled: LabelledSet, student: RunConfig) -> list[Mapping[str, Any]]:
        """The columns of rows by the teacher's names; raises ConfigError where one is nowhere among them."""
        columns = [_columns(record, self.config, student) for record in labelled.records]
        for name in self.reader.columns:
            if not any(name in each for each in columns):
                raise ConfigError(
                    f"distill.teacher.id={self.name} reads the column `{name}`, which {labelled.source} has not. Give "
                    "the rows that column, or take a teacher that reads what is there."
                )
        return columns

    def described(self, rows: LabelledSet) -> list[str]:
        """The content of each row, for a person."""
        return [self.reader.describe(record) for record in rows.records]


def class_teachers(source: TeacherSource, student: RunConfig, labels: Labels) -> list[ClassTeacher]:
    """Those who teach together, none of them loaded.

    Args:
        student: The distillation's configuration.
        labels: The student's.

    Raises:
        ConfigError: they say nothing of classes, or of other ones.
    """
    if student.distill.teacher.id == BACKBONE:
        raise ConfigError(
            "distill.teacher.id=backbone: a backbone whose head starts at random knows nothing of classes. Write a run "
            "of recipe classify or crossval, or a model that has a classification head."
        )
    recipe = None if source.config is None else source.config.recipe
    if student.distill.teacher.out_of_fold and recipe != "crossval":
        raise ConfigError(
            f"distill.teacher.out_of_fold: {source.name} is no cross-validation, so that nothing was said out of fold. "
            "Name a run of recipe crossval, or leave it out."
        )
    teachers = [_crossval(source)] if recipe == "crossval" else _classifiers(source, student, labels)
    for teacher in teachers:
        _require_same(teacher, labels)
    return teachers


def require_one(source: TeacherSource) -> None:
    """Raise ConfigError where no single model teaches, whose layers a student's could be compared with."""
    if (source.config is not None and source.config.recipe == "crossval") or len(source.adapters) > 1:
        raise ConfigError(
            f"distill.match compares the layers of one model, and {source.name} is several. Name one run of recipe "
            "classify, or leave distill.match out."
        )


def alone(source: TeacherSource, student: RunConfig, labels: Labels) -> Classifier:
    """The one model that teaches, loaded."""
    if source.run is None:
        return _stock(source, _stock_labels(source, labels.kind), student)
    return classifier.load(source.run, _config(source, source.run))


def _classifiers(source: TeacherSource, student: RunConfig, labels: Labels) -> list[ClassTeacher]:
    if source.run is None:
        meant = _stock_labels(source, labels.kind)
        limit = preflight.longest_sequence(source.hub_config()) or student.data.max_tokens
        data = student.data.model_copy(update={"max_tokens": min(limit, student.data.max_tokens)})
        config = student.model_copy(update={"data": data})
        return [
            ClassTeacher(
                source.name, meant, config, source.reader(config), _predictor(partial(_stock, source, meant, config))
            )
        ]
    teachers = []
    for run in [folder.parent for folder in source.adapters] or [source.run]:
        config = _config(source, run)
        if config.recipe != "classify":
            raise ConfigError(
                f"distill.teacher.id={run}: a run of recipe {config.recipe} says nothing of classes. Write one of "
                "recipe classify or crossval, or a model that has a classification head."
            )
        exported.require_saved(run, config, "classes.json", row_readers.file(config))
        meant, reader = classifier.read_labels(run / "adapter"), row_readers.of_run(run, config)
        teachers.append(
            ClassTeacher(str(run), meant, config, reader, _predictor(partial(classifier.load, run, config)))
        )
    return teachers


def _crossval(source: TeacherSource) -> ClassTeacher:
    assert source.run is not None
    run, config = source.run, _config(source, source.run)
    context = prediction.fold_context(run, config)

    def predict(rows: LabelledSet) -> Floats:
        return target_scores.outputs(context.labels, prediction.decided(run, context, rows))

    return ClassTeacher(source.name, context.labels, config, context.reader, predict)


def _config(source: TeacherSource, run: Path) -> RunConfig:
    """Configuration of the run at `run`, its backbone stored as distill.teacher asks."""
    own = run == source.run and source.config is not None
    run_config = source.config if own else run_directory.shipped_config(run, source.trusted)
    assert run_config is not None
    return run_config.model_copy(update={"model": source.model})


def _predictor(load: Callable[[], Classifier]) -> Callable[[LabelledSet], Floats]:
    def predict(rows: LabelledSet) -> Floats:
        model = load()
        return row_outputs.outputs(model.model, model.outputs, rows)

    return predict


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


def _require_same(teacher: ClassTeacher, labels: Labels) -> None:
    """Raise ConfigError where teacher and student predict different classes or numbers."""
    name = f"distill.teacher.id={teacher.name}"
    if teacher.labels.kind != labels.kind:
        raise ConfigError(
            f"{name}: its labels are of kind {teacher.labels.kind}, the student's of kind {labels.kind}. Write "
            f"classes.kind={teacher.labels.kind}, with such labels, or take another teacher."
        )
    lacking, more = (
        [each for each in one.names if each not in other.names]
        for one, other in ((labels, teacher.labels), (teacher.labels, labels))
    )
    if lacking or more:
        differences = [
            *([f"it says nothing of {_listed(lacking)}"] if lacking else []),
            *([f"no training row has {_listed(more)}, which it knows"] if more else []),
        ]
        raise ConfigError(
            f"{name}: {', and '.join(differences)}. Teacher and student need the same classes, in any "
            "order: name them alike in data.train, give rows of each, or take a teacher that was trained on these."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:8]) + (", ..." if len(names) > 8 else "")


def _columns(record: LabelledRecord, theirs: RunConfig, student: RunConfig) -> Mapping[str, Any]:
    """The columns of a row by the teacher's names: as its own data.columns says, else as the student's does."""
    columns = record.row.columns
    named = {wanted: columns[column] for wanted, column in theirs.data.columns.items() if column in columns}
    return {**columns, **renamed(columns, student.data.columns), **named}
