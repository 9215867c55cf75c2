"""The control of a distillation: the same student on labels alone, so that a run can say what its teacher was worth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from workbench.config import ModelConfig, RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import ModelHead
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, WorkbenchError
from workbench.models import backbones
from workbench.recipes.over import member_results
from workbench.recipes.single.single_run import SingleRun
from workbench.report.teacher_worth import CONTROL
from workbench.runs import files, process_memory
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps

STEP, ASKED = 6, 2
"""Operations for each parameter and token of a training step, and of a forward pass (Kaplan et al. 2020, 2.1)."""


def wanted(config: RunConfig, source: TeacherSource | None, model: ModelConfig, head: ModelHead) -> bool:
    """Whether the student trains on labels alone, too: as `distill.control` says, or where that takes less than a third
    of the run. `model`, `head`: the student's."""
    section = config.distill
    if section.control != "auto":
        return section.control
    if section.answers is not None:
        return not config.budget.timed  # answers are written token by token
    if source is None or not section.asks_teacher or config.budget.timed:
        return False
    if section.on_policy.share:
        return True  # answers are written token by token
    student, teacher = _operations(source, model, head)
    passes = teacher / ((config.train.epochs or 1) if _asks_once(config) else 1)
    return 3 * student < student + passes


def _asks_once(config: RunConfig) -> bool:
    """Whether the teacher is asked about each row before training."""
    return not config.task.tokens or config.distill.cache.folder is not None


def share_of_step(config: RunConfig, source: TeacherSource | None, model: ModelConfig, head: ModelHead) -> float:
    """What a step of the control takes beside one of the student with its teacher; 0 where there is no control."""
    if not wanted(config, source, model, head):
        return 0.0
    if source is None or config.distill.answers is not None or _asks_once(config):
        return 1.0  # who taught is gone by then
    student, teacher = _operations(source, model, head)
    return student / (student + teacher)


def _operations(source: TeacherSource, model: ModelConfig, head: ModelHead) -> tuple[int, int]:
    """For each token: to train the student, and to ask all who teach it."""
    student = backbones.skeleton(model, task=head).num_parameters()
    teachers = (
        backbones.skeleton(each.model, task=head).num_parameters() * max(1, len(each.adapters)) for each in source.each
    )
    return STEP * student, ASKED * sum(teachers)


def trained(
    config: RunConfig, source: TeacherSource | None, student: SingleRun[Any, Any], *, more: int = 0
) -> SingleRun[Any, Any] | None:
    """The control, trained; None where none is wanted. It is a run directory of its own, `control`, which trains before
    the student, goes on where it stopped, and is not scored yet: what scoring imports would take memory beside the
    student's training.

    Args:
        more: Rows without labels of each epoch of the student, which the control spends on rows with labels.
    """
    if not wanted(config, source, student.config.model, student.task):
        return None
    run, plain = student.run.child(CONTROL), student.config
    if more:
        steps = total_steps(plain, len(student.rows["train"]) + more)
        plain = plain.model_copy(update={"train": plain.train.model_copy(update={"steps": steps})})
    if run.ranks.first:
        member_results.opened(run, Trial(CONTROL, {}, plain, 0))
    run.ranks.wait()
    control = student.as_member(plain, run)
    if not run.ranks.agreed(run.adapter.exists()):
        own = "labels alone" if config.distill.answers is None else "the data's own answers"
        control.callback.say(f"Control: the same student on {own}, in control/.")
        control.train()
    process_memory.settled()  # what the control took and freed is given back before the student trains
    return control


def scored(control: SingleRun[Any, Any] | None) -> dict[str, Any]:
    """Scores of the control, to stand beside the student's; none of no control."""
    if control is None:
        return {}
    member_results.finish(control)
    scores = files.read_json(control.run.home / "scores.json")
    return {name: scores[split] for name, split in ((CONTROL, "after"), (f"{CONTROL}_test", "test")) if split in scores}


UNTRAINED = "the student before training"
SCORES = ("accuracy", "exact_match", "ndcg@10", "spearman")
"""Those that tell whether a teacher knows anything, where a task has them."""


SURELY = 1.05
"""Least factor between its loss and that of guessing for a teacher to be refused; one that only guesses is below it."""


def require_useful(
    config: RunConfig, name: str, teacher: Mapping[str, float], start: Mapping[str, float], *, than: str = "guessing"
) -> None:
    """Refuse a teacher that knows less of the held-out rows than what the student starts from, or surely than guessing.

    Args:
        name: Of the teacher.
        teacher: Its scores.
        start: Those of the untrained student or, with classes, of saying the same of every row.
        than: Names what has these.
    """
    score = next((each for each in SCORES if each in teacher and each in start), "loss")
    told = [score]
    if score == "loss":
        worse = teacher[score] > 1.001 * start[score]
    else:
        worse = teacher.get(f"{score}_high", 1) < start[score]
        if (
            not worse
            and teacher.get(f"{score}_low", 1) <= start[score]
            and teacher.get("loss", 0) > SURELY * start.get("loss", 0)
        ):
            worse, told = True, [score, "loss"]  # right as often as chance has it, and surer of what is wrong
    if worse and config.distill.control is not True:
        theirs, others = (
            " and ".join(f"{name.replace('_', ' ')} {scores[name]:.4g}" for name in told) for scores in (teacher, start)
        )
        raise ConfigError(
            f"distill.teacher.id={name}: it scores worse on held-out rows than {than}: {theirs}, and {than} has "
            f"{others}. Name a teacher that has learnt this task, or write distill.control=true, which measures what "
            "it is worth."
        )


GUESSES = 0.98
"""Factor of the loss of guessing that a teacher which is right by chance has to be below, or it is told."""


def tell_guessing(
    name: str, teacher: Mapping[str, float], guess: Mapping[str, float], run: Run, callback: Callback
) -> None:
    """Say, and note for the page, where a teacher of classes or tags knows no more of held-out rows than guessing."""
    by_chance = teacher.get("accuracy_low", 1.0) <= guess.get("accuracy", 0.0)  # both have one, but for numbers
    if not by_chance or teacher["loss"] <= GUESSES * guess["loss"]:
        return
    theirs, others = (f"accuracy {each['accuracy']:.3g} and loss {each['loss']:.3g}" for each in (teacher, guess))
    sentence = (
        f"The teacher, {name}, knows no more of the held-out rows than guessing: {theirs}, and guessing {others}. "
        "What it teaches may be noise; distill.control=true measures what it is worth."
    )
    if run.ranks.first:
        run.note(told=[*dict.fromkeys([*(run.manifest.get("told") or ()), sentence])])  # once, of a resumed run, too
    callback.say(sentence)


def tell_trained_on(
    source: TeacherSource,
    run: Run,
    callback: Callback,
    held_out: Sequence[Hashable],
    trained_on: Callable[[RunConfig], Iterable[Hashable]],
) -> None:
    """Say, and note, how many held-out rows the teacher was trained on, as far as its own rows can still be read.

    Args:
        held_out: What the content of each held-out row is known by.
        trained_on: The same of the rows that a run with this configuration trains on.
    """
    known: set[Hashable] = set()
    for each in source.each if run.ranks.first else ():
        for folder in each.runs:
            try:
                known.update(trained_on(each.config_of(folder)))
            except WorkbenchError:  # its rows have gone since it trained
                continue
    if count := sum(key in known for key in held_out):
        run.note(distill={**run.manifest.get("distill", {}), "trained_on": {"rows": count, "of": len(held_out)}})
        callback.say(
            f"The teacher was trained on {count:,} of the {len(held_out):,} held-out rows, so that its scores are too "
            "good. Hold out what it held out, by its data.train, data.held_out and seed, or rows that are new to both."
        )
