"""Students of tags: what teachers say of each word, asked once before training, and the loss on that and on the tags.

Legend: W words of a row, P supervised tokens of all training rows, N those of a micro-batch, C tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.sections.distill_config import STUDENT
from workbench.data import tagged_rows
from workbench.data.batching import Floats, Indices, MicroBatch
from workbench.data.tagged_rows import IGNORED, EncodedTags, TagEncoder, TaggedRow, TagSet
from workbench.distillation import student_costs, students
from workbench.distillation.class_distillation import divergence
from workbench.distillation.student_costs import Measurable
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, DataError
from workbench.models import backbones, exported
from workbench.models.backbones import Backbone, Loader
from workbench.recipes.over import distill_control, student_start
from workbench.recipes.single.single_run import Scores, Supervise
from workbench.recipes.tasks.tag import TagConfig
from workbench.recipes.tasks.tag import task as tagging
from workbench.recipes.tasks.tag.task import TaggedSet, Tagger, TagRun, TagSplits
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal


class TagTeacher(NamedTuple):
    """One of those who teach together."""

    tags: tuple[str, ...]
    load: Callable[[], Tagger]
    max_tokens: int
    """Longest row that it reads."""
    as_read: Callable[[TaggedSet, PreTrainedTokenizerBase], Sequence[TaggedSet]] = lambda rows, tokenizer: [rows]
    """The rows as it reads them, several times where it decided to."""

    def rows(self, tagger: Tagger, rows: Sequence[TaggedRow]) -> TaggedSet:
        """Rows as this teacher, loaded, reads them."""
        encoder = TagEncoder(tagger.tokenizer, None, max_tokens=self.max_tokens)
        return TaggedSet(tuple(rows), tuple(encoder.encode(rows)), "", "")


class WordsSaid(NamedTuple):
    """What the teachers say of the words of a row."""

    p_WC: Floats
    """The mean of their probabilities, in the student's order of tags."""
    known_W: npt.NDArray[np.bool_]
    """Whether all of them have read the word."""

    def of_tokens(self, encoded: EncodedTags) -> WordsSaid:
        """The same of the supervised tokens of a row as the student reads it."""
        positions, word = np.unique(encoded.position_W, return_index=True)
        word_S = word[positions >= 0]
        return WordsSaid(self.p_WC[word_S], self.known_W[word_S])


def taught(config: RunConfig, base: RunConfig, source: TeacherSource, inspection: Any) -> Any:
    """Findings of `check` with the rows that only the teacher knows."""
    extra = prepare(config, base, source, inspection.data)
    return replace(inspection, steps=total_steps(base, len(inspection.data.train) + (len(extra) if extra else 0)))


def teach(config: RunConfig, base: RunConfig, source: TeacherSource, run: Run, callback: Callback) -> Scores:
    """Train a student of tags; returns scores before and after, and the teacher's, as in scores.json.

    Args:
        config: The distillation's.
        base: The same as a run of recipe tag, with the student's backbone.
        source: The teacher.
    """
    tokenizer, data, _ = tagging.prepare(base)
    extra, teachers = prepare(config, base, source, data), find(source, config, data.tags)
    students.make(config, source, run.home / STUDENT, weights=True, rows=data.train, callback=callback, run=run)
    sets = data.named() | ({} if extra is None else {"unlabelled": extra})
    provenance.note_data(run, data.splits.facts() | ({} if extra is None else {"unlabelled": extra.facts()}))
    student = TagRun(base, run, callback, tokenizer, data)
    measured = partial(_costs, base, source, teachers, data, run)
    if not config.distill.asks_teacher:
        student.train()
        control = distill_control.trained(config, source, student)
        return replace(student, measured=measured).finish(distill_control.scored(control))
    callback.say(f"Asking the teacher, {source.name}, about {sum(map(len, sets.values())):,} rows ...")
    said = run.ranks.agreed(asked(teachers, data.tags, sets) if run.ranks.first else {})
    scores = {
        name: _scores(data.tags, sets[split], said[split], strict=base.section(TagConfig).strict)
        for name, split in (("teacher", "held_out"), ("teacher_test", "test"))
        if split in sets
    }
    distill_control.require_useful(config, source.name, scores["teacher"], student.guessed())
    distill_control.tell_guessing(source.name, scores["teacher"], student.guessed(), run, callback)
    run.note(distill={**source.facts, "teacher_loss": scores["teacher"]["loss"]})
    keys = [row.words for row in data.splits.held_out.rows]
    distill_control.tell_trained_on(
        source, run, callback, keys, lambda own: [row.words for row in tagging.prepare(own)[1].train.rows]
    )
    control = distill_control.trained(config, source, student, more=len(extra or ()))
    losses = {"teacher": scores["teacher"]["loss"], "guess": student.guessed()["loss"]}
    student.train(student_start.telling(config, student, supervise(config, student, extra, said), **losses))
    return replace(student, measured=measured).finish({**scores, **distill_control.scored(control)})


def expected(config: RunConfig, base: RunConfig, source: TeacherSource, student: TagRun) -> tuple[float, float]:
    """Held-out losses of the teachers together, and of guessing."""
    tags, rows = student.data.tags, student.data.held_out
    said = asked(find(source, config, tags), tags, {"held_out": rows})["held_out"]
    scores = _scores(tags, rows, said, strict=base.section(TagConfig).strict)
    return scores["loss"], student.guessed()["loss"]


def _costs(
    base: RunConfig, source: TeacherSource, teachers: Sequence[TagTeacher], data: TagSplits, run: Run, student: Tagger
) -> dict[str, Any]:
    """What the student and those who taught it cost, as scores.json holds it."""
    held_out = data.splits.held_out.subset(student_costs.rows_to_read(len(data.splits.held_out)))

    def measurable(tagger: Tagger, rows: TaggedSet) -> Measurable:
        def read(numbers: Indices) -> Tensor:
            return tagger.outputs(rows.batch(numbers).to(tagger.backbone.device))

        return Measurable(tagger.model, read, student_costs.size(tagger.model))

    read = (
        measurable(tagger, teacher.rows(tagger, held_out.rows)) for teacher in teachers for tagger in [teacher.load()]
    )
    sizes = student_costs.sizes(base, run, source)
    return student_costs.measured(measurable(student, held_out), read, held_out.lengths, sizes=sizes)


def prepare(config: RunConfig, base: RunConfig, source: TeacherSource, data: TagSplits) -> TaggedSet | None:
    """The rows of distill.unlabelled that are neither held out nor tested on; refuses teachers that cannot be asked."""
    section = config.distill
    find(source, config, data.tags)
    if section.unlabelled is None:
        return None
    read = tagged_rows.read(section.unlabelled, config.data, labelled=False)
    known = {row.words for name, rows in data.named().items() if name != "train" for row in rows.rows}
    new = tuple(row for row in read.rows if row.words not in known)
    if not new:
        raise DataError(
            f"distill.unlabelled: every row of {section.unlabelled} is also held out or tested on. Give other rows."
        )
    encoder = TagEncoder(backbones.tokenizer(base.model), None, max_tokens=base.data.max_tokens)
    return TaggedSet(new, tuple(encoder.encode(new)), read.name, read.fingerprint, read.skipped)


def find(source: TeacherSource, config: RunConfig, tags: TagSet) -> list[TagTeacher]:
    """Those who teach together, none of them loaded.

    Raises:
        ConfigError: They say nothing of tags, or of other ones.
    """
    name, teachers = f"distill.teacher.id={source.name}", list[TagTeacher]()
    if source.parts:
        return [teacher for each in source.parts for teacher in find(each, config, tags)]
    for run in [folder.parent for folder in source.adapters] or ([] if source.run is None else [source.run]):
        own = source.config_of(run)
        if own.task.name != config.task.name or own.over is not None:
            raise ConfigError(f"{name}: a run of recipe {own.recipe} says nothing of tags. Write one of recipe tag.")
        exported.require_saved(run, own, tagged_rows.TAGS)
        names = TagSet.read(run / "adapter").names
        teachers.append(
            TagTeacher(names, partial(tagging.load, run, own), own.data.max_tokens, partial(tagging.as_read, run, own))
        )
    if not teachers:
        hub: Any = source.hub_config()
        if not any(each.endswith("ForTokenClassification") for each in hub.architectures or ()):
            raise ConfigError(
                f"{name} has no head that tags tokens. Write a run of recipe tag, or a model that has one."
            )
        names = tuple(str(hub.id2label[number]) for number in range(hub.num_labels))
        teachers.append(TagTeacher(names, partial(_stock, source, names), config.data.max_tokens))
    for teacher in teachers:
        if other := sorted(set(teacher.tags) ^ set(tags.names)):
            raise ConfigError(
                f"{name}: teacher and student need the same tags, and {', '.join(other[:8])} "
                f"{'is' if len(other) == 1 else 'are'} known to one of them alone. Name them alike in data.train, give "
                "rows of each, or take a teacher that was trained on these."
            )
    return teachers


def _stock(source: TeacherSource, names: tuple[str, ...]) -> Tagger:
    """A model that no run trained."""
    tokenizer, tags = source.tokenizer(), TagSet(names, entities=False)
    with source.named_in_errors():
        model = backbones.load(source.model, tokenizer, task=tagging.head_of(tags, seed=0)).model
    return Tagger(model.eval(), model, tokenizer, tags)


def asked(teachers: Sequence[TagTeacher], tags: TagSet, sets: Mapping[str, TaggedSet]) -> dict[str, list[WordsSaid]]:
    """What teachers say of each row; one after another is in memory."""
    rows = [row for each in sets.values() for row in each.rows]
    every = list[list[WordsSaid]]()
    for teacher in teachers:
        tagger, order = teacher.load(), [teacher.tags.index(name) for name in tags.names]
        read = teacher.rows(tagger, rows)
        pairs = zip(read.encoded, tagger.merged(teacher.as_read(read, tagger.tokenizer)), strict=True)
        every.append(
            [
                WordsSaid(tagged_rows.word_probabilities(encoded, p_SC[:, order], tags), encoded.position_W >= 0)
                for encoded, p_SC in pairs
            ]
        )
    together = iter(
        WordsSaid(np.mean([each.p_WC for each in row], axis=0), np.all([each.known_W for each in row], axis=0))
        for row in zip(*every, strict=True)
    )
    return {name: [next(together) for _ in range(len(each))] for name, each in sets.items()}


def _scores(tags: TagSet, rows: TaggedSet, said: Sequence[WordsSaid], *, strict: bool) -> dict[str, float]:
    """Scores of the teachers; a word that they have not read is as likely to have any tag."""
    of_tokens = [each.of_tokens(encoded) for each, encoded in zip(said, rows.encoded, strict=True)]
    p_RSC = [np.where(each.known_W[:, None], each.p_WC, 1 / len(tags.names)) for each in of_tokens]
    return tagging.scores_of(tags, rows, [each.p_WC for each in said], p_RSC, strict=strict)


def supervise(
    config: RunConfig, student: TagRun, extra: TaggedSet | None, said: Mapping[str, Sequence[WordsSaid]]
) -> Supervise[Tagger]:
    """(1 - alpha) * cross-entropy of the tags + alpha * divergence from the teachers, of words that they have read.

    Each label of a training row is a number of a table, which has its tag and what the teachers say.
    """
    section, train, device = config.distill, student.data.train, backbones.device()
    rows, told = (*train.encoded, *(extra.encoded if extra else ())), (*said["train"], *said.get("unlabelled", ()))
    of_tokens = [each.of_tokens(encoded) for each, encoded in zip(told, rows, strict=True)]
    label_P = [each.labels if len(each.labels) else np.full(int(each.supervised.sum()), IGNORED) for each in rows]
    starts = np.cumsum([0, *map(len, label_P)])
    numbered = tuple(
        replace(each, labels=np.arange(start, end))
        for each, start, end in zip(rows, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    )
    examples = replace(train, rows=(*train.rows, *(extra.rows if extra else ())), encoded=numbered)
    tags_P = torch.from_numpy(np.concatenate(label_P)).to(device)
    known_P = torch.from_numpy(np.concatenate([each.known_W for each in of_tokens])).float().to(device)
    p_PC = np.maximum(np.concatenate([each.p_WC for each in of_tokens]), 1e-30)
    teacher_PC = torch.from_numpy(np.log(p_PC)).float().to(device)

    def signal(live: Tagger, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        def loss(batch: MicroBatch, scale: float) -> Tensor:
            logits_NC, at_N = live.outputs(batch), batch.labels_N
            alpha, temperature = section.alpha_at(progress()), section.temperature_at(progress())
            hard = nn.functional.cross_entropy(logits_NC, tags_P[at_N], ignore_index=IGNORED, reduction="sum")
            soft = divergence("one", section, logits_NC, teacher_PC[at_N], known_P[at_N], temperature=temperature)
            return ((1 - alpha) * hard + alpha * soft) * scale

        return TrainingSignal(
            examples, loss, settings=section.model_dump(mode="json"), reads_packed=student.packs(live)
        )

    return signal


def planned(
    config: RunConfig, base: RunConfig, source: TeacherSource, student: TagRun, loader: Loader
) -> Supervise[Tagger]:
    """The student's training signal as a plan sees it: nobody is asked, and all tags are equally likely."""
    extra, count = prepare(config, base, source, student.data), len(student.data.tags.names)
    sets = {"train": student.data.splits.train, **({} if extra is None else {"unlabelled": extra})}
    said = {
        name: [
            WordsSaid(np.full((len(row.words), count), 1 / count), np.ones(len(row.words), np.bool_))
            for row in rows.rows
        ]
        for name, rows in sets.items()
    }
    return supervise(config, student, extra, said)
