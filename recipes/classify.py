"""Classification: labelled rows in, a scored classifier and a report out.

Labels are one class, several, a number, or which of two responses is better; the backbone is an encoder or causal.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from torch import from_numpy
from transformers import PreTrainedTokenizerBase

from workbench import report
from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.data.batching import first_rows
from workbench.data.labelled import labelled_data
from workbench.data.labelled.class_sampling import balanced
from workbench.data.labelled.labelled_data import ClassSplits, Labelled
from workbench.data.labelled.labels import Floats
from workbench.data.labelled.text_fields import FieldTokenizer
from workbench.evaluation import row_outputs, target_scores
from workbench.evaluation.scored import Scoring, interruptible
from workbench.losses.criterion import criterion
from workbench.models import backbones, classifier, model_summary
from workbench.models.backbones import Backbone
from workbench.models.classifier import Classifier
from workbench.runs import files, provenance, run_clock
from workbench.runs.run_directory import Run
from workbench.runs.timing import Timer, left, phase
from workbench.training import preflight
from workbench.training.callbacks import Callback
from workbench.training.distributed import layout_settings
from workbench.training.distributed.fsdp import reading
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer
from workbench.training.signal import ProgressClock, TrainingSignal
from workbench.training.trainer import Trainer

REST_TOKENS = 1024
"""Padded tokens in one forward pass that uses up what is left of the time."""
_NAMES = {"after": "held-out", "test": "test"}
Scores = dict[str, Any]
Supervise = Callable[[Classifier, Callable[[], float]], TrainingSignal]
"""From the classifier that trains, and the share of the run that is done."""


def main(config: RunConfig, run: Run, watcher: Callback) -> Scores:
    """Train as `config` says; returns scores of a baseline and of what was trained, as they stand in scores.json."""
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    tokenizer, data, _ = prepare(config)
    begin(run, data)
    train(config, run, data, tokenizer, watcher)
    return finish(config, run, data, watcher) if layout_settings.reads(config.distributed, run.ranks) else {}


def begin(run: Run, data: ClassSplits) -> None:
    """Note the data, and what can be said without looking at a row: a fresh head says nothing to compare with."""
    sets = {"train": data.train, "held_out": data.held_out, "test": data.test}
    provenance.note_data(run, {name: None if split is None else split.facts() for name, split in sets.items()})
    said = target_scores.baseline(data.labels, data.train.targets_NC, rows=len(data.held_out))
    before = target_scores.scores(data.labels, said, data.held_out.targets_NC)
    files.write_json(run.path / "before.json", {"scores": before})


def finish(config: RunConfig, run: Run, data: ClassSplits, watcher: Callback) -> Scores:
    """Score what was saved: reload it, do not trust the live one."""
    watcher.say("Scoring what was saved ...")
    timer = run.timer
    with phase(timer, "load"):
        model = classifier.load(run.home, config, waiting=layout_settings.cuts_weights(config.distributed))
    read = reading(model.model, config.distributed, run.ranks)
    scored = interruptible(config, run, watcher.stop_requested)
    found, splits = {}, {"after": data.held_out, "test": data.test}
    with phase(timer, "scoring"):
        found["after"] = read(lambda: outputs(model, data.held_out, timer, scoring=scored))
    if data.test is not None:
        found["test"] = read(partial(outputs, model, data.test, timer, scoring=scored))
    if not run.ranks.first:
        return {}
    scores = {"before": files.read_json(run.path / "before.json")["scores"]}
    scores |= {name: target_scores.scores(model.labels, said, rows.targets_NC) for name, (rows, said) in found.items()}
    counts = {_NAMES[name]: (len(rows), len(splits[name] or ())) for name, (rows, _) in found.items()}
    parts = [f"{some} of {all_} {name} rows were scored" for name, (some, all_) in counts.items() if some < all_]
    if parts:
        cut = f"Time ran out: {', '.join(parts)}."
        run.note(cut=cut)
        watcher.say(cut)
    with phase(timer, "report"):
        files.write_json(run.path / "scores.json", scores)
        write_predictions(run, config, model, *found["after"])
        run.note(status="done")
        if scored is not None:
            scored.everything.clear()
        report.write(run.path)
    if timer is not None and timer.ended:
        read(lambda: _use_the_rest(timer, model, data, run, scores, watcher))
    return scores


def _use_the_rest(
    timer: Timer, model: Classifier, data: ClassSplits, run: Run, scores: Scores, watcher: Callback
) -> None:
    """In the time that was kept and not needed: scores of rows that it learnt from, to see what is memorised."""
    if timer.left() < timer.seconds("scoring", REST_TOKENS / int(data.held_out.lengths.sum())):
        return
    rows, outputs_NC = outputs(model, data.train, timer, batch_tokens=REST_TOKENS)
    scores["train"] = target_scores.scores(model.labels, outputs_NC, rows.targets_NC)
    loss = scores["train"]["loss"]
    watcher.say(f"In the time that was left: loss {loss:.4f} on {len(rows)} of the rows that it learnt from.")
    files.write_json(run.path / "scores.json", scores)
    report.write(run.path)


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ClassSplits, list[str]]:
    """Tokenizer, data and the names of the modules that get an adapter; refuses what would fail or teach nothing."""
    classifier.require_known_form(config)
    tokenizer = backbones.tokenizer(config.model)
    data = labelled_data.load(config, tokenizer)
    splits = [data.train, data.held_out, *([data.test] if data.test else [])]
    modules = preflight.require_backbone(config, splits, classifier.task(data.labels, seed=config.seed))
    return tokenizer, data, modules


def train(
    config: RunConfig,
    run: Run,
    data: ClassSplits,
    tokenizer: PreTrainedTokenizerBase,
    watcher: Callback,
    supervise: Supervise | None = None,
) -> None:
    """From a backbone to a saved adapter and head; everything live is freed on return.

    Args:
        supervise: What the model learns from; by default the labels of `data`.
    """
    with phase(run.timer, "load"):
        backbone = backbones.load(
            config.model,
            tokenizer,
            task=classifier.task(data.labels, seed=config.seed),
            trainable=isinstance(config.adapter, Full),
            waiting=layout_settings.cuts_weights(config.distributed),
        )
    watcher.say(model_summary.storage(backbone, config.adapter))
    freezer = freezing.attach(
        backbone.model, config, seed=config.seed, sample=lambda: first_rows(data.train, seed=config.seed)
    )
    model = freezer.model
    run.note(model=model_summary.model(config, backbone, model))
    found = classifier.classification_model(model, backbone.model, tokenizer, data.labels)
    if run.timer is not None:
        _plan(run.timer, config, data, found)

    fit = fitting(config, run, data, backbone, freezer, found, watcher, supervise)
    fit.work()
    with fit.shipping():
        if run.ranks.first:
            classifier.save(found, run.adapter)
    run.ranks.wait()


def fitting(
    config: RunConfig,
    run: Run,
    data: ClassSplits,
    backbone: Backbone,
    freezer: Freezer,
    found: Classifier,
    watcher: Callback,
    supervise: Supervise | None = None,
) -> Trainer:
    """The training of a classifier with a fresh adapter, not begun."""

    def held_out_loss() -> float:
        with phase(run.timer, "evaluation"):
            return score(found, data.held_out)[0]["loss"]

    clock = ProgressClock()
    supervise = supervise or (lambda found, _: labelled(config, data, found))
    return Trainer(
        model=freezer.model,
        supervision=supervise(found, clock),
        freezer=freezer,
        width=backbone.model.config.get_text_config().hidden_size,
        held_out=[data.held_out],
        held_out_loss=held_out_loss,
        timer=run.timer,
        config=config,
        compute=backbone.compute,
        run=run,
        watcher=watcher,
        clock=clock,
    )


def _plan(timer: Timer, config: RunConfig, data: ClassSplits, model: Classifier) -> None:
    """Tell the clock what the run will do, and how long scoring takes: nothing was scored before training."""
    tokens = int(data.held_out.lengths.sum())
    timer.plan(run_clock.plan(config, held_out=tokens, test=0 if data.test is None else int(data.test.lengths.sum())))
    chosen = np.random.default_rng(0).permutation(len(data.held_out))
    some = data.held_out.subset(chosen[: max(1, REST_TOKENS // int(data.held_out.lengths.max()))])
    for _ in range(2):  # the first time is slower
        with phase(timer, "scoring", int(some.lengths.sum()) / tokens):
            score(model, some)


def labelled(config: RunConfig, data: ClassSplits, model: Classifier) -> TrainingSignal:
    """The training rows with their labels."""
    objective = criterion(config.classes, from_numpy(data.train.targets_NC))
    return TrainingSignal(balanced(data.train, config), model.row_loss(objective))


def score(model: Classifier, rows: Labelled) -> tuple[dict[str, float], Floats]:
    """Scores of a classifier on labelled rows, and its outputs (N, C)."""
    _, found = outputs(model, rows)
    return target_scores.scores(model.labels, found, rows.targets_NC), found


def outputs(
    model: Classifier,
    rows: Labelled,
    timer: Timer | None = None,
    *,
    batch_tokens: int | None = None,
    scoring: Scoring | None = None,
) -> tuple[Labelled, Floats]:
    """A classifier's outputs for rows, or for as many as there is time for, and those rows."""
    return row_outputs.outputs_in_time(
        model.model, model.outputs, rows, left(timer), batch_tokens=batch_tokens, scoring=scoring
    )


def write_predictions(run: Run, config: RunConfig, model: Classifier, rows: Labelled, outputs_NC: Floats) -> None:
    """predictions.parquet: every held-out row with its label and probabilities."""
    buffer = io.BytesIO()
    predictions(config, model, rows, outputs_NC, labelled=True).to_parquet(buffer)
    files.write_bytes(run.path / "predictions.parquet", buffer.getvalue())


def predictions(
    config: RunConfig, model: Classifier, rows: Labelled, outputs_NC: Floats, *, labelled: bool
) -> pd.DataFrame:
    """One line a row, with what the model reads written out."""
    return row_outputs.table(
        model.labels,
        rows,
        model.labels.values(outputs_NC),
        texts=texts(config, model.tokenizer, rows),
        labelled=labelled,
    )


def texts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, rows: Labelled) -> list[str]:
    """Text that the model reads of each row, uncut."""
    writer = FieldTokenizer(tokenizer, config.classes, max_tokens=config.data.max_tokens)
    return [writer.text(record.fields) for record in rows.records]
