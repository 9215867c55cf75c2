"""The plain run that a distillation is, but for its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from workbench.config import task_facts
from workbench.config.checks import block_checks, row_checks
from workbench.config.sections.distill_config import STUDENT, TEACHER, StudentConfig
from workbench.config.sections.run_sections import RunSections
from workbench.schema import Mistakes, explain

Run = TypeVar("Run", bound=RunSections)


def as_plain_run(config: Run) -> Run:
    """The run of its task that a distillation is, but for what teaches it.

    Raises:
        Mistakes: all that is wrong with it as such a run, and a teacher that is missing.
    """
    section = config.distill
    mistakes = []
    if reason := section.misfit(config.task):
        mistakes.append(("distill", reason))
    if section.teacher.id is None and section.peers is None and section.cache.folder is None:
        what = "name a teacher. Write a run directory, a folder or a hub id of a model, or `backbone`."
        mistakes.append(("distill.teacher.id", what))
    if section.control is True and config.budget.timed:
        why = "trains the student twice, and budget.time is for one training"
        mistakes.append(("distill.control=true", f"{why}. Write train.steps or train.epochs in place of budget.time."))
    if config.model.id == TEACHER and section.teacher.id is None:
        mistakes.append(("model.id", "`teacher` asks for the weights of distill.teacher.id, which is not there."))
    if config.model.id == TEACHER and section.teacher.url is not None:
        mistakes.append(("model.id", "`teacher` asks for weights, and a server tells none. Name a model."))
    values = {**config.model_dump(mode="json"), **config.as_task(), "distill": {}}
    values["batch"]["shared_prefix"] = False  # what a teacher reads shares nothing
    if section.match or section.on_policy.share:
        what = "distill.match looks into blocks that would not run"
        what = what if section.match else "distill.on_policy changes rows"
        if config.freeze.cache in ("memory", "disk"):
            mistakes.append(("freeze.cache", f"{what}. Write freeze.cache=off, or leave it out."))
        values["freeze"]["cache"] = "off"
    if section.on_policy.share and config.data.curriculum.by != "none":
        what = "distill.on_policy replaces answers, and with them how difficult a row is. Leave one of them out."
        mistakes.append(("data.curriculum", what))
    if reason := row_checks.curriculum_refusal(config, "a distillation"):
        mistakes.append(("data.curriculum", reason))
    if reason := row_checks.length_refusal(config, "a distillation"):
        mistakes.append(("data.length_warm_up", reason))
    mistakes += [*block_checks.regularise_with_a_teacher(config), *block_checks.thinning_with_a_teacher(config)]
    mistakes += block_checks.stacking_with_a_teacher(config)
    if config.data.augment.is_on:
        mistakes.append(("data.augment", "a teacher is asked about rows as they are. Leave it out."))
    if config.data.select.by_backbone:
        why = f"by={config.data.select.by} asks a backbone before it trains, and a distillation has two"
        mistakes.append(("data.select", f"{why}. Write {config.data.select.random_instead}."))
        values["data"]["select"] = {}  # which is judged
    if config.data.sampling.by != "all":
        mistakes.append(("data.sampling", "a distillation measures no losses of rows. Leave it out."))
    if config.data.weighs and config.task.tokens:
        why = "a divergence from a teacher counts each token once"
        mistakes.append(("data.columns.weight", f"{why}. Leave it out; of=classify weighs rows."))
    if config.data.mix.by == "learned":
        why = "compares sources by losses of rows, and a distillation measures none"
        mistakes.append(("data.mix.by=learned", f"{why}. Write data.mix.by=size or weight."))
    if config.data.sources and section.answers is not None:
        mistakes.append(("distill.answers", "are written to the rows of one file. Write data.train, or leave it out."))
    if config.data.sources and section.unlabelled is not None:
        why = "its rows would be drawn between those of data.sources, whose shares of an epoch are exact"
        mistakes.append(("distill.unlabelled", f"{why}. Leave it out, or write data.train."))
    try:
        plain_run = type(config).model_validate(values)
    except ValidationError as error:
        raise Mistakes([*mistakes, *explain(type(config), values, error)]) from None
    if mistakes:
        raise Mistakes(mistakes)
    return plain_run


def with_loss(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a distillation with the usual loss of its task, where another than forward_kl is, and none is
    written."""
    task, section = task_facts.task_of(values), values.get("distill") or {}
    usual = task.student_losses[0] if task is not None else "forward_kl"
    if usual == "forward_kl" or not isinstance(section, Mapping) or "loss" in section:
        return values
    return {**values, "distill": {**section, "loss": usual}}


def student_config(config: Run, folder: Path) -> Run:
    """`as_plain_run`; the student's backbone stands in the run directory `folder` where it is made of another one."""
    plain_run = as_plain_run(config)
    if not makes_student(config):
        return plain_run
    model = config.model.model_copy(update={"id": str((folder / STUDENT).resolve()), "revision": None})
    return plain_run.model_copy(update={"model": model})


def makes_student(config: RunSections) -> bool:
    """Whether the student's backbone is made of another one."""
    return config.model.id == TEACHER or config.distill.student != StudentConfig()


def shipped_values(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of config.yaml in the run directory `folder`, as those of the run whose adapter it ships."""
    shipped, over = dict(values), task_facts.OVER.get(str(values.get("recipe")))
    if over is None or over.adapters:
        return shipped
    section = shipped.pop("distill", None) or {}
    shipped |= {"recipe": values.get("of") or over.of, "of": None}
    student = StudentConfig.model_validate(section.get("student") or {})
    if shipped["model"]["id"] == TEACHER or student != StudentConfig():
        start, whole = folder / STUDENT, folder / "adapter"  # a student that trained whole has no other backbone
        place = whole if (whole / "config.json").is_file() and not start.is_dir() else start
        shipped["model"] = {**shipped["model"], "id": str(place.resolve()), "revision": None}
    return shipped
