"""What a student that is made of another model scores before training, beside its teacher and beside guessing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


_LOST = "its layers do not read what reaches them now."


class StartScores(NamedTuple):
    """A score of the student before training, and of its teacher, on a few held-out rows."""

    name: str
    """As scores.json has it; more is better."""
    student: float
    teacher: float
    rows: int
    among: str = ""
    """Words on what the rows search, where that is not all there is."""


def in_words(config: RunConfig, *, student: float, teacher: float | None, guess: float, rows: int) -> list[str]:
    """Sentences on held-out losses before training; of a start that is worse than guessing, what to write instead."""
    theirs = "" if teacher is None else f"the teacher's is {teacher:.4g}, and "
    told = f"The student's loss before training is {student:.4g}, on {rows:,} held-out rows; {theirs}"
    told += f"guessing would have {guess:.4g}."
    limit = guess * (1 if config.task.tokens else MARGIN)
    if config.distill.student.weights == "random" or student <= limit:
        return [told]
    return [told, f"The student begins worse than guessing: {_LOST} {_cure(config)}"]


def of_scores(config: RunConfig, start: StartScores) -> list[str]:
    """The same of a score of which more is better, where no loss says what guessing would have."""
    score = "nDCG at 10" if start.name == "ndcg@10" else start.name
    told = f"The student's {score} before training is {start.student:.4g}, on {start.rows:,} held-out rows"
    told += f"{start.among}; the teacher's is {start.teacher:.4g}."
    if config.distill.student.weights == "random" or start.student >= start.teacher / 2:
        return [told]
    return [told, f"The student begins with less than half of its teacher's: {_LOST} {_cure(config)}"]


def _cure(config: RunConfig) -> str:
    """What to write in place of a student that begins badly."""
    wanted = config.distill.student
    if wanted.layers == "all" and wanted.narrower:
        return "Keep more of its width, such as distill.student.neurons=75%."
    if wanted.layers == "all":
        return "Name a model that was trained for this, or distill.student.weights=random."
    if not wanted.by_importance:
        return "Keep the layers that matter instead, as many: distill.student.layers=important-50% or important-N."
    return "Keep more layers, such as distill.student.layers=important-75%."


def checked(config: RunConfig, base: RunConfig, source: TeacherSource | None, train: Any, at: Path) -> list[str]:
    """`in_words` of a student that is made for this, and deleted after.

    Args:
        base: The student as a plain run, whose backbone is described in the folder `at`.
        train: Its training rows, which choose its layers.
    """
    assert base.task.students is not None, "refused otherwise"
    if not makes_student(config):
        return []
    module = importlib.import_module(base.task.students)
    students.make(config, source, at / STUDENT, weights=True, rows=train)
    single = implementation(base).begin(base, Run(at, None, resumed=False), SILENT)
    if (
        expected := getattr(module, "expected", None)
    ) is None:  # no loss of vectors or orders says what guessing would have
        return of_scores(config, module.start(config, base, source, single))
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
