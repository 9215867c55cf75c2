"""Students of embedders: the vectors that teachers give to each text, made once before training, and the loss on these
and on labels.

Legend: U texts, E numbers of a teacher's vector, D of a student's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.distill_config import STUDENT, DistillConfig
from workbench.data import mixture
from workbench.data.batching import Examples, Indices, MicroBatch, evenly_spaced
from workbench.data.embedding import pair_data, pair_records, pair_set
from workbench.data.embedding.pair_records import GivenText
from workbench.data.embedding.pair_set import PairSet, TextUnits
from workbench.data.folds.duplicates import normalised
from workbench.data.held_out_split import Splits
from workbench.data.rows import fingerprint
from workbench.distillation import embedding_teachers, student_costs, students
from workbench.distillation.student_costs import Measurable
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, DataError
from workbench.evaluation import retrieval_scores
from workbench.evaluation.run_embedder import RunEmbedder
from workbench.losses import embedding_losses
from workbench.losses.ranking_losses import leading
from workbench.models import backbones
from workbench.models.backbones import Backbone, Loader
from workbench.models.embedder import Embedder, EmbeddingLoss, GivenForm, Term
from workbench.recipes.over import distill_control
from workbench.recipes.over.student_start import ROWS, StartScores
from workbench.recipes.single.single_run import Supervise
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.tasks.embed.embed_run import EmbedRun
from workbench.runs import files, provenance, units
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

Scores = dict[str, Any]
AMONG = 512
"""Training rows among which `check` searches for others of a class."""


def taught(config: RunConfig, base: RunConfig, source: TeacherSource, inspection: Any) -> Any:
    """Findings of `check` with the texts that only the teacher knows."""
    teachers, texts = prepare(config, base, source, inspection.data)
    steps = total_steps(base, len(mixture.mixed(inspection.data.train, base)) + len(texts))
    sizes = f"Vectors of {embedding_teachers.width(teachers):,} numbers, of the student {_width(base):,}"
    projected = (
        "" if config.distill.loss == "relation" or not _projects(teachers, base) else ", by principal components"
    )
    return replace(inspection, steps=steps, notes=[f"{sizes}{projected}.", *inspection.notes])


def teach(config: RunConfig, base: RunConfig, source: TeacherSource, run: Run, callback: Callback) -> Scores:
    """Train a student that embeds texts; returns scores before and after, and the teacher's, as in scores.json.

    Args:
        config: The distillation's.
        base: The same as a run of recipe embed, with the student's backbone.
        source: The teacher.
    """
    tokenizer, data, _ = embed_run.prepare(base)
    teachers, texts = prepare(config, base, source, data)
    students.make(config, source, run.home / STUDENT, weights=True, rows=data.train, callback=callback, run=run)
    provenance.note_data(run, {**data.facts(), **_facts_of_texts(config, base, data.train, texts)})
    student = EmbedRun(base, run, callback, tokenizer, data)
    if base.embed.mine:
        student = replace(student, data=data._replace(train=embed_run.with_negatives(student)))
    measured = partial(_costs, base, source, teachers, data, run)
    if not config.distill.asks_teacher:
        student.train()
        control = distill_control.trained(config, source, student)
        return replace(student, measured=measured).finish(distill_control.scored(control))
    train = _with_texts(base, student.data.train, texts)
    named = data.named() | {"train": train}
    callback.say(
        f"Asking the teacher, {source.name}, about {sum(len(each.units.texts) for each in named.values()):,} texts ..."
    )
    told = run.ranks.agreed(
        {name: embedding_teachers.vectors(teachers, rows, base) for name, rows in named.items()}
        if run.ranks.first
        else {}
    )
    vectors = {name: torch.from_numpy(found_UE) for name, found_UE in told.items()}
    scores = {
        name: _scores(base, named[split], vectors[split], data.train, vectors["train"])
        for name, split in (("teacher", "held_out"), ("teacher_test", "test"))
        if split in named
    }
    run.note(distill={**source.facts, "teacher_loss": scores["teacher"]["loss"]})
    keys = [record.key for record in data.held_out.records]
    distill_control.tell_trained_on(
        source, run, callback, keys, lambda own: [row.key for row in pair_data.split_of_embeddings(own).train.records]
    )
    control = distill_control.trained(config, source, student, more=len(texts))
    target_UE = vectors["train"]
    if config.distill.loss != "relation" and _projects(teachers, base):
        directions_ED, kept = embedding_teachers.principal_directions(target_UE.numpy(), _width(base))
        target_UE = leading(target_UE @ torch.from_numpy(directions_ED), _width(base), normalise=base.embed.normalise)
        callback.say(
            f"The teacher's {len(directions_ED):,} numbers become {_width(base):,}: {units.percent(kept)} kept."
        )
        run.note(distill={**run.manifest["distill"], "kept": kept})
    student.train(_supervise(config, student, train, target_UE, scores["teacher"], source.name))
    return replace(student, measured=measured).finish({**scores, **distill_control.scored(control)})


def prepare(
    config: RunConfig, base: RunConfig, source: TeacherSource, data: Splits[PairSet]
) -> tuple[list[RunEmbedder], list[GivenText]]:
    """The teachers, and texts that only they know.

    Raises:
        ConfigError: They cannot be asked, or their vectors not be compared with the student's.
    """
    section, teachers, own = config.distill, embedding_teachers.find(source, config), _width(base)
    if section.loss != "relation" and section.asks_teacher:
        if (width := embedding_teachers.width(teachers)) < own:
            raise ConfigError(
                f"distill.loss={section.loss} compares vectors of one size, and those of {source.name} have {width:,} "
                f"numbers, the student's {own:,}. Write distill.loss=relation, which compares similarities."
            )
        if base.embed.sizes:
            raise ConfigError(
                f"distill.loss={section.loss} teaches whole embeddings alone, and embed.sizes asks for shorter ones. "
                "Write distill.loss=relation, which teaches each size, or leave embed.sizes out."
            )
    return teachers, _new_texts(config, data)


def _new_texts(config: RunConfig, data: Splits[PairSet]) -> list[GivenText]:
    """Texts of distill.unlabelled, each once, that no row has."""
    path = config.distill.unlabelled
    if path is None:
        return []
    known = {normalised(text) for rows in data.named().values() for row in rows.records for text in row.texts}
    given = {normalised(each.text): each for each in pair_records.read_texts(path, config.data, [])[0]}
    if not (new := [each for text, each in given.items() if text not in known]):
        raise DataError(f"distill.unlabelled: the rows have every text of {path} already. Give other texts.")
    return new


def _with_texts(base: RunConfig, train: PairSet, texts: Sequence[GivenText]) -> PairSet:
    """Training rows, followed by texts that only the teacher knows."""
    tokenizer = backbones.tokenizer(base.model)
    return train.with_texts(texts, base.embed.query_prefix, tokenizer, max_tokens=base.data.max_tokens)


def _facts_of_texts(
    config: RunConfig, base: RunConfig, train: PairSet, texts: Sequence[GivenText]
) -> dict[str, dict[str, Any]]:
    """Facts about the texts that only the teacher knows, for the manifest and the report."""
    if (path := config.distill.unlabelled) is None:
        return {}
    alone = _with_texts(base, train, texts).subset(np.arange(len(train), len(train) + len(texts)))
    return {"unlabelled": replace(alone, source=path, fingerprint=fingerprint(path, config.data)).facts()}


def _width(base: RunConfig) -> int:
    return anatomy.hidden_size(backbones.skeleton(base.model, task=HIDDEN).config)


def _projects(teachers: Sequence[RunEmbedder], base: RunConfig) -> bool:
    return embedding_teachers.width(teachers) > _width(base)


def _scores(base: RunConfig, rows: PairSet, own_UE: Tensor, gallery: PairSet, there_UE: Tensor) -> dict[str, float]:
    """Scores of teachers, by their vectors."""
    form = GivenForm(base.embed, own_UE.shape[1])
    there = there_UE[: len(gallery.units.texts)] if rows.form == "labelled" else None
    return retrieval_scores.score_vectors(form, rows, own_UE, gallery, there, batch=base.batch.size).scores


@dataclass(frozen=True)
class TaughtEmbeddings:
    """(1 - alpha) * the loss of the labels + alpha * the distance from the teacher's vectors of all texts of a batch;
    see `workbench.training.signal.GlobalLoss`."""

    labels: EmbeddingLoss
    teacher_UE: Tensor
    """Of all texts of the training rows."""
    config: DistillConfig
    progress: Callable[[], float]
    labelled: int
    """So many first rows have labels."""

    def of(self, seen: Examples, rows: Indices) -> tuple[TextUnits, Indices, Callable[[], Iterator[Term]]]:
        """Texts of the rows, and the terms of their loss."""
        texts, every, _ = self.labels.of(seen, rows)
        own = rows[rows < self.labelled]

        def terms() -> Iterator[Term]:
            alpha = self.config.alpha_at(self.progress())
            if alpha < 1 and len(own):
                _, of_labels, label_terms = self.labels.of(seen, own)
                place_U = torch.from_numpy(np.searchsorted(every, of_labels))
                share = (1 - alpha) * len(own) / len(rows)
                yield from (partial(self._of_labels, term, place_U, share) for term in label_terms())
            if alpha > 0:
                yield from self._from_teacher(self.teacher_UE[torch.from_numpy(every)], alpha)

        return texts, every, terms

    @staticmethod
    def _of_labels(term: Term, place_U: Tensor, share: float, outputs_UD: Tensor) -> Tensor:
        return term(outputs_UD[place_U.to(outputs_UD.device)]) * share

    def _from_teacher(self, teacher_UE: Tensor, alpha: float) -> Iterator[Term]:
        embedder = self.labels.embedder
        distance = embedding_losses.LOSSES[self.config.loss]
        for size in embedder.sizes:

            def term(outputs_UD: Tensor, size: int = size) -> Tensor:
                student_UD = leading(outputs_UD, size, normalise=embedder.config.normalise)
                return distance(student_UD, teacher_UE.to(outputs_UD.device)) * alpha / len(embedder.sizes)

            yield term

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Embeddings of any length."""
        return self.labels.outputs(batch)


def _supervise(
    config: RunConfig, student: EmbedRun, train: PairSet, teacher_UE: Tensor, scores: dict[str, float], name: str
) -> Supervise[Embedder]:
    def signal(live: Embedder, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        if start := files.read_json(student.run.path / "before.json").get("scores"):
            distill_control.require_useful(config, name, scores, start, than=distill_control.UNTRAINED)
        labelled = len(student.data.train)
        whole = TaughtEmbeddings(EmbeddingLoss(live), teacher_UE, config.distill, progress, labelled)
        own = student.supervise(live, backbone, progress)
        settings = config.distill.model_dump(mode="json")
        return own._replace(train=mixture.mixed(train, student.config), whole=whole, settings=settings)

    return signal


def start(config: RunConfig, base: RunConfig, source: TeacherSource, student: EmbedRun) -> StartScores:
    """Scores of the student before training and of its teachers, on a few held-out rows that search a few others."""
    data, teachers = student.data, embedding_teachers.find(source, config)
    rows, gallery = (
        each.subset(evenly_spaced(len(each), most)) for each, most in ((data.held_out, ROWS), (data.train, AMONG))
    )
    if rows.form == "labelled":
        rows, gallery = rows.with_partners(epoch=0), gallery.with_partners(epoch=0)
    backbone = student.backbone()
    model = student.assemble(backbone.model.eval(), backbone)
    own = retrieval_scores.score_embeddings(model, rows, gallery, batch=base.batch.size).scores
    vectors = (torch.from_numpy(embedding_teachers.vectors(teachers, each, base)) for each in (rows, gallery))
    theirs = _scores(base, rows, next(vectors), gallery, next(vectors))
    name = next(each for each in ("ndcg@10", "spearman") if each in own)
    among = f" among {len(gallery):,} training rows" if rows.form == "labelled" else ""
    return StartScores(name, own[name], theirs[name], len(rows), among)


def planned(
    config: RunConfig, base: RunConfig, source: TeacherSource, student: EmbedRun, loader: Loader
) -> Supervise[Embedder]:
    """The student's training signal as a plan sees it: nobody is asked, and all vectors are zeros."""
    teachers, texts = prepare(config, base, source, student.data)
    train, width = _with_texts(base, student.data.train, texts), embedding_teachers.width(teachers)
    size = width if config.distill.loss == "relation" else min(width, _width(base))
    return _supervise(config, student, train, torch.zeros(len(train.units.texts), size), {}, source.name)


def _costs(
    base: RunConfig,
    source: TeacherSource,
    teachers: Sequence[RunEmbedder],
    data: Splits[PairSet],
    run: Run,
    student: Embedder,
) -> dict[str, Any]:
    """What the student and those who taught it cost, as scores.json holds it."""
    anchors = np.unique(data.held_out.anchor_N)
    chosen = data.held_out.units.subset(anchors[student_costs.rows_to_read(len(anchors))])

    def measurable(model: Embedder, texts: TextUnits) -> Measurable:
        def read(numbers: Indices) -> Tensor:
            return model.embeddings(texts.batch(numbers).to(model.backbone.device))

        return Measurable(model.model, read, student_costs.size(model.model))

    def as_read(teacher: RunEmbedder, model: Embedder) -> TextUnits:
        prefix, own = base.embed.query_prefix, teacher.config
        texts = [own.embed.query_prefix + text[len(prefix) :] for text in chosen.texts]
        return pair_set.units(texts, model.tokenizer, max_tokens=own.data.max_tokens)

    read = (measurable(model, as_read(teacher, model)) for teacher in teachers for model in [teacher.load()])
    sizes = student_costs.sizes(base, run, source)
    return student_costs.measured(measurable(student, chosen), read, chosen.lengths, sizes=sizes)
