"""Students of rerankers: a cross-encoder's scores of all candidates, asked once before training, and the loss on these
and on labels.

Legend: B rows, C candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from workbench.config import RunConfig
from workbench.config.sections.distill_config import STUDENT
from workbench.data import mixture
from workbench.data.batching import Indices, MicroBatch, evenly_spaced, steps_per_epoch
from workbench.data.embedding import rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts
from workbench.data.held_out_split import Splits
from workbench.distillation import ranking_teachers, student_costs, students
from workbench.distillation.ranking_teachers import PairScores, RankingTeacher, TaughtCandidates
from workbench.distillation.student_costs import Measurable
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.evaluation import retrieval_scores
from workbench.losses import ranking_losses
from workbench.losses.divergences import log_probs, scaled
from workbench.models.backbones import Backbone, Loader
from workbench.models.reranker import Reranker
from workbench.recipes.over import distill_control
from workbench.recipes.over.student_start import ROWS, StartScores
from workbench.recipes.single.single_run import Supervise
from workbench.recipes.tasks.rerank import task as reranking
from workbench.recipes.tasks.rerank.task import RerankRun
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

Scores = dict[str, Any]
NOTHING: tuple[Scores, PairScores] = {}, PairScores(np.empty(0, np.int64), np.empty(0))
"""What a process that asks nobody knows before the first one tells it."""


def taught(config: RunConfig, base: RunConfig, source: TeacherSource, inspection: Any) -> Any:
    """The same findings of `check`, where somebody can teach the rows."""
    _prepare(config, base, source, inspection.data.train.form)
    return inspection


def teach(config: RunConfig, base: RunConfig, source: TeacherSource, run: Run, callback: Callback) -> Scores:
    """Train a student that ranks passages; returns scores before and after, and the teacher's, as in scores.json.

    Args:
        config: The distillation's.
        base: The same as a run of recipe rerank, with the student's backbone.
        source: The teacher.
    """
    _, data, _ = reranking.prepare(base)
    teacher = _prepare(config, base, source, data.train.pairs.form)
    students.make(config, source, run.home / STUDENT, weights=True, rows=data.train, callback=callback, run=run)
    student = reranking.TASK.begin(base, run, callback)
    measured = partial(_costs, base, source, teacher, data, run)
    if not config.distill.asks_teacher:
        student.train()
        control = distill_control.trained(config, source, student)
        return replace(student, measured=measured).finish(distill_control.scored(control))
    callback.say(f"Asking the teacher, {source.name}, about the candidates of {len(data.train):,} rows ...")
    scores, said = run.ranks.agreed(_asked(base, teacher, student.data) if run.ranks.first else NOTHING)
    run.note(distill={**source.facts, "teacher_loss": scores["teacher"]["loss"]})
    keys = [record.key for record in data.held_out.pairs.records]
    distill_control.tell_trained_on(
        source, run, callback, keys, lambda own: [row.key for row in rerank_candidates.split(own).train.records]
    )
    control = distill_control.trained(config, source, student)
    student.train(_supervise(config, student, said, scores["teacher"], source.name))
    return replace(student, measured=measured).finish({**scores, **distill_control.scored(control)})


def _prepare(config: RunConfig, base: RunConfig, source: TeacherSource, form: str) -> RankingTeacher:
    """The teacher; refuses, before a weight is read, one that could not be asked, and a loss that would be nothing."""
    section = config.distill
    if section.unlabelled is not None:
        raise ConfigError("distill.unlabelled: of=rerank learns from queries with their passages. Leave it out.")
    if form == "scored" and section.loss != "mse":
        raise ConfigError(
            f"distill.loss={section.loss} compares the candidates of a query, and rows with scores have one each. "
            "Write distill.loss=mse."
        )
    if base.budget.timed and section.asks_teacher:
        raise ConfigError("budget.time: the teacher is asked about every pass before training. Write train.epochs.")
    return ranking_teachers.find(source, config)


def _asked(base: RunConfig, teacher: RankingTeacher, data: Splits[CandidateSet]) -> tuple[Scores, PairScores]:
    """The teacher's scores of held-out and test rows, and what it says of all training rows of all passes."""
    model = teacher.load()
    drawn = len(mixture.mixed(data.train, base))
    steps = total_steps(base, drawn)
    assert steps is not None, "a budget alone is refused"
    read = partial(ranking_teachers.as_read, teacher=teacher, model=model, student=base.rerank)
    found = {
        name: retrieval_scores.score_reranker(model, read(rows), candidates=base.rerank.candidates).scores
        for name, rows in (("teacher", data.held_out), ("teacher_test", data.test))
        if rows is not None
    }
    passes = math.ceil(steps / steps_per_epoch(drawn, base.batch.size))
    return found, ranking_teachers.asked(model, data.train, read(data.train), passes)


def _supervise(
    config: RunConfig, student: RerankRun, said: PairScores, scores: dict[str, float], name: str
) -> Supervise[Reranker]:
    """(1 - alpha) * the loss of the labels + alpha * the distance of a row's scores from the teacher's."""
    section = config.distill
    rows = student.data.train
    taught = TaughtCandidates(**{each.name: getattr(rows, each.name) for each in fields(rows)}, said=said)

    def distance(score_BC: Tensor, teacher_BC: Tensor, temperature: float) -> Tensor:
        if section.loss == "margin_mse":
            return ranking_losses.margin_mse(score_BC, teacher_BC)
        if section.loss == "mse":
            return ranking_losses.squared_difference(score_BC, teacher_BC) / rows.each
        between = scaled(section.loss, temperature=temperature, beta=section.beta, skew=section.skew)
        return between(log_probs(score_BC, temperature), log_probs(teacher_BC, temperature))

    def signal(live: Reranker, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        if start := files.read_json(student.run.path / "before.json").get("scores"):
            distill_control.require_useful(config, name, scores, start, than=distill_control.UNTRAINED)

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            alpha, temperature = section.alpha_at(progress()), section.temperature_at(progress())
            score_BC, teacher_BC = (each.unflatten(0, (-1, rows.each)) for each in (live.scores(batch), batch.labels_N))
            total = score_BC.new_zeros(())
            if alpha < 1:
                numbers = batch.rows_B if batch.rows_B is not None else np.zeros(len(score_BC), dtype=np.int64)
                total = total + (1 - alpha) * live.loss_of(score_BC, rows, numbers)
            if alpha > 0:
                total = total + alpha * distance(score_BC, teacher_BC, temperature)
            loss_sum: Tensor = total * scale
            return loss_sum

        return TrainingSignal(mixture.mixed(taught, student.config), loss, settings=section.model_dump(mode="json"))

    return signal


def start(config: RunConfig, base: RunConfig, source: TeacherSource, student: RerankRun) -> StartScores:
    """Scores of the student before training and of its teacher, on a few held-out rows."""
    held_out, teacher = student.data.held_out, ranking_teachers.find(source, config)
    rows, backbone = held_out.subset(evenly_spaced(len(held_out), ROWS)), student.backbone()
    model = student.assemble(backbone.model.eval(), backbone)
    taught = teacher.load()
    read = ranking_teachers.as_read(rows, teacher, taught, base.rerank)
    own, theirs = (
        retrieval_scores.score_reranker(each, of, candidates=base.rerank.candidates).scores
        for each, of in ((model, rows), (taught, read))
    )
    name = next(each for each in ("ndcg@10", "spearman") if each in own)
    return StartScores(name, own[name], theirs[name], len(rows))


def planned(
    config: RunConfig, base: RunConfig, source: TeacherSource, student: RerankRun, loader: Loader
) -> Supervise[Reranker]:
    """The student's training signal as a plan sees it: nobody is asked."""
    _prepare(config, base, source, student.data.train.pairs.form)
    return _supervise(config, student, PairScores(np.zeros(1, np.int64), np.zeros(1)), {}, source.name)


def _costs(
    base: RunConfig,
    source: TeacherSource,
    teacher: RankingTeacher,
    data: Splits[CandidateSet],
    run: Run,
    student: Reranker,
) -> dict[str, Any]:
    """What the student and its teacher cost, as scores.json holds it."""
    chosen = student_costs.rows_to_read(len(data.held_out.all_pairs))

    def measurable(model: Reranker, pairs: PairedTexts) -> Measurable:
        def read(numbers: Indices) -> Tensor:
            return model.scores(pairs.batch(numbers).to(model.classifier.backbone.device))

        return Measurable(model.model, read, student_costs.size(model.model))

    def teachers() -> Iterator[Measurable]:
        model = teacher.load()
        rows = ranking_teachers.as_read(data.held_out, teacher, model, base.rerank)
        yield measurable(model, rows.all_pairs.take(chosen))

    own = data.held_out.all_pairs.take(chosen)
    sizes = student_costs.sizes(base, run, source)
    return student_costs.measured(measurable(student, own), teachers(), own.lengths, sizes=sizes)
