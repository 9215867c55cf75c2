"""Distillation of classifiers: the teacher is asked about each row once, before training, and gone by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, from_numpy
from transformers import PreTrainedModel

from workbench.config import RunConfig
from workbench.config.sections.distill_config import STUDENT
from workbench.data.batching import Indices, MicroBatch
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.records import RowReader
from workbench.distillation import class_distillation, student_costs, students
from workbench.distillation.class_distillation import TeacherOutputs
from workbench.distillation.feature_matching import FeatureMatching
from workbench.distillation.student_costs import Measurable
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.evaluation import classification_scores
from workbench.losses.class_losses import criterion
from workbench.models import backbones, classifier
from workbench.models.backbones import Backbone, Loader
from workbench.models.classifier import Classifier
from workbench.recipes.over import distill_control, student_start
from workbench.recipes.single.single_run import Supervise
from workbench.recipes.tasks.classify import class_run
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import Loss, TrainingSignal

if TYPE_CHECKING:
    from workbench.recipes.tasks.classify.task import ClassInspection

Scores = dict[str, Any]


def taught(config: RunConfig, base: RunConfig, source: TeacherSource, inspection: ClassInspection) -> ClassInspection:
    """Findings of `check` with the rows that only the teacher knows."""
    extra = prepare(config, base, source, inspection.data, classifier.reader_of_backbone(base))
    drawn = inspection.drawn + (0 if extra is None else len(extra))
    return replace(inspection, drawn=drawn, steps=total_steps(base, drawn))


def teach(config: RunConfig, base: RunConfig, source: TeacherSource, run: Run, callback: Callback) -> Scores:
    """Train a student of classes; returns scores before and after, and the teacher's, as in scores.json.

    Args:
        config: The distillation's.
        base: The same as a run of recipe classify, with the student's backbone.
        source: The teacher.
    """
    reader, data, _ = class_run.prepare(base)
    extra = prepare(config, base, source, data, reader)
    students.make(config, source, run.home / STUDENT, weights=True, rows=data.train, callback=callback, run=run)
    class_run.note(run, data)
    if extra is not None:
        provenance.note_data(run, {"unlabelled": extra.facts()})
    student = class_run.ClassRun(base, run, callback, reader, data)
    measured = partial(_costs, config, base, source, data, run)
    if not config.distill.asks_teacher:
        student.train()
        control = distill_control.trained(config, source, student)
        return replace(student, measured=measured).finish(distill_control.scored(control))
    teacher_outputs = class_distillation.teacher_outputs(config, source, data, extra, run, callback)
    scores = {"teacher": classification_scores.scores_of(data.labels, teacher_outputs.held_out_NC, data.held_out)}
    if data.test is not None and teacher_outputs.test_NC is not None:
        scores["teacher_test"] = classification_scores.scores_of(data.labels, teacher_outputs.test_NC, data.test)
    if not config.distill.teacher.out_of_fold:
        trained_on = partial(labelled_data.training_keys, reader=reader)
        keys = [record.key for record in data.held_out.records]
        distill_control.tell_trained_on(source, run, callback, keys, trained_on)
    distill_control.require_useful(config, source.name, scores["teacher"], student.guessed())
    distill_control.tell_guessing(source.name, scores["teacher"], student.guessed(), run, callback)
    control = distill_control.trained(config, source, student, more=len(extra or ()))
    losses = {"teacher": scores["teacher"]["loss"], "guess": student.guessed()["loss"]}
    supervise = _supervise(config, base, source, data, extra, teacher_outputs)
    student.train(student_start.telling(config, student, supervise, **losses))
    return replace(student, measured=measured).finish({**scores, **distill_control.scored(control)})


def expected(
    config: RunConfig, base: RunConfig, source: TeacherSource, student: class_run.ClassRun
) -> tuple[float, float]:
    """Held-out losses of the teacher, and of guessing."""
    rows, labels = student.data.held_out, student.data.labels
    (outputs_NC,), _ = class_distillation.outputs_of(config, source, labels, [rows])
    return classification_scores.loss(labels, outputs_NC, rows.targets_NC), student.guessed()["loss"]


def _costs(
    config: RunConfig, base: RunConfig, source: TeacherSource, data: ClassSplits, run: Run, student: Classifier
) -> dict[str, Any]:
    """What the student and those who taught it cost, as scores.json holds it."""
    held_out = data.held_out.subset(student_costs.rows_to_read(len(data.held_out)))

    def measurable(model: Classifier, rows: LabelledSet, copies: int = 1) -> Measurable:
        def read(numbers: Indices) -> Tensor:
            return model.outputs(rows.batch(numbers).to(model.backbone.device))

        return Measurable(model.model, read, student_costs.size(model.model, copies), copies=copies)

    def teachers() -> Iterator[Measurable]:
        for teacher in class_distillation.class_teachers(source, config, data.labels):
            for load, copies in teacher.models:
                model = load()
                rows = replace(teacher, reader=model.reader).rows(held_out, config)
                yield measurable(model, rows, copies)
                del model

    sizes = student_costs.sizes(base, run, source)
    return student_costs.measured(measurable(student, held_out), teachers(), held_out.lengths, sizes=sizes)


def prepare(
    config: RunConfig, base: RunConfig, source: TeacherSource, data: ClassSplits, reader: RowReader
) -> LabelledSet | None:
    """The rows without labels; refuses, before a weight is read, a teacher that could not be asked."""
    extra = class_distillation.unlabelled(config, data, reader)
    extra = extra and extra.graded(base.data.curriculum)
    sets = [data.train, *([] if extra is None else [extra])]
    if extra is not None:
        preflight.require_backbone(base, sets, classifier.task(data.labels, seed=base.seed))
    for teacher in class_distillation.class_teachers(source, config, data.labels):
        for rows in sets:
            teacher.require_columns(rows, config)
        if config.distill.teacher.out_of_fold and config.distill.asks_teacher:
            assert source.run is not None, "nobody else says anything out of fold"
            class_distillation.require_own_rows(teacher, source.run, data.train, config)
    if config.distill.match:
        class_distillation.require_one(source)
        if not reader.same_positions(source.reader(base)):
            raise ConfigError(
                f"distill.match compares layers token by token, and {source.name} has other tokens than "
                f"{base.model.id}, or pictures of another size. Take a teacher that reads rows as the student does "
                "(pictures: write its image.size), or leave distill.match out."
            )
        meant = classifier.task(data.labels, seed=base.seed)
        ends = [backbones.skeleton(model, task=meant) for model in (base.model, source.model)]
        _matching(config, base, data, *ends)
    return extra


def _supervise(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource,
    data: ClassSplits,
    extra: LabelledSet | None,
    teacher_outputs: TeacherOutputs,
) -> Supervise[Classifier]:
    """The student's training signal: labels, teacher outputs, and matched layers."""
    rows = class_distillation.with_teacher(data.train, teacher_outputs.train_NC, labelled=True)
    if extra is not None:
        assert teacher_outputs.extra_NC is not None
        extra = class_distillation.with_teacher(extra, teacher_outputs.extra_NC, labelled=False)
    examples = class_distillation.examples(base, rows, extra)
    hard = criterion(base.classes, from_numpy(data.train.targets_NC))

    def supervise(student: Classifier, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        objective = class_distillation.soft_criterion(
            hard, data.labels.kind, config.distill, classes=len(data.labels.names), progress=progress
        )
        loss, settings = student.row_loss(objective), config.distill.model_dump(mode="json")
        if not config.distill.match:
            packed = student.reads_packed(base.adapter)
            return TrainingSignal(examples, loss, settings=settings, reads_packed=packed)
        teacher = class_distillation.load_one(source, config, data.labels)
        matching = _matching(config, base, data, student.backbone, teacher.backbone)
        return TrainingSignal(examples, _matched(loss, student, teacher, matching), matching, settings=settings)

    return supervise


def planned(
    config: RunConfig, base: RunConfig, source: TeacherSource, student: class_run.ClassRun, loader: Loader
) -> Supervise[Classifier]:
    """The student's training signal as a plan sees it: nobody is asked, and all outputs are zeros."""
    data = student.data
    extra = prepare(config, base, source, data, student.reader)
    train_NC, extra_NC = (
        np.zeros((len(rows or ()), len(data.labels.names)), dtype=np.float64) for rows in (data.train, extra)
    )
    said = TeacherOutputs(train_NC, extra_NC, train_NC, None)
    return _supervise(config, base, source, data, extra, said)


def _matching(
    config: RunConfig, base: RunConfig, data: ClassSplits, student: PreTrainedModel, teacher: PreTrainedModel
) -> FeatureMatching:
    """The comparison of layers, of pictures as large as the training rows."""
    picture_13HW = data.train.batch(np.arange(1)).inputs.get("pixel_values")
    return FeatureMatching(config.distill.match, student, teacher, seed=base.seed, picture_13HW=picture_13HW)


def _matched(loss: Loss, student: Classifier, teacher: Classifier, matching: FeatureMatching) -> Loss:
    """`loss`, and how unlike the teacher's layers the student's are on the same rows."""

    def total(batch: MicroBatch, scale: float) -> Tensor:
        with torch.no_grad(), matching.teacher():
            teacher.outputs(replace(batch, inputs=student.reader.as_read_by(teacher.reader, batch.inputs)))
        with matching.student():
            task_loss = loss(batch, scale)
        return task_loss + matching.loss(batch) * scale

    return total
