"""The task `classify` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from scipy import special
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import stock
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.data import leaks, mixture
from workbench.data.batching import Indices, MicroBatch, evenly_spaced
from workbench.data.embedding.rerank_candidates import PairedTexts
from workbench.data.folds import stratified_folds
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.images.picture_reader import PictureReader, PictureRows
from workbench.data.labelled import class_sampling, fold_data, labelled_data, labels, text_reader
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.labels import Floats, Labels, alike
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.data.sound.sound_reader import SoundRows
from workbench.data.text.quality import cleaning
from workbench.data.text.quality.rules import RowText
from workbench.data.text.quality.survey import SourceRows
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import classification_scores, frozen_features, run_embedder, simple_baseline
from workbench.models import backbones, classifier, exported
from workbench.models.backbones import Loader
from workbench.models.classifier import Classifier
from workbench.models.reranker import Reranker
from workbench.models.reward_model import RewardModel
from workbench.recipes.inspection import unread
from workbench.recipes.task import ROWS, DryTask, PredictionTable, RowFile, Scores, ScoringOptions, Task
from workbench.recipes.tasks.classify import class_run
from workbench.recipes.tasks.classify.class_run import ClassRun, predictions, prepare, score
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training import capacity, preflight
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps

if TYPE_CHECKING:
    from workbench.evaluation.serving.served_models import ServedModel
    from workbench.recipes.tasks.classify.picture_checks import PictureFindings


S = TypeVar("S", RewardModel, Reranker)
R = TypeVar("R", TokenizedSet, PairedTexts)
SHOWN = 3
"""Rows that are rendered in full."""


@dataclass(frozen=True)
class ClassInspection:
    """Findings of `check`, for a run that is not refused."""

    config: RunConfig
    data: ClassSplits
    examples: list[tuple[str, str, str]]
    """Place, what the model reads, and the label of some rows."""
    targets: list[str]
    """Modules that get an adapter; empty for full fine-tuning."""
    drawn: int
    """Rows in one epoch, repeated and left out ones considered."""
    steps: int | None
    """None where a budget alone ends the run."""
    notes: list[str]
    pictures: PictureFindings | None = None
    """None where rows are texts."""
    blocks: int | None = None
    """Transformer blocks of the backbone, where layers freeze."""
    probe: str = ""
    """Scores of the frozen backbone alone, in a sentence."""


@dataclass(frozen=True)
class Gap:
    """How far two classifiers are apart on the same rows."""

    rows: int
    kl: float | None
    """Mean KL divergence of the classes, nats a row; None for numbers."""
    same: float
    """Share of rows with the same prediction; for numbers, within a hundredth of the labels' spread."""

    @property
    def sentence(self) -> str:
        """For a person."""
        if self.kl is None:
            return (
                f"On {self.rows:,} held-out rows: same number, to a hundredth of the labels' spread, {self.same:.2%}."
            )
        return f"On {self.rows:,} held-out rows: KL divergence {self.kl:.2e} nats a row, same class {self.same:.2%}."


def notes(
    rows: LabelledSet,
    others: Sequence[LabelledSet | None],
    labels: Labels,
    config: RunConfig,
    pictures: PictureFindings | None,
) -> list[str]:
    """Sentences of `check` on training rows: what was left out, what is probably wrong, how unequal classes are."""
    same = None if labels.kind == "number" else alike(labels.names)
    one = "Labels `{}` and `{}` differ only by case or spaces: if they mean one class, write them the same way."
    return [
        *unread(rows, *others),
        *(rows.contamination.sentences if rows.contamination else ()),
        *([rows.cleaning.sentence] if rows.cleaning else ()),
        *cleaning.outlook(map(labelled_data.row_text, () if config.media else rows.records)),
        *([one.format(*same)] if same else ()),
        *filter(None, [stratified_folds.several_in_one(labels.names).strip() if labels.kind == "one" else ""]),
        *unequal(rows, labels, config),
        *text_reader.augmentation_in_words(rows, one_class=labels.kind == "one"),
        *(pictures.notes if pictures else ()),
    ]


def unequal(rows: LabelledSet, labels: Labels, config: RunConfig) -> list[str]:
    """Sentence on a class that is much rarer than the others, and on what answers that."""
    classes = config.classes
    chosen = classes.weights != "none" or classes.sampling not in ("auto", "none") or classes.logit_adjustment > 0
    if labels.kind == "number" or chosen or (rarest := class_sampling.rare_class(rows)) is None:
        return []
    count_C = (rows.targets_NC > 0.5).sum(0)
    cure = "classes.gamma=2" if labels.kind == "several" else "classes.sampling=even"
    answer = (
        "Every class is drawn equally often; classes.sampling=none draws each row once."
        if class_sampling.balances(config)
        else f"One so rare may never be predicted; {cure} answers that."
    )
    return [
        f"Classes are unequal: {labels.names[rarest]} has {count_C[rarest]:,} of {len(rows):,} rows, a class on "
        f"average {count_C.mean():,.0f}. {answer}"
    ]


def chosen_examples(rows: LabelledSet, reader: RowReader) -> list[tuple[str, str, str]]:
    """Place, what the model reads, and the label of rows from all over the file."""
    from workbench.recipes.tasks.classify import picture_checks  # with matplotlib, which no training needs

    chosen = evenly_spaced(len(rows), SHOWN).tolist()
    return [(rows.place(i), reader.rendered(rows.inputs, i), picture_checks.in_words(rows.labels[i])) for i in chosen]


def stock_outputs(model: nn.Module, rows: LabelledSet) -> Floats:
    """A stock model's own outputs for rows; texts are padded with the token of its config.json.

    Args:
        model: Of transformers, or called and configured like one.
    """
    config: Any = model.config
    if isinstance(rows.inputs, PictureRows | SoundRows):
        dtype = getattr(model, "dtype", None)  # in which stock models for sound want their features

        def seen(batch: MicroBatch) -> Tensor:
            floats = {name: each.to(dtype) for name, each in batch.inputs.items() if each.is_floating_point()}
            logits: Tensor = model(**{**batch.inputs, **floats}).logits
            return logits

        return classification_scores.predict_outputs(model, seen, rows)
    pad = config.get_text_config().pad_token_id

    def predict(batch: MicroBatch) -> Tensor:
        ids_BL, mask_BL = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        logits: Tensor = model(input_ids=ids_BL.masked_fill(mask_BL == 0, pad), attention_mask=mask_BL).logits
        return logits

    return classification_scores.predict_outputs(model, predict, rows)


def gap(labels: Labels, first_NC: Floats, second_NC: Floats) -> Gap:
    """The distance of the second outputs from the first."""
    rows = len(first_NC)
    if labels.kind == "number":
        return Gap(rows, None, float((np.abs(first_NC - second_NC) < 0.01).mean()))
    one, other = (labels.predicted(labels.values(outputs_NC)) for outputs_NC in (first_NC, second_NC))
    same = [mine == theirs for mine, theirs in zip(one, other, strict=True)]
    if labels.kind == "several":
        pairs = [(special.log_expit(sign * first_NC), special.log_expit(sign * second_NC)) for sign in (1, -1)]
    else:
        pairs = [(special.log_softmax(first_NC, axis=1), special.log_softmax(second_NC, axis=1))]
    divergence_N: Floats = sum((np.exp(one) * (one - other)).sum(1) for one, other in pairs)
    return Gap(rows, max(0.0, float(divergence_N.mean())), float(np.mean(same)))


def save_merged(model: PreTrainedModel, unmerged: Classifier, folder: Path) -> None:
    """A stock model with its tokenizer, and what its outputs mean."""
    stock.save(model, folder)
    classifier.save_reader(unmerged, folder)
    files.write_json(folder / "classes.json", unmerged.labels.facts)


@dataclass(frozen=True)
class ClassReference:
    """Outputs for labelled rows."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase | None
    unmerged: Classifier
    rows: LabelledSet
    wanted_NC: Floats

    @property
    def task(self) -> ModelHead:
        return classifier.task(self.unmerged.labels, seed=self.config.seed)

    @property
    def note(self) -> str:
        labels = self.unmerged.labels
        if labels.kind != "number":
            return ""
        return f" Its output times {labels.scale:g} plus {labels.mean:g} is the number."

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        classifier.classification_model(model, model, self.unmerged.reader, self.unmerged.labels)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        save_merged(model, self.unmerged, folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        found_NC = stock_outputs(model, self.rows)
        return gap(self.unmerged.labels, self.wanted_NC, found_NC)


@dataclass(frozen=True)
class NumberReference(Generic[S, R]):
    """One number for each row, of a model with a head of one output."""

    config: RunConfig
    unmerged: S
    rows: R
    wanted_N1: Floats
    note: str = ""

    @property
    def task(self) -> ModelHead:
        return model_heads.of(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        own = self.unmerged.classifier
        classifier.classification_model(model, model, own.reader, own.labels)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        save_merged(model, self.unmerged.classifier, folder)

    def _gap(self, found_N: Floats) -> Gap:
        return gap(self.unmerged.classifier.labels, self.wanted_N1, found_N[:, None])


def _clusters(
    config: RunConfig, reader: RowReader, named: Sequence[RowFile], sources: Sequence[RecordSource]
) -> Sequence[DuplicateClusters | None]:
    """Duplicates among the rows of all training sources, and of each other one; among pictures of all sources."""
    count = len(sources)
    if isinstance(reader, TextReader):
        if not config.crossvalidates:
            return [None] * count
        count = sum(each.trains for each in named)  # which stand first
    groups = [sources[:count], *([each] for each in sources[count:])]
    return [clusters for group in groups for clusters in _compared(reader, group)]


def _compared(reader: RowReader, group: Sequence[RecordSource]) -> list[DuplicateClusters]:
    """Duplicates among the rows of several sources, of each source."""
    together = reader.duplicates(group)
    source_N = np.repeat(np.arange(len(group)), [len(each.records) for each in group])
    return [together.subset(source_N == number) for number in range(len(group))]


def _records(
    config: RunConfig, reader: RowReader, named: RowFile, source: RecordSource, clusters: DuplicateClusters | None
) -> SourceRows:
    numeric = config.classes.kind == "number"
    is_text = isinstance(reader, TextReader)
    return SourceRows(
        named.title,
        source.name,
        [labelled_data.row_text(record) if is_text else RowText(record.place, "") for record in source.records],
        _lengths(reader, source) if isinstance(reader, TextReader) else None,
        named.trains,
        labels=None if numeric else [tuple(labels.classes_of(record.label)) for record in source.records],
        numbers=[float(label) for label in source.labels] if numeric else None,
        unreadable=source.skipped,
        clusters=clusters,
        sizes=list(map(reader.size, source.records)) if isinstance(reader, PictureReader) else [],
        jpeg=partial(_jpeg, reader, source) if isinstance(reader, PictureReader) else None,
    )


def _jpeg(reader: PictureReader, source: RecordSource, row: int) -> bytes:
    from workbench.evaluation import thumbnails

    return thumbnails.jpeg(reader.decoded(source.records[row]))


def _lengths(reader: TextReader, source: RecordSource) -> Indices:
    texts = [reader.describe(record) for record in source.records]
    return np.asarray([len(ids) for ids in reader.tokenizer(texts, verbose=False)["input_ids"]], dtype=np.int64)


class ClassTask(Task):
    """Labels of rows."""

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> ClassRun:
        return class_run.begin(config, run, callback, loader=loader)

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        return class_run.main(config, run, callback)

    def inspect(self, config: RunConfig) -> ClassInspection:
        from workbench.recipes.tasks.classify import picture_checks

        reader, data, targets = prepare(config)
        look = partial(frozen_features.of_splits, config, reader, data.train, data.held_out)
        train = class_sampling.sampled_rows(data.train, config)
        drawn, steps = len(train), total_steps(config, len(train))
        pictures = picture_checks.inspect(config, reader, data.train, data.labels)
        return ClassInspection(
            config=config,
            data=data,
            examples=chosen_examples(data.train, reader),
            targets=targets,
            drawn=drawn,
            steps=steps,
            notes=[
                *mixture.in_words(train, config, steps),
                *leaks.told(data.rows.named()),
                *notes(data.train, data.rows[1:], data.labels, config, pictures),
                *class_run.view_notes(config, reader, data),
            ],
            pictures=pictures,
            probe=frozen_features.in_check(config, data.labels, data.train, data.held_out, reader, look),
        )

    def head(self, inspection: Any) -> ModelHead:
        return classifier.task(inspection.data.labels, seed=inspection.config.seed)

    def require(self, config: RunConfig, data: ClassSplits) -> None:
        task = classifier.task(data.labels, seed=config.seed)
        preflight.require_backbone(config, list(data.rows.named().values()), task)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        model = classifier.load(run, config)
        if config.data.test is not None:
            rows = labelled_data.scored(config, model.reader, model.labels)
        else:
            rows = labelled_data.load(config, model.reader).held_out
        classification_scores.require_metric(model.labels, scored=rows)
        return score(run, config, model, rows, turn.scoring)[0]

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        exported.require_saved(run, config, "classes.json", classifier.reader_file(config))
        rows = classifier.reader_of_run(run, config).read(source, labelled=False)
        model = classifier.load(run, config)
        encoded = labelled_data.encode(rows, model.reader, model.labels)
        outputs_NC = class_run.outputs(run, config, model, encoded, turn.scoring)
        table = predictions(model, encoded, outputs_NC, labelled=False)
        return PredictionTable(table, rows.skipped, [record.row for record in encoded.records])

    def outputs(self, run: Path, config: RunConfig) -> ClassReference:
        unmerged = classifier.load(run, config)
        if config.crossvalidates:
            data = fold_data.load(config, unmerged.reader, run_embedder.of_sources(config, unmerged.reader))
            held_out = data.test or data.rows
        else:
            held_out = labelled_data.load(config, unmerged.reader).held_out
        first = held_out.subset(np.arange(min(ROWS, len(held_out))))
        wanted_NC = classification_scores.predict_outputs(unmerged.model, unmerged.outputs, first)
        return ClassReference(config, unmerged.reader.tokenizer, unmerged, first, wanted_NC)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        from workbench.planning.dry_run import largest_rows

        reader, data, _ = class_run.prepare(config)
        worst = [
            data.held_out.batch(rows).to(backbones.device())
            for rows in largest_rows(data.held_out, tokens=capacity.FORWARD_TOKENS)
        ]
        single = ClassRun(config, run, Silent(), reader, data)
        return DryTask(single, lambda live: [live.outputs(batch) for batch in worst])

    def end_bytes(self, config: RunConfig, rows: Any) -> int:
        compared = config.evaluate.probe != 0 and not config.budget.timed and isinstance(rows, LabelledSet)
        return simple_baseline.fit_bytes(rows) if compared else 0

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        reader = classifier.reader_of_backbone(config)
        named = [each for each in files if each.title != "Held-out" or not config.crossvalidates]
        sources = [reader.read(each.data.train, limit=each.data.limit, columns=each.data.columns) for each in named]
        clusters = _clusters(config, reader, named, sources)
        trains, sets = (
            {each.title: source for each, source in zip(named, sources, strict=True) if each.trains == learnt}
            for learnt in (True, False)
        )
        copies, _ = leaks.find_copies(trains, sets, reader.duplicates, action=config.data.overlap)
        triples = zip(named, sources, clusters, strict=True)
        read = [_records(config, reader, each, source, own) for each, source, own in triples]
        return [replace(each, copies=copies.get(each.title, ())) for each in read]

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        from workbench.recipes.tasks.classify import served_classes

        served_classes.require_texts(run, config)
        return served_classes.load(run, config, name, created, queue=queue)


TASK = ClassTask()
