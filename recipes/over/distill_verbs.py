"""`check`, `distill-cache` and `distill-student` of recipe distill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from workbench.config import RunConfig
from workbench.config.expansions import distill_expansion
from workbench.config.sections.distill_config import STUDENT, Distance
from workbench.data.text import tokenized
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.distillation import distillkit, students, teacher_cache
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import distill, student_start
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import implementation
from workbench.recipes.tasks.sft.text_run import encoder_of
from workbench.training.callbacks import SILENT, Callback


def with_student(config: RunConfig, inspect: Callable[[RunConfig], Any]) -> Any:
    """Result of `inspect` for the plain run that a distillation is.

    Its frozen backbone is not looked through. A mistake in the teacher is found without reading weights; then a student
    that is yet to be made is made, and scored on a few rows.
    """
    source = distill.find_teacher(config)
    with TemporaryDirectory() as aside:
        base = distill_expansion.student_config(config, Path(aside))
        students.make(config, source, Path(aside) / STUDENT, weights=False)
        unprobed = base.evaluate.model_copy(update={"probe": 0})
        inspection = inspect(base.model_copy(update={"evaluate": unprobed}))
        inspection = distill.teaching(base).taught(config, base, source, inspection)
        start = student_start.checked(config, base, source, inspection.data.train, Path(aside))
    return replace(inspection, notes=[_sentence(config), *start, *inspection.notes])


def distill_cache(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    read: Path | str | None = None,
    write: Path | str | None = None,
    callback: Callback = SILENT,
) -> dict[str, Any]:
    """Compute a teacher's outputs for all training rows, once; they are stored in distill.cache.folder.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe of distill.
        overrides: `key=value` words on top of a file or name.
        read: A folder of DistillKit's logits, which stand in place of a teacher.
        write: A new folder for the cache as DistillKit reads it.
        callback: Shows progress.

    Returns:
        Facts about the cache: its `folder`, how many `tokens` it has, `bytes_per_token`, the `gap_share` of the live
        divergence that it loses, and more.

    Raises:
        ConfigError: The recipe is no distillation of text, names no folder, or its teacher cannot teach the student.

    Examples:
        >>> import workbench
        >>> words = ["distill.teacher.id=runs/short", "distill.cache.folder=said", "data.held_out=0.2"]
        >>> words += ["data.train=starter/arithmetic_start.jsonl"]
        >>> facts = workbench.distill_cache("distill/quickstart", words)
        >>> facts["folder"], facts["tokens"] > 80
        ('said', True)
    """
    config = load(recipe, overrides)
    section = config.distill
    if config.over is None or config.over.adapters or not config.task.writes_text:
        raise ConfigError("distill-cache is for recipe=distill with of=sft. Name such a recipe.")
    if section.cache.folder is None:
        raise ConfigError("distill.cache.folder: where to? Write distill.cache.folder=FOLDER.")
    config = streamed_rows.local(config, say=callback.say)
    if (read or write) and (section.cache.sampled or section.across or section.temperature != 1 or section.cache.gap):
        raise ConfigError(
            "distill-cache: DistillKit keeps the likeliest tokens of the student's vocabulary at temperature 1. Leave "
            "distill.cache.sampled and gap, distill.temperature and loss out."
        )
    if read is not None and section.teacher.id is not None:
        raise ConfigError("distill-cache --read: the folder says who taught. Write distill.teacher.id=null.")
    if write is not None and Path(write).exists():
        raise ConfigError(f"--write {write} exists already. Name another folder, or delete it first.")
    source = distill.find_teacher(config)
    with TemporaryDirectory() as aside:
        base = distill_expansion.student_config(config, Path(aside))
        students.make(config, source, Path(aside) / STUDENT, weights=False)
        tokenizer = backbones.tokenizer(base.model)
        template = encoder_of(base, tokenizer)
        assert not isinstance(template, TranscriptEncoder), "checks refuse recordings"
        data = tokenized.load(base.data, tokenizer, template, seed=base.seed)
        if read is not None:
            distillkit.read(Path(read), data.train, section, tokenizer, callback)
        distill.require_teachable(config, base, source, tokenizer, template, data)
        if teacher_cache.missing(section.cache.folder) and not section.cache.sampled and section.teacher.url is None:
            # Its weights, by whose start it is told what the cache loses.
            students.make(config, source, Path(aside) / STUDENT, weights=True, rows=data.train, callback=callback)
        facts = distill.cache(config, base, source, None, data, tokenizer, callback).facts
        if write is not None:
            wanted = teacher_cache.identity(section, source, tokenizer)
            distillkit.write(Path(write), section.cache.folder, data.train, wanted)
        return facts


def distill_student(
    recipe: Recipe, overrides: Sequence[str] = (), *, out: Path | str, callback: Callback = SILENT
) -> None:
    """Write the model that a student starts as, untrained, for any recipe to train: `model.id=OUT`.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe of distill.
        overrides: `key=value` words on top of a file or name.
        out: A new folder, for a stock model and its tokenizer.
        callback: Shows progress.

    Raises:
        ConfigError: The recipe makes no student of another model.

    Examples:
        >>> import workbench
        >>> words = ["distill.teacher.id=starter", "distill.student.layers=first-2"]
        >>> workbench.distill_student("distill/quickstart", words, out="student")
        >>> workbench.check("sft/quickstart", ["model.id=student", "data.limit=40"]).steps is None
        False
    """
    config, folder = load(recipe, overrides), Path(out)
    if config.over is None or config.over.adapters or not distill_expansion.makes_student(config):
        raise ConfigError(
            "distill-student writes a student that recipe=distill makes of another model. Write model.id=teacher or "
            "distill.student.layers=important-50%; any other student is model.id itself."
        )
    if folder.exists():
        raise ConfigError(f"--out {folder} exists already. Name another folder, or delete it first.")
    config = streamed_rows.local(config, say=callback.say)
    source = distill.find_teacher(config)
    with TemporaryDirectory() as aside:
        base = distill_expansion.student_config(config, Path(aside))
        students.make(config, source, Path(aside) / STUDENT, weights=False)
        unprobed = base.evaluate.model_copy(update={"probe": 0})
        plain = base.model_copy(update={"evaluate": unprobed})
        train = implementation(plain).inspect(plain).data.train
    students.make(config, source, folder, weights=True, rows=train, callback=callback)


def _sentence(config: RunConfig) -> str:
    section = config.distill
    if section.peers is not None:
        return f"{section.peers} adapters teach each other."
    teacher = section.teacher.id if section.teacher.id is not None else section.cache.folder
    named = ", ".join(teacher) if isinstance(teacher, tuple) else str(teacher)
    if section.teacher.url is not None:
        named = f"{named} at {section.teacher.url}"
    if (answers := section.answers) is not None:
        learnt = "the best is learnt" if answers.to == "best" else "all different ones are learnt, in more steps"
        count = "1 answer" if answers.n == 1 else f"{answers.n} answers"
        return f"Teacher: {named}. It writes {count} to each training prompt; {learnt}."
    heat = "" if section.loss in get_args(Distance) else f", temperature {section.temperature}"
    return f"Teacher: {named}. Loss: {section.loss}, alpha {section.alpha}{heat}."
