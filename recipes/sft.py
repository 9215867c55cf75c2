"""Training of a language model: rows in, a scored adapter and a report out.

Recipe sft teaches a causal or sequence-to-sequence model to answer, mlm an encoder to find hidden tokens; `tasks` and
`forms` know what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench import evaluation, losses, report
from workbench.adapters import Full
from workbench.config import RunConfig, tasks
from workbench.config.tasks import TEXT
from workbench.data.batching import MicroBatch, first_rows
from workbench.data.text import tokenized
from workbench.data.text.chat import Template
from workbench.data.text.row_encoder import form
from workbench.data.text.token_masking import Masking
from workbench.data.text.tokenized import Splits, TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import GeneratedAnswer, Likelihood
from workbench.evaluation.scored import Scoring, interruptible
from workbench.models import backbones, exported, model_summary, output_heads
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.models.output_heads import Head
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
Scores = dict[str, Any]
Supervise = Callable[[nn.Module, Head, Backbone, Callable[[], float]], TrainingSignal]
"""From the model that trains, its head, the backbone under it, and the share of the run that is done."""


def main(config: RunConfig, run: Run, watcher: Callback) -> Scores:
    """Train as `config` says; returns scores before and after, as they stand in scores.json."""
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    tokenizer, template, data = prepare(config, run)
    train(config, run, data, tokenizer, template, watcher)
    return finish(config, run, data, watcher) if layout_settings.reads(config.distributed, run.ranks) else {}


def prepare(config: RunConfig, run: Run) -> tuple[PreTrainedTokenizerBase, Template | Masking, Splits]:
    """Tokenizer, form of the rows, and data; refuses what would fail or teach nothing."""
    tokenizer = backbones.tokenizer(config.model)
    template = form(config, backbones.hub_config(config.model), tokenizer, template=read_template(config))
    data = tokenized.load(config.data, tokenizer, template, seed=config.seed)
    preflight.require_runnable(config, data)
    provenance.note_data(run, {name: split and split.facts() for name, split in data._asdict().items()})
    return tokenizer, template, data


def finish(config: RunConfig, run: Run, data: Splits, watcher: Callback) -> Scores:
    """Score what was saved: reload it, do not trust the live one."""
    watcher.say("Scoring what was saved ...")
    with phase(run.timer, "load"):
        model = exported.load(run.home, config, waiting=layout_settings.cuts_weights(config.distributed))
    read = reading(model.model, config.distributed, run.ranks)
    timer, scored = run.timer, interruptible(config, run, watcher.stop_requested)
    splits = {"after": data.held_out} | ({} if data.test is None else {"test": data.test})
    # What a model says of all rows is known before time may run out over its answers.
    found = read(lambda: {name: likelihood(model, split, timer, scored) for name, split in splits.items()})
    answers = read(lambda: {name: answer(model, split, config, timer, scored) for name, split in splits.items()})
    if not run.ranks.first:
        return {}
    before = files.read_json(run.path / "before.json")
    scores = {"before": before["scores"]} | {name: evaluation.summary(found[name], answers[name]) for name in splits}
    if cut := _cut(found, answers, splits, config.evaluate.answers):
        scores["before"] |= evaluation.answer_scores(evaluation.answered_before(answers["after"], before["answers"]))
        run.note(cut=cut)
        watcher.say(cut)
    with phase(timer, "report"):
        files.write_json(run.path / "scores.json", scores)
        evaluation.write_predictions(run.path / "predictions.parquet", answers["after"], before=before["answers"])
        run.note(status="done")
        if scored is not None:
            scored.everything.clear()
        report.write(run.path)
    if timer is not None and timer.ended:
        read(lambda: _use_the_rest(timer, model, data, run, scores, watcher))
    return scores


def _cut(
    found: Mapping[str, Likelihood],
    answers: Mapping[str, list[GeneratedAnswer]],
    splits: Mapping[str, TokenizedSet],
    asked: int,
) -> str | None:
    """Sentence on the scores that were left out because time ran out; None where none were.

    Args:
        asked: Answers asked for of each split.
    """
    parts = []
    for name, split in splits.items():
        rows = "held-out rows" if name == "after" else "test rows"
        if found[name].rows < len(split):
            parts.append(f"{found[name].rows} of {len(split)} {rows} were scored")
        wanted = len(evaluation.asked(split, count=asked)) if answers[name] else 0
        if len(answers[name]) < wanted:
            parts.append(f"{len(answers[name])} of {wanted} {rows} were answered")
    return f"Time ran out: {', '.join(parts)}." if parts else None


def _use_the_rest(
    timer: Timer, model: ExportedModel, data: Splits, run: Run, scores: Scores, watcher: Callback
) -> None:
    """In the time that was kept and not needed: the loss on rows that it learnt from, to see what is memorised."""
    if timer.left() < timer.seconds("scoring", REST_TOKENS / int(data.held_out.lengths.sum())):
        return
    found = evaluation.likelihood(model.model, model.head, data.train, left=timer.left, batch_tokens=REST_TOKENS)
    scores["train"] = evaluation.summary(found, [])
    watcher.say(f"In the time that was left: loss {found.loss:.4f} on {found.rows} of the rows that it learnt from.")
    files.write_json(run.path / "scores.json", scores)
    report.write(run.path)


def train(
    config: RunConfig,
    run: Run,
    data: Splits,
    tokenizer: PreTrainedTokenizerBase,
    template: Template | Masking,
    watcher: Callback,
    supervise: Supervise | None = None,
) -> None:
    """From a backbone to a saved adapter; everything live is freed on return.

    Args:
        supervise: What the model learns from; by default the supervised tokens of `data`.
    """
    backbone = load(config, run, tokenizer)
    watcher.say(model_summary.storage(backbone, config.adapter))

    score_before(config, run, backbone, data, tokenizer, template, watcher)
    if layout_settings.cuts_weights(config.distributed):
        del backbone  # what was scored is cut
        backbone = load(config, run, tokenizer)

    # Frozen backbone, trainable adapter.
    freezer = freezing.attach(
        backbone.model,
        config,
        seed=config.seed,
        new_token_ids=[tokenizer.get_vocab()[token] for token in config.model.new_tokens],
        sample=lambda: first_rows(data.train, seed=config.seed),
    )
    model = freezer.model
    run.note(model=model_summary.model(config, backbone, model))
    head = output_heads.find(model, backbone.model)
    if run.timer is not None:
        plan(run.timer, config, data)
    fit = fitting(config, run, data, backbone, freezer, head, watcher, supervise)
    fit.work()
    with fit.shipping():
        if run.ranks.first:
            exported.save(model, run.adapter, tokenizer, template, evaluation.stop_tokens(tokenizer, data.train))
    run.ranks.wait()


def load(config: RunConfig, run: Run, tokenizer: PreTrainedTokenizerBase) -> Backbone:
    """The backbone that trains; on the host where processes share it."""
    with phase(run.timer, "load"):
        return backbones.load(
            config.model,
            tokenizer,
            task=tasks.of(config),
            trainable=isinstance(config.adapter, Full),
            waiting=layout_settings.cuts_weights(config.distributed),
        )


def fitting(
    config: RunConfig,
    run: Run,
    data: Splits,
    backbone: Backbone,
    freezer: Freezer,
    head: Head,
    watcher: Callback,
    supervise: Supervise | None = None,
) -> Trainer:
    """The training of a backbone with a fresh adapter, not begun."""
    model, clock = freezer.model, ProgressClock()

    def held_out_loss() -> float:
        with phase(run.timer, "evaluation"):
            return evaluation.likelihood(model, head, data.held_out).loss

    supervise = supervise or (lambda *_: TrainingSignal(data.train, next_token_loss(model, head)))
    return Trainer(
        model=model,
        supervision=supervise(model, head, backbone, clock),
        freezer=freezer,
        width=head.width,
        held_out=[data.held_out],
        held_out_loss=held_out_loss,
        timer=run.timer,
        config=config,
        compute=backbone.compute,
        run=run,
        watcher=watcher,
        clock=clock,
    )


def plan(timer: Timer, config: RunConfig, data: Splits, *, peers: int = 1) -> None:
    """Tell the clock what the run will do."""
    test = 0 if data.test is None else int(data.test.lengths.sum())
    timer.plan(run_clock.plan(config, held_out=int(data.held_out.lengths.sum()), test=test, peers=peers))


def score_before(
    config: RunConfig,
    run: Run,
    backbone: Backbone,
    data: Splits,
    tokenizer: PreTrainedTokenizerBase,
    template: Template | Masking,
    watcher: Callback,
) -> None:
    """The backbone as it came, before anything is attached to it, into before.json; once in a run.

    Processes that share weights cut those of `backbone`.
    """
    if run.ranks.agreed((run.path / "before.json").exists()) or not layout_settings.reads(
        config.distributed, run.ranks
    ):
        return
    watcher.say("Scoring the backbone before training ...")
    head = output_heads.find(backbone.model, backbone.model)
    model = ExportedModel(backbone.model, head, tokenizer, template, [])
    read = reading(backbone.model, config.distributed, run.ranks)
    scored = interruptible(config, run, watcher.stop_requested, model="before")
    found = read(lambda: likelihood(model, data.held_out, run.timer, scored))
    answers = read(lambda: answer(model, data.held_out, config, run.timer, scored))
    if run.timer is not None:
        run.timer.require_time("scoring the backbone before training")
    said = {each.place: each.answer for each in answers}
    files.write_json(run.path / "before.json", {"scores": evaluation.summary(found, answers), "answers": said})
    if scored is not None:
        scored.everything.clear()


def next_token_loss(model: nn.Module, head: Head) -> Callable[[MicroBatch, float], Tensor]:
    """The summed next-token loss of a micro-batch, as the engine wants it."""

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        hidden_ND = head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N]
        return losses.next_token(
            hidden_ND,
            batch.labels_N,
            head.project,
            vocabulary=head.vocabulary,
            weights=head.trainable(),
            scale=scale,
        )

    return loss


def score(
    model: ExportedModel, split: TokenizedSet, config: RunConfig
) -> tuple[dict[str, float], list[GeneratedAnswer]]:
    """Loss and answer scores of a saved model on a split, and the answers themselves."""
    answers = answer(model, split, config)
    return evaluation.summary(likelihood(model, split), answers), answers


def likelihood(
    model: ExportedModel, split: TokenizedSet, timer: Timer | None = None, scoring: Scoring | None = None
) -> Likelihood:
    """Loss of a model on a split, or on as much of it as there is time for."""
    with phase(timer, "scoring"):
        return evaluation.likelihood(model.model, model.head, split, left=left(timer), scoring=scoring)


def answer(
    model: ExportedModel,
    split: TokenizedSet,
    config: RunConfig,
    timer: Timer | None = None,
    scoring: Scoring | None = None,
) -> list[GeneratedAnswer]:
    """A model's answers to some rows of a split, or to as many of them as there is time for."""
    with phase(timer, "answers"):
        return evaluation.answers(
            model.model,
            split,
            model.tokenizer,
            count=config.evaluate.answers if tasks.of(config) is TEXT else 0,
            max_new_tokens=config.evaluate.max_new_tokens,
            left=left(timer),
            scoring=scoring,
        )


def read_template(config: RunConfig) -> str | None:
    """The chat template that the recipe names, if it names one."""
    path = config.model.chat_template
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {path} cannot be read ({error}). Write the path of a Jinja file, or leave it out."
        ) from None
