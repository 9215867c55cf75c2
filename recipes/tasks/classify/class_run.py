"""Classification: labelled rows in, a scored classifier and a report out.

Labels are one class, several, a number, or which of two responses is better; the backbone is an encoder or causal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor, from_numpy, nn
from transformers import PreTrainedTokenizerBase

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import ModelHead
from workbench.config.sections.sampling_config import SelectConfig
from workbench.data import leaks, mixture, named_sets
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.labelled import labelled_data
from workbench.data.labelled.class_sampling import sampled_rows
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import training_rows
from workbench.data.text import decontamination
from workbench.evaluation import classification_scores, frozen_features, simple_baseline
from workbench.evaluation.forward_passes import ModelResults, ResultStore
from workbench.evaluation.frozen_features import FrozenProbe
from workbench.losses.class_losses import criterion
from workbench.losses.label_losses import LabelTap, class_losses
from workbench.models import backbones, classifier
from workbench.models.backbones import Backbone, Loader
from workbench.models.classifier import Classifier
from workbench.recipes.single import row_difficulty
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.runs import files, provenance
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]
Choice = Callable[[RowReader, ClassSplits], ClassSplits]
"""From the data of a run to those with the training rows that the backbone keeps."""


def begin(config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> ClassRun:
    """The run with its data, for which the backbone chooses and grades rows where `config` asks for it."""
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    reader, data, _ = prepare(config, choose=partial(_chosen, config, run, callback))
    note(run, data)
    cleaned = [data.train.cleaning.sentence] if data.train.cleaning else []
    for sentence in [*cleaned, *leaks.told(data.rows.named()), *view_notes(config, reader, data)]:
        callback.say(sentence)
    data = data._replace(train=row_difficulty.probed(data.train, config, run, callback, reader))
    return ClassRun(config, run, callback, reader, data, loader=loader)


def main(config: RunConfig, run: Run, callback: Callback) -> Scores:
    """Train as `config` says; returns scores of a baseline and of what was trained, as they stand in scores.json."""
    classes = begin(config, run, callback)
    reader, data = classes.reader, classes.data
    # What the backbone knows already, in a small share of the time; nothing of it enters the training, which it follows
    # unless a clock has to know first how long it takes.
    look = partial(probe, config, run, callback, reader, data)
    limited = run.deadline.limited
    classes = replace(classes, probed=look() if limited else None)
    classes.train()
    return (classes if limited else replace(classes, probed=look())).finish()


def prepare(config: RunConfig, *, choose: Choice | None = None) -> tuple[RowReader, ClassSplits, list[str]]:
    """Reader, data and the names of the modules that get an adapter; refuses what would fail or teach nothing.

    Args:
        choose: The backbone's choice of training rows, where `data.select` asks for it; None: chance stands in.
    """
    classifier.require_known_form(config)
    reader = classifier.reader_of_backbone(config)
    if choose is not None and config.data.select.by_backbone:
        every = config.data.model_copy(update={"select": SelectConfig()})
        data = choose(reader, labelled_data.load(config.model_copy(update={"data": every}), reader))
    else:
        data = labelled_data.load(config, reader)
    classification_scores.require_metric(data.labels, held_out=data.held_out, test=data.test)
    together = classifier.augmented_together(data.train, config, reader)
    data = data._replace(train=training_rows(together, config, reader))
    train = sampled_rows(data.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(data.rows.named().values())
    modules = preflight.require_backbone(config, splits, classifier.task(data.labels, seed=config.seed))
    return reader, data, modules


def _chosen(config: RunConfig, run: Run, callback: Callback, reader: RowReader, data: ClassSplits) -> ClassSplits:
    from workbench.recipes.single import row_choice

    target = labelled_data.target_rows(config, reader, data.labels)
    labelled_data.require_room(data.train, config, data.labels)

    def begin(config: RunConfig, run: Run, callback: Callback, train: LabelledSet, held_out: LabelledSet) -> ClassRun:
        return ClassRun(config, run, callback, reader, ClassSplits(train, held_out, None, data.labels))

    def score(store: ResultStore) -> Floats:
        return row_choice.gradient_scores(data.train, target, target.of_class_NG, config, run, callback, begin, store)

    kept = row_choice.chosen(data.train, config, run, callback, score=score)
    cure = f"Keep more rows, or give {config.data.select.target} rows of that class."
    labelled_data.require_every_class(data.train, kept, data.labels, cure=cure)
    return data._replace(train=kept)


def view_notes(config: RunConfig, reader: RowReader, data: ClassSplits) -> list[str]:
    """Sentences on views at test time; refuses those that the held-out rows could not judge."""
    if not config.tta.wanted:
        return []
    from workbench.crossval import run_views  # which few runs ask for

    views, left_out = run_views.prepared(config, data.labels, data.held_out, reader)
    return [*left_out, run_views.in_words(config, [view.name for view in views])]


def note(run: Run, data: ClassSplits) -> None:
    """Note the data."""
    provenance.note_data(run, data.rows.facts())
    decontamination.write_matches(data.train.contamination, run)
    leaks.write(run, data.rows.named())


def probe(config: RunConfig, run: Run, callback: Callback, reader: RowReader, data: ClassSplits) -> FrozenProbe | None:
    """Training and held-out rows as the frozen backbone sees them, where that costs a small share of the run."""
    steps = total_steps(config, len(sampled_rows(data.train, config)))
    visits = None if steps is None else steps * config.batch.size
    look = partial(frozen_features.of_splits, config, reader, data.train, data.held_out)
    task = classifier.task(data.labels, seed=config.seed)
    return frozen_features.before_run(config, run, task, look, visits=visits, say=callback.say)


@dataclass(frozen=True)
class ClassRun(SingleRun[Classifier, LabelledSet]):
    """A run that learns the labels of rows."""

    reader: RowReader
    data: ClassSplits
    probed: FrozenProbe | None = field(default=None, kw_only=True)
    """Finds the training rows that are nearest to mistakes."""

    @property
    def rows(self) -> Mapping[str, LabelledSet]:
        return self.data.rows.named()

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase | None:
        return self.reader.tokenizer

    @property
    def task(self) -> ModelHead:
        return classifier.task(self.data.labels, seed=self.config.seed)

    def text(self, row: int) -> str:
        return "" if self.config.media else self.reader.describe(self.data.train.records[row])

    def finish(self, more: Mapping[str, Any] | None = None) -> Scores:
        """See `SingleRun`. The start is what can be said without looking at a row: a fresh head says nothing."""
        if self.run.ranks.first:
            files.write_json(self.run.path / "before.json", {"scores": self.guessed()})
        return super().finish(more)

    def guessed(self) -> Mapping[str, float]:
        """Scores of saying the same of every held-out row: the classes' shares, or the mean."""
        data = self.data
        baseline = classification_scores.baseline(data.labels, data.train.targets_NC, rows=len(data.held_out))
        return classification_scores.scores_of(data.labels, baseline, data.held_out)

    def assemble(self, model: nn.Module, backbone: Backbone) -> Classifier:
        return classifier.classification_model(model, backbone.model, self.reader, self.data.labels)

    def supervise(self, live: Classifier, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        classes, train = self.config.classes, self.data.train
        tap = LabelTap(class_losses(classes.kind))
        objective = criterion(classes, from_numpy(train.targets_NC))
        loss = live.row_loss(objective, tap, strength=self.config.regularise.r_drop)
        packed = live.reads_packed(self.config.adapter)
        return TrainingSignal(sampled_rows(train, self.config), loss, tap=tap, reads_packed=packed)

    def width(self, live: Classifier) -> int:
        return anatomy.hidden_size(live.backbone.config)

    def held_out_loss(self, live: Classifier) -> tuple[float, Mapping[str, float]]:
        rows, labels = self.data.held_out, live.labels
        outputs_NC = classification_scores.predict_outputs(live.model, live.outputs, rows)
        scores = classification_scores.loss_of_sets(labels, outputs_NC, rows)
        metric = classification_scores.metric_of(labels, outputs_NC, rows)
        return scores["loss"], named_sets.held_out_losses(scores) | metric

    def save(self, live: Classifier, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        classifier.save(live, folder, adapter=adapter)

    @property
    def sampled_rows(self) -> Examples:
        return sampled_rows(self.data.train, self.config)

    @property
    def splits(self) -> Any:
        return self.data

    def member_outputs(self, live: Classifier, batch: MicroBatch) -> Tensor:
        return live.outputs(batch)

    def member_loss(self, live: Classifier) -> Objective:
        own, classes = criterion(self.config.classes, from_numpy(self.data.train.targets_NC)), len(self.task.labels)
        columns = self.sampled_rows.batch(np.arange(1)).labels_N.shape[1]

        def loss(outputs_NC: Tensor, labels_N: Tensor, scale: float) -> Tensor:
            return own(outputs_NC[:, :classes], labels_N[:, :columns], scale)  # other members may have more of both

        return loss

    def packs(self, live: Classifier) -> bool:
        return live.reads_packed(self.config.adapter)

    def of_member(self, live: Classifier) -> Classifier:
        return replace(live, reader=self.reader, labels=self.data.labels)

    def on_held_out(self, rows: Indices) -> Self:
        return replace(self, data=self.data._replace(held_out=self.data.held_out.subset(rows)))

    def load(self) -> Classifier:
        return classifier.load(self.run.home, self.config, waiting=self.placement.waiting)

    def score(self, model: Classifier, rows: LabelledSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            return Scored(*score(self.run.home, self.config, model, rows, scoring))

    def decide_views(self, model: Classifier, scoring: ModelResults) -> Mapping[str, Any] | None:
        from workbench.crossval import run_views  # which few runs ask for

        return run_views.decide(self.config, self.run, self.callback, model, self.data.held_out, scoring)

    def predictions(
        self, model: Classifier, rows: LabelledSet, outputs: Floats, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return predictions(model, rows, outputs, labelled=True)

    def beside(self, outputs: Floats) -> dict[str, Any]:
        data, labels = self.data, self.data.labels
        if not simple_baseline.wanted(self.config, self.run):
            return {}
        values_NC, seed = labels.values(outputs), self.config.seed
        found = simple_baseline.quick(labels, data.train, data.held_out, self.reader, values_NC, seed=seed)
        return simple_baseline.told(found, self.run, self.callback.say, summary=True)

    def write_predictions(self, model: Classifier, outputs: Floats, before: Mapping[str, Any]) -> None:
        from workbench.evaluation import thumbnails  # with pandas, 0.2 s that the first step need not wait for

        super().write_predictions(model, outputs, before)
        table = predictions(model, self.data.held_out, outputs, labelled=True)
        near = None if self.probed is None else self.probed.write_neighbours(self.run.path, table)
        thumbnails.write(
            self.run.path,
            self.reader,
            self.data.held_out,
            table,
            train=self.data.train,
            model=self.placement.whole(model),
            near=near,
        )


def score(
    run: Path, config: RunConfig, model: Classifier, rows: LabelledSet, scoring: ModelResults | None = None
) -> tuple[dict[str, float], Floats]:
    """Scores of a run's classifier on labelled rows, and its outputs (N, C)."""
    outputs_NC = outputs(run, config, model, rows, scoring)
    return classification_scores.scores_of(model.labels, outputs_NC, rows), outputs_NC


def outputs(
    run: Path, config: RunConfig, model: Classifier, rows: LabelledSet, scoring: ModelResults | None = None
) -> Floats:
    """Outputs (N, C) of rows by a run's classifier, in views where the run decided so."""
    if not config.tta.wanted:
        return classification_scores.predict_outputs(model.model, model.outputs, rows, scoring=scoring)
    from workbench.crossval import run_views  # which few runs ask for

    return run_views.outputs(run, config, model, rows, scoring)


def predictions(model: Classifier, rows: LabelledSet, outputs_NC: Floats, *, labelled: bool) -> pd.DataFrame:
    """One line a row, with what the model reads written out."""
    return classification_scores.predictions_table(
        model.labels, rows, model.labels.values(outputs_NC), model.reader, labelled=labelled
    )
