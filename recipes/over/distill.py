"""Distillation: a student learns from what a teacher says of the rows, and from its layers, as well as from labels."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench import adapters, evaluation
from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.config.expansions import distill_expansion
from workbench.config.sections.distill_config import STUDENT, TEACHER, DistillConfig
from workbench.config.sections.sampling_config import SelectConfig
from workbench.data import mixture, named_sets
from workbench.data.batching import Examples
from workbench.data.held_out_split import Splits
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.distillation import (
    cache_gap,
    on_policy,
    served_teacher,
    student_costs,
    student_loss,
    students,
    teacher_cache,
    teacher_sources,
    teachers,
)
from workbench.distillation.cache_gap import CacheGap, GapProbe
from workbench.distillation.feature_matching import FeatureMatching
from workbench.distillation.student_costs import Measurable
from workbench.distillation.student_loss import Teacher, distillation_loss
from workbench.distillation.teacher_cache import BlankCache, CachedTeacher
from workbench.distillation.teacher_sources import TeacherSource
from workbench.distillation.token_alignment import AlignedTeacher, Alignment, LiveRows
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones, output_heads
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.models.picture_features import PictureFeatures
from workbench.models.picture_processor import PictureProcessor
from workbench.recipes.over import distill_answers, distill_control, distill_peers, student_start
from workbench.recipes.single.single_run import Supervise
from workbench.recipes.task import MembersAtOnce
from workbench.recipes.tasks.sft import text_run
from workbench.runs import files
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.training import packing
from workbench.training.callbacks import SILENT, Callback
from workbench.training.signal import TrainingSignal

Scores = dict[str, Any]


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Train a student as `config` says; returns scores before and after, and the teacher's, as in scores.json."""
    base = distill_expansion.student_config(config, run.home)
    source = find_teacher(config)
    if not run.resumed:
        shutil.rmtree(run.path / STUDENT, ignore_errors=True)  # of a run that failed here under another configuration
    students.make(config, source, run.home / STUDENT, weights=False, run=run)
    scores: Scores = teaching(base).teach(config, base, source, run, callback)
    if isinstance(base.adapter, Full):
        shutil.rmtree(run.path / STUDENT, ignore_errors=True)  # what was trained stands in adapter/, whole
    return scores


def teaching(config: RunConfig) -> Any:
    """The module that teaches the task of a configuration; see `TaskFacts.students`."""
    assert config.task.students is not None, "refused otherwise"
    return importlib.import_module(config.task.students)


def find_teacher(config: RunConfig) -> TeacherSource | None:
    """Where the teacher comes from; None where a server or adapters teach, or a cache says who taught."""
    section = config.distill
    if section.teacher.id is None or section.teacher.url is not None:
        return None
    source = teacher_sources.find(section.teacher, config.model)
    try:
        source.hub_config()
    except BackboneError:
        # It may be gone once it has said all that is to be learnt from it.
        folder = section.cache.folder
        if config.model.id == TEACHER or folder is None or teacher_cache.made_by(folder) != source.name:
            raise
        return None
    return source


def require_teachable(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource | None,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    data: Splits[TokenizedSet],
) -> None:
    """Refuse what would compare nonsense, before a weight is read."""
    section, hub, task = config.distill, backbones.hub_config(base.model), model_heads.of(base)
    if not section.asks_teacher and section.peers is None:
        return
    cached = section.cache.folder is not None and not teacher_cache.missing(section.cache.folder)
    if source is not None:
        teacher_sources.require_comparable(section, source, base, tokenizer, template, data.train)
        if isinstance(template, MlmEncoder):
            for each in source.each:
                _require_whole_vocabulary(each, tokenizer)
    if source is not None and not cached:
        with source.named_in_errors():
            taught_by = backbones.skeleton(source.model, task=task)
        if section.match:
            FeatureMatching(section.match, backbones.skeleton(base.model, task=task), taught_by, seed=base.seed)
    rows, reader = data.train, tokenizer  # what the teacher reads
    if section.teacher.shares is not None and source is not None:
        if source.models < 2:
            raise ConfigError("distill.teacher.shares: there is one teacher. Name several, or leave it out.")
        if isinstance(section.teacher.shares, tuple) and len(section.teacher.shares) != source.models:
            raise ConfigError(
                f"distill.teacher.shares: {len(section.teacher.shares)} numbers for {source.models} models. Write one "
                "for each."
            )
    if section.across:
        if source is None:
            raise ConfigError(
                f"distill.loss={section.loss}: the teacher's own tokens are read, too, and its folder is not there. "
                "Name it as distill.teacher.id."
            )
        alignment = _aligned(section, base, source, data, tokenizer)
        alignment.require_enough()
        rows, reader = alignment.teacher_train, source.tokenizer()
    if base.batch.packing is True and source is not None and section.cache.folder is None:
        packing.require(_no_packing(source, data.train))
    if section.on_policy.share:
        if data.train.pictured:
            raise ConfigError(
                "distill.on_policy.share: the student writes answers to texts alone, and rows here have pictures. "
                "Leave it out."
            )
        on_policy.require_causal(hub)
        on_policy.require_room(config, data.train, backbones.skeleton(base.model, task=task))
    if section.peers is not None:
        student_loss.require_peers_in_one_bank(base)
    if section.cache.folder is not None:
        known = teacher_cache.with_k(section)
        teacher_cache.require_usable(known, rows, teacher_cache.identity(known, source, reader))
    if section.teacher.url is not None and not cached:
        if hub.is_encoder_decoder:
            raise ConfigError(
                f"distill.teacher.url: {type(hub).__name__} has a decoder beside its encoder, and a server reads one "
                "text. Name a student that reads and writes in one sequence, or load the teacher here."
            )
        with served_teacher.ServedTeacher.of(section.teacher) as teacher:
            teacher.require_comparable(base.data, tokenizer, template, data.train)


def _require_whole_vocabulary(source: TeacherSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher who does not know a token that may stand where one is hidden: the mask, or any other."""
    if unknown := tokenizer.get_vocab().keys() - source.tokenizer().get_vocab().keys():
        raise ConfigError(
            f"distill.teacher.id={source.name}: its tokenizer does not know {min(unknown)!r}, which of=mlm may "
            "write where a token is hidden. Name a teacher with the student's tokenizer."
        )


def taught(config: RunConfig, base: RunConfig, source: TeacherSource | None, inspection: Any) -> Any:
    """The same findings of `check` of a student of tokens, where somebody can teach it."""
    tokenizer = backbones.tokenizer(base.model)
    template = text_run.encoder_of(base, tokenizer)
    assert not isinstance(template, TranscriptEncoder), "checks refuse recordings"
    if config.distill.answers is not None:
        distill_answers.writer(config, source)
        distill_answers.questions(base, inspection.data.train, config)
    else:
        require_teachable(config, base, source, tokenizer, template, inspection.data)
    return inspection


def teach(config: RunConfig, base: RunConfig, source: TeacherSource | None, run: Run, callback: Callback) -> Scores:
    """Train a student that predicts tokens; returns scores, and the teacher's, as they stand in scores.json.

    Args:
        config: The distillation's.
        base: The same as a run of the task, with the student's backbone.
        source: The teacher; None where a server or adapters teach, or a cache holds what was said.
    """
    tokenizer, template, data = text_run.prepare(base, run)
    assert not isinstance(template, TranscriptEncoder), "checks refuse recordings"
    own = data
    if config.distill.answers is not None:
        about = (config, base, source, run, data.train, tokenizer, template, callback)
        data, own = (data._replace(train=train) for train in distill_answers.rows(*about))
        if source is not None:
            _tell_trained_on(base, source, run, data.held_out, tokenizer, callback)
    else:
        require_teachable(config, base, source, tokenizer, template, data)
    students.make(config, source, run.home / STUDENT, weights=True, rows=data.train, callback=callback, run=run)
    student = text_run.TextRun(base, run, callback, tokenizer, template, data)
    control = distill_control.trained(config, source, replace(student, data=own))
    if config.distill.peers is not None:
        distill_peers.train(config, student)
    elif not config.distill.asks_teacher:
        student.train()
    else:
        student.train(supervise(config, base, source, run, data, tokenizer, callback))
    facts, more = run.manifest.get("distill", {}), distill_control.scored(control)
    if (loss := facts.get("teacher_loss")) is not None:
        more = {"teacher": {"loss": loss, **facts.get("teacher_losses", {})}, **more}
    return replace(student, measured=partial(_costs, config, base, source, data, tokenizer, run)).finish(more)


def _costs(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource | None,
    data: Splits[TokenizedSet],
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    student: ExportedModel,
) -> Scores:
    """What the student costs, and a teacher that stood in memory beside it, as scores.json holds it."""
    chosen, lengths = student_costs.rows_to_read(len(data.held_out)), data.held_out.lengths
    rows, collate = [data.held_out[int(number)] for number in chosen], data.held_out.collate
    backbone: Any = student.model.get_base_model() if isinstance(student.model, PeftModel) else student.model
    live = None if config.distill.cache.folder is not None else source
    alone = [teachers.TeacherModel(student.model, student.head, nullcontext)]
    measurable = partial(student_costs.of_tokens, collate=collate, writes=config.task.writes_text)
    size, own = student_costs.size(student.model), student_costs.adapter_size(student.model)

    def beside() -> Iterator[Measurable]:
        if live is None:
            return
        other = config.distill.across or config.distill.answers is not None
        for each in live.each:
            teacher = teachers.load(each, base, tokenizer, model=student.model, backbone=backbone)
            total = adapters.count(teacher.backbone).total - (own if teacher.shared else 0)
            theirs = each.tokenizer() if other else None
            read = rows if theirs is None else [student_costs.in_other_tokens(row, tokenizer, theirs) for row in rows]
            yield measurable(teacher.models, teacher.backbone, read, parameters=total)
            del teacher

    sizes = student_costs.sizes(base, run, live)
    me = measurable(alone, backbone, rows, parameters=size)
    return student_costs.measured(me, beside(), lengths[chosen], sizes=sizes)


def supervise(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource | None,
    run: Run,
    data: Splits[TokenizedSet],
    tokenizer: PreTrainedTokenizerBase,
    callback: Callback,
    loader: Loader = backbones.load,
) -> Supervise[ExportedModel]:
    """The student's training signal; a cache is made before, so that its teacher is gone by then."""
    section, alignment = config.distill, None
    rows, reader = data, tokenizer  # what the teacher reads
    if section.across:
        assert source is not None, "refused otherwise"
        alignment = _aligned(section, base, source, data, tokenizer)
        rows, reader = data._replace(train=alignment.teacher_train), source.tokenizer()
    cached = cache(config, base, source, run, rows, reader, callback) if section.cache.folder is not None else None

    def signal(student: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        model = student.model
        matching: FeatureMatching | None = None
        teacher: Teacher
        train: Examples = mixture.mixed(data.train, base)
        read: Examples = rows.train  # by the teacher
        if cached is None:
            assert source is not None
            with source.named_in_errors():
                live = teachers.load(source, base, tokenizer, model=model, backbone=backbone.model, loader=loader)
            live = live.weighed(section, data.held_out)
            if alignment is None and isinstance(data.train.processor, PictureProcessor):
                for own in live.own_backbones:  # whose batches are the student's
                    PictureFeatures(own, data.train.processor)
            for note in live.notes:
                callback.say(note)
            if section.match:
                matching = FeatureMatching(section.match, backbone.model, live.backbone, seed=base.seed)
            if alignment is None:
                _note(config, base, run, source, live, data, tokenizer, callback)
        _tell_start(config, run, len(data.held_out), tokenizer, callback)
        if section.on_policy.share:
            write = on_policy.shared(on_policy.writer(model, tokenizer, section.on_policy), run.ranks)
            stop = evaluation.stop_tokens(tokenizer, data.train)
            drawn, how = train, section.on_policy
            train = answers = on_policy.OnPolicy(data.train, write, how, seed=base.seed, stop=stop, drawn=drawn)
            read = read if alignment is not None else train
        if alignment is not None:
            assert source is not None, "refused otherwise"
            asked = LiveRows(live.models[0], rows.train, live.backbone.device) if cached is None else cached
            teacher = AlignedTeacher(asked, alignment, answers.written if section.on_policy.share else None)
            run.note(distill={**run.manifest.get("distill", {}), **source.facts, "aligned": alignment.share})
        else:
            teacher = live if cached is None else cached
        loss = distillation_loss(section, model, student.head, teacher, matching, progress)
        return TrainingSignal(
            train,
            loss,
            matching,
            known=not section.on_policy.share,
            settings=section.model_dump(mode="json"),
            reads_packed=matching is None
            and all(each.train.packs for each in (data, rows))
            and (cached is not None or _no_packing(source, read) is None),
        )

    return signal


def planned(
    config: RunConfig, base: RunConfig, source: TeacherSource | None, student: text_run.TextRun, loader: Loader
) -> Supervise[ExportedModel]:
    """The student's training signal as a plan sees it: nobody is asked, and a cache is as large as one that is made."""
    data, tokenizer = student.data, student.tokenizer
    assert not isinstance(student.template, TranscriptEncoder), "checks refuse recordings"
    require_teachable(config, base, source, tokenizer, student.template, data)
    if config.distill.cache.folder is not None:
        section = teacher_cache.with_k(config.distill)
        teacher: Teacher = BlankCache(section, len(tokenizer))
        if section.across and source is not None:
            aligned = _aligned(section, base, source, data, tokenizer)
            teacher = AlignedTeacher(BlankCache(section, len(source.tokenizer())), aligned)

        def signal(live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
            loss = distillation_loss(section, live.model, live.head, teacher, None, progress)
            return TrainingSignal(mixture.mixed(data.train, base), loss, reads_packed=data.train.packs)

        return signal
    assert source is not None, "refused otherwise"
    if config.distill.teacher.shares == "held_out":  # no row is scored
        alike = config.distill.teacher.model_copy(update={"shares": None})
        config = config.model_copy(update={"distill": config.distill.model_copy(update={"teacher": alike})})
    student.run.note(distill={"teacher": source.name})  # whom the run would score first
    return supervise(config, base, source, student.run, data, tokenizer, SILENT, loader)


def expected(
    config: RunConfig, base: RunConfig, source: TeacherSource | None, student: text_run.TextRun
) -> tuple[float | None, float]:
    """Held-out losses of a teacher in the student's tokens, if there is one, and of taking all tokens to be alike."""
    guess = math.log(len(student.tokenizer))
    if source is None or config.distill.across or config.distill.answers is not None:
        return None, guess
    with source.named_in_errors():
        live = teachers.alone(source, base, student.tokenizer).weighed(config.distill, student.data.held_out)
        return live.loss(student.data.held_out), guess


def _tell_start(config: RunConfig, run: Run, rows: int, tokenizer: PreTrainedTokenizerBase, callback: Callback) -> None:
    """Say what training starts from, once that is scored, by the first process."""
    start = files.read_json(run.path / "before.json").get("scores", {}).get("loss") if run.ranks.first else None
    if start is not None:
        teacher, guess = run.manifest.get("distill", {}).get("teacher_loss"), math.log(len(tokenizer))
        for sentence in student_start.in_words(config, student=start, teacher=teacher, guess=guess, rows=rows):
            callback.say(sentence)


def cache(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource | None,
    run: Run | None,
    data: Splits[TokenizedSet],
    tokenizer: PreTrainedTokenizerBase,
    callback: Callback,
) -> CachedTeacher:
    """Teacher distributions for the training rows, from disk; the teacher is asked where they are missing.

    Args:
        run: Is told about the teacher; None outside of a run.
    """
    section, folder = teacher_cache.with_k(config.distill), config.distill.cache.folder
    assert folder is not None
    ranks = ALONE if run is None else run.ranks
    wanted = teacher_cache.identity(section, source, tokenizer)
    lacking = ranks.agreed(teacher_cache.missing(folder))
    if lacking and section.teacher.url is not None:
        if ranks.first:
            callback.say(f"Asking {section.teacher.id} at {section.teacher.url} about every training row ...")
            with served_teacher.ServedTeacher.of(section.teacher) as teacher:
                questions = served_teacher.ServedQuestions(data.train, teacher, section, vocabulary=len(tokenizer))
                teacher_cache.write(folder, data.train, questions, wanted, callback=callback)
        ranks.wait()
        if run is not None:
            run.note(distill={"teacher": section.teacher.id, "url": section.teacher.url})
    elif lacking:
        assert source is not None, "without one an unfinished cache is refused"
        probed = ranks.first and not section.cache.sampled and not section.across
        starts = _student_logits(base, data.train, tokenizer) if probed else None
        callback.say(f"Asking the teacher, {source.name}, about every training row ...")
        with source.named_in_errors():
            live = teachers.alone(source, base, tokenizer)
        live = live.weighed(section, data.held_out)
        device = next(live.models[0].model.parameters()).device
        lost: CacheGap | None = None
        if starts is not None:
            size = len(tokenizer)
            told = cache_gap.teacher_log_probs(data.train, live, section, vocabulary=size, device=device)
            probe = GapProbe(starts, told, section)
            lost = probe.smallest(gap) if (gap := section.cache.gap) else probe.at(min(section.cache.kept, size))
            callback.say(lost.sentence)
        if section.cache.gap is not None:
            k = ranks.agreed(None if lost is None else lost.k)
            section = section.model_copy(update={"cache": section.cache.model_copy(update={"k": k})})
            wanted = teacher_cache.identity(section, source, tokenizer)
        asking = teacher_cache.LiveQuestions(data.train, live, section, len(tokenizer), 8192, device, ranks)
        facts = None if lost is None else lost.facts
        teacher_cache.write(folder, data.train, asking, wanted, callback=callback, ranks=ranks, lost=facts)
        if run is not None and not section.across:
            _note(config, base, run, source, live, data, tokenizer, callback)
    cached = CachedTeacher(folder, data.train, section, wanted)
    if run is not None:
        run.note(distill={**run.manifest.get("distill", {}), "cache": cached.facts})
    return cached


def _student_logits(base: RunConfig, train: TokenizedSet, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """What the student says at its start, of a few rows; it is gone afterwards."""
    student = backbones.load(base.model, tokenizer, task=model_heads.of(base)).model
    return cache_gap.student_logits(train, student, output_heads.find(student, student), vocabulary=len(tokenizer))


def _no_packing(source: TeacherSource | None, read: Examples) -> str | None:
    """Why a live teacher cannot read its rows packed; None where it can."""
    assert source is not None, "who teaches live is there"
    return source.no_packing(longest=int(read.lengths.max()))


def _note(
    config: RunConfig,
    base: RunConfig,
    run: Run,
    source: TeacherSource,
    live: teachers.LiveTeacher,
    data: Splits[TokenizedSet],
    tokenizer: PreTrainedTokenizerBase,
    callback: Callback,
) -> None:
    """How good the teacher is, once in a run, by its first process; one that knows less than the student is refused."""
    if not run.ranks.first or run.manifest.get("distill", {}).get("teacher") == source.name:
        return
    callback.say("Scoring the teacher ...")
    rows: TokenizedSet = data.held_out
    facts: dict[str, Any] = {**source.facts, "teacher_loss": live.loss(rows)}
    of_sets = named_sets.scored(rows, lambda own: {"loss": live.loss(rows.subset(own))})
    start = files.read_json(run.path / "before.json").get("scores")
    if start is not None:
        distill_control.require_useful(
            config, source.name, {"loss": facts["teacher_loss"]}, start, than=distill_control.UNTRAINED
        )
    run.note(distill={**facts, **({"teacher_losses": of_sets} if of_sets else {}), "shared": live.shared})

    _tell_trained_on(base, source, run, rows, tokenizer, callback)


def _tell_trained_on(
    base: RunConfig,
    source: TeacherSource,
    run: Run,
    held_out: TokenizedSet,
    tokenizer: PreTrainedTokenizerBase,
    callback: Callback,
) -> None:
    def trained_on(own: RunConfig) -> list[int]:
        # Written and cut as the student's rows are, so that equal rows have equal tokens.
        written = own.data.model_copy(update={"max_tokens": base.data.max_tokens, "select": SelectConfig()})
        template = text_run.encoder_of(base, tokenizer)
        found: list[int] = tokenized.load(written, tokenizer, template, seed=own.seed).train.digests.tolist()
        return found

    distill_control.tell_trained_on(source, run, callback, held_out.digests.tolist(), trained_on)


def _aligned(
    section: DistillConfig,
    base: RunConfig,
    source: TeacherSource,
    data: Splits[TokenizedSet],
    tokenizer: PreTrainedTokenizerBase,
) -> Alignment:
    """The student's rows beside the same in the teacher's tokens."""
    theirs = _read_by(source, base)
    return Alignment(data.train, theirs, tokenizer, source.tokenizer(), loss=section.loss)


def _read_by(source: TeacherSource, base: RunConfig) -> TokenizedSet:
    """The training rows in the teacher's tokens."""
    own = source.tokenizer()
    template = source.template(base, own)
    files = base.data.training_files
    return tokenized.together(
        {name: tokenized.read(each.train, each, own, template, limit=each.limit) for name, each in files.items()}
    )
