"""`check`, `evaluate` and `predict` of recipe crossval; the verbs' own files hand over to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from workbench.adapters.banks import bank
from workbench.config import RunConfig
from workbench.crossval import prediction, suspects
from workbench.crossval.fold_adapters import FoldContext, fold_adapters
from workbench.data import leaks
from workbench.data.labelled import labelled_data
from workbench.data.labelled.fold_data import FoldData
from workbench.errors import ConfigError
from workbench.evaluation import classification_scores, frozen_features, run_embedder
from workbench.evaluation.serving.served_models import ServedModel
from workbench.recipes.over.crossval_labelled import prepare, require_outer
from workbench.recipes.task import PredictionTable, ScoringOptions
from workbench.recipes.tasks.classify import picture_checks, served_classes
from workbench.recipes.tasks.classify.picture_checks import PictureFindings
from workbench.recipes.tasks.classify.task import ClassTask, chosen_examples, notes
from workbench.training.optim.schedules import total_steps

PLAIN = ScoringOptions()


@dataclass(frozen=True)
class CrossvalInspection:
    """Findings of `check`, for a run that is not refused."""

    config: RunConfig
    data: FoldData
    examples: list[tuple[str, str, str]]
    """Place, what the model reads, and the label of some rows."""
    targets: list[str]
    """Modules that get an adapter; empty for full fine-tuning."""
    steps: int | None
    """Optimizer steps of each adapter; None where a budget alone ends its training."""
    members: int
    """Adapters that train together."""
    notes: list[str]
    pictures: PictureFindings | None = None
    """None where rows are texts."""
    blocks: int | None = None
    """Transformer blocks of the backbone, where layers freeze."""
    probe: str = ""
    """Scores of the frozen backbone alone, in a sentence."""


def inspect(config: RunConfig) -> CrossvalInspection:
    """Everything that `run` does before it trains."""
    reader, data, _, targets, about_stages = prepare(config)
    if config.folds.nested is not None:
        require_outer(config)
    look = partial(frozen_features.of_folds, config, reader, data.rows, data.folds.fold_RN[0])
    members = fold_adapters(data.folds, seeds=config.folds.seeds)
    rows, split = max(len(data.training(each.split)) for each in members), members[0].split
    pictures = picture_checks.inspect(config, reader, data.rows, data.labels)
    return CrossvalInspection(
        config=config,
        data=data,
        examples=chosen_examples(data.rows, reader),
        targets=targets,
        steps=total_steps(config, rows),
        members=len(members),
        notes=[
            *_sources(data.rows.rows_by_source),
            *leaks.told({} if data.test is None else {"test": data.test}),
            *notes(data.rows, (data.test, data.unlabelled), data.labels, config, pictures),
            *about_stages,
            *([config.folds.nested_cost(steps=config.train.steps is not None)] if config.folds.nested else ()),
            *([suspects.sentence(data.folds, seeds=config.folds.seeds)] if config.data.drop_suspects else ()),
        ],
        pictures=pictures,
        probe=frozen_features.in_check(
            config, data.labels, data.training(split), data.rows.subset(split.validation_N), reader, look
        ),
    )


def _sources(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence on the sources of the rows, where there are several."""
    if counts:
        yield f"Rows of {', '.join(f'{name} {count:,}' for name, count in counts.items())}: one set, dealt into folds."


def evaluate(run: Path, config: RunConfig, turn: ScoringOptions = PLAIN) -> dict[str, float]:
    """Scores of the ensemble on data.test."""
    context = _context(run, config, turn)
    rows = labelled_data.scored(config, context.reader, context.labels)
    classification_scores.require_metric(context.labels, test=rows)
    return classification_scores.value_scores_of(context.labels, prediction.decided(run, context, rows), rows)


def predict(run: Path, source: str, config: RunConfig, turn: ScoringOptions = PLAIN) -> PredictionTable:
    """The ensemble's predictions for every row of a file, whose labels are ignored."""
    context = _context(run, config, turn)
    rows = labelled_data.encode(context.reader.read(source, labelled=False), context.reader, context.labels)
    values_NC = prediction.decided(run, context, rows)
    table = classification_scores.predictions_table(context.labels, rows, values_NC, context.reader, labelled=False)
    return PredictionTable(table, rows.skipped, [record.row for record in rows.records])


def _context(run: Path, config: RunConfig, turn: ScoringOptions) -> FoldContext:
    store = None if turn.scoring is None else turn.scoring.store
    return replace(prediction.fold_context(run, config), scored=store, trust=turn.trust)


class FoldedClassTask(ClassTask):
    """Labels of rows, each of which is out of fold once; what is shipped is decided by their scores."""

    def inspect(self, config: RunConfig) -> CrossvalInspection:  # type: ignore[override]
        return inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        return evaluate(run, config, turn)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        return predict(run, source, config, turn)

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        served_classes.require_texts(run, config)
        if prediction.is_blend(run):
            raise ConfigError(
                f"{run}: a blend is not served, as its parts are of several backbones. Teach one adapter what it says: "
                f"`workbench run distill/ensemble distill.teacher.id={run}`, or serve a part."
            )
        context = replace(prediction.fold_context(run, config), banks={})
        if bank.refusal(config.adapter) is None:
            context.saved(prediction.adapter_folders(run))
        decided = partial(prediction.decided, run, context)
        return served_classes.served(config, name, created, context.reader, context.labels, decided, queue=queue)

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        embedders = run_embedder.files(config)
        return {"embedder": embedders} if embedders else {}


TASK = FoldedClassTask()
