"""What a student that is made of another model scores before training, beside its teacher and beside guessing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.config import RunConfig
from workbench.config.expansions.distill_expansion import makes_student
from workbench.config.sections.distill_config import STUDENT
from workbench.data.batching import evenly_spaced
from workbench.distillation import students
from workbench.distillation.teacher_sources import TeacherSource
from workbench.models.backbones import Backbone
from workbench.recipes.single.single_run import SingleRun, Supervise
from workbench.recipes.task import implementation
from workbench.runs.run_directory import Run
from workbench.training.callbacks import SILENT
from workbench.training.signal import TrainingSignal

ROWS = 64
"""Held-out rows that `check` reads."""
MARGIN = 1.05
"""Times the loss of guessing from which on a start is worse than it: a fresh head says a little at random."""


def in_words(config: RunConfig, *, student: float, teacher: float | None, guess: float, rows: int) -> list[str]:
    """Sentences on held-out losses before training; of a start that is worse than guessing, what to write instead."""
    wanted = config.distill.student
    theirs = "" if teacher is None else f"the teacher's is {teacher:.4g}, and "
    told = f"The student's loss before training is {student:.4g}, on {rows:,} held-out rows; {theirs}"
    told += f"guessing would have {guess:.4g}."
    if wanted.weights == "random" or student <= guess * (1 if config.task.tokens else MARGIN):
        return [told]
    cure = "Keep more layers, such as distill.student.layers=important-75%."
    if wanted.layers == "all" and wanted.narrower:
        cure = "Keep more of its width, such as distill.student.neurons=75%."
    elif wanted.layers == "all":
        cure = "Name a model that was trained for this, or distill.student.weights=random."
    elif not wanted.by_importance:
        cure = "Keep the layers that matter instead, as many: distill.student.layers=important-50% or important-N."
    return [told, f"The student begins worse than guessing: its layers do not read what reaches them now. {cure}"]


def checked(config: RunConfig, base: RunConfig, source: TeacherSource | None, train: Any, at: Path) -> list[str]:
    """`in_words` of a student that is made for this, and deleted after.

    Args:
        base: The student as a plain run, whose backbone is described in the folder `at`.
        train: Its training rows, which choose its layers.
    """
    assert base.task.students is not None, "refused otherwise"
    expected = getattr(importlib.import_module(base.task.students), "expected", None)
    if not makes_student(config) or expected is None:  # no loss of vectors or orders says what guessing would have
        return []
    students.make(config, source, at / STUDENT, weights=True, rows=train)
    single = implementation(base).begin(base, Run(at, None, resumed=False), SILENT)
    few = single.on_held_out(evenly_spaced(len(single.rows["held_out"]), ROWS))
    start = _loss(few)
    teacher, guess = expected(config, base, source, few)
    return in_words(config, student=start, teacher=teacher, guess=guess, rows=len(few.rows["held_out"]))


def _loss(student: SingleRun[Any, Any]) -> float:
    backbone = student.backbone()
    backbone.model.eval()
    return student.held_out_loss(student.assemble(backbone.model, backbone))[0]


def telling(
    config: RunConfig, student: SingleRun[Any, Any], supervise: Supervise[Any], *, teacher: float, guess: float
) -> Supervise[Any]:
    """`supervise`, which first says what a student begins with that is made of another model."""
    if not makes_student(config) or student.placement.cuts_weights:
        return supervise

    def signal(live: Any, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        start, _ = student.held_out_loss(live)
        rows = len(student.rows["held_out"])
        for sentence in in_words(config, student=start, teacher=teacher, guess=guess, rows=rows):
            student.callback.say(sentence)
        return supervise(live, backbone, progress)

    return signal
