"""`check`, `evaluate`, `predict` and `merge` of recipe classify; the verbs' own files hand over to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import special
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import stock
from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import MicroBatch, evenly_spaced
from workbench.data.images.picture_rows import PictureRows
from workbench.data.labelled import class_sampling, fold_data, labelled_data, text_reader
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.labels import Floats, Labels, alike
from workbench.data.labelled.records import RowReader
from workbench.data.text.quality import cleaning
from workbench.evaluation import classification_scores, frozen_features, run_embedder
from workbench.evaluation.forward_passes import ModelResults
from workbench.models import classifier, exported, row_readers
from workbench.models.classifier import Classifier
from workbench.recipes.labels import picture_checks
from workbench.recipes.labels.classify import predictions, prepare, score
from workbench.recipes.labels.picture_checks import PictureFindings
from workbench.runs import files
from workbench.training.optim.schedules import total_steps

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


def inspect(config: RunConfig) -> ClassInspection:
    """Everything that `run` does before it trains."""
    reader, data, targets = prepare(config)
    task = classifier.task(data.labels, seed=config.seed)
    look = partial(frozen_features.of_splits, config, reader, data.train, data.held_out)
    train = class_sampling.sampled_rows(data.train, config)
    drawn, steps = len(train), total_steps(config, len(train))
    pictures = picture_checks.inspect(config, reader, data.train, data.labels)
    copies = picture_checks.near_copies(reader, data.train, {"held-out": data.held_out, "test": data.test})
    return ClassInspection(
        config=config,
        data=data,
        examples=chosen_examples(data.train, reader),
        targets=targets,
        drawn=drawn,
        steps=steps,
        notes=[*mixture.in_words(train, config, steps), *notes(data.train, data.labels, config, pictures), *copies],
        pictures=pictures,
        probe=frozen_features.in_check(config, task, data.train.lengths, look),
    )


def notes(rows: LabelledSet, labels: Labels, config: RunConfig, pictures: PictureFindings | None) -> list[str]:
    """Sentences of `check` on training rows: what was left out, what is probably wrong, how unequal classes are."""
    same = None if labels.kind == "number" else alike(labels.names)
    one = "Labels `{}` and `{}` differ only by case or spaces: if they mean one class, write them the same way."
    return [
        *(f"Left out: {reason}" for reason in rows.skipped[:5]),
        *(rows.contamination.sentences if rows.contamination else ()),
        *([rows.cleaning.sentence] if rows.cleaning else ()),
        *cleaning.outlook(map(labelled_data.row_text, () if pictures else rows.records)),
        *([one.format(*same)] if same else ()),
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
    chosen = evenly_spaced(len(rows), SHOWN).tolist()
    return [(rows.place(i), reader.rendered(rows.inputs, i), picture_checks.in_words(rows.labels[i])) for i in chosen]


def evaluate(run: Path, config: RunConfig, scoring: ModelResults | None = None) -> dict[str, float]:
    """Scores of the saved classifier on data.test where `config` names it, else on the held-out rows."""
    model = classifier.load(run, config)
    if config.data.test is not None:
        sets = labelled_data.read_each(config.data.test_files, model.reader)
        rows = labelled_data.encode_each(sets, model.reader, model.labels)
    else:
        rows = labelled_data.load(config, model.reader).held_out
    return score(model, rows, scoring)[0]


def predict(
    run: Path, source: str, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[pd.DataFrame, Sequence[str]]:
    """The saved classifier's predictions for every row of a file, whose labels are ignored, and rows left out."""
    exported.require_saved(run, config, "classes.json", row_readers.file(config))
    rows = row_readers.of_run(run, config).read(source, labelled=False)
    model = classifier.load(run, config)
    encoded = labelled_data.encode(rows, model.reader, model.labels)
    outputs_NC = classification_scores.predict_outputs(model.model, model.outputs, encoded, scoring=scoring)
    return predictions(model, encoded, outputs_NC, labelled=False), rows.skipped


def some_outputs(model: Classifier, config: RunConfig, *, rows: int) -> tuple[LabelledSet, Floats]:
    """Held-out rows, or those of a cross-validation, and what a classifier says of them."""
    if config.recipe == "crossval":
        data = fold_data.load(config, model.reader, run_embedder.of_sources(config, model.reader))
        held_out = data.test or data.rows
    else:
        held_out = labelled_data.load(config, model.reader).held_out
    first = held_out.subset(np.arange(min(rows, len(held_out))))
    return first, classification_scores.predict_outputs(model.model, model.outputs, first)


def stock_outputs(model: nn.Module, rows: LabelledSet) -> Floats:
    """A stock model's own outputs for rows; texts are padded with the token of its config.json.

    Args:
        model: Of transformers, or called and configured like one.
    """
    config: Any = model.config
    if isinstance(rows.inputs, PictureRows):
        return classification_scores.predict_outputs(model, lambda batch: model(**batch.inputs).logits, rows)
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
    return Gap(rows, max(0.0, float(_divergence(labels, first_NC, second_NC).mean())), float(np.mean(same)))


def _divergence(labels: Labels, first_NC: Floats, second_NC: Floats) -> Floats:
    if labels.kind == "several":
        pairs = [(special.log_expit(sign * first_NC), special.log_expit(sign * second_NC)) for sign in (1, -1)]
    else:
        pairs = [(special.log_softmax(first_NC, axis=1), special.log_softmax(second_NC, axis=1))]
    divergence_N: Floats = sum((np.exp(one) * (one - other)).sum(1) for one, other in pairs)
    return divergence_N


def save_merged(model: PreTrainedModel, unmerged: Classifier, folder: Path) -> None:
    """A stock model with its tokenizer, and what its outputs mean."""
    stock.save(model, folder)
    classifier.save_reader(unmerged, folder)
    files.write_json(folder / "classes.json", unmerged.labels.facts)
