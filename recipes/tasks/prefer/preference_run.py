"""Preferences: judged answers in, an adapter that makes the better ones likelier, its scores and a report out.

The loop is that of every recipe; what differs is that a row is a pair of answers, or one that is good or bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench import evaluation
from workbench.config import RunConfig, model_heads
from workbench.config.sections.prefer_config import WITH_TIES, PreferConfig
from workbench.data import mixture, named_sets
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.held_out_split import Splits
from workbench.data.text import generated_answers, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import (
    ROW,
    PreferenceEncoder,
    PreferenceSet,
    mismatched_answers,
    preference_set,
    require_preferences,
    without_ties,
)
from workbench.data.text.tokenized_set import TokenizedSet, require_ends
from workbench.evaluation import GeneratedAnswer, preference_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.models import backbones
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.recipes.single import start_adapter
from workbench.recipes.single.single_run import Scored
from workbench.recipes.tasks.prefer import preference_reference
from workbench.recipes.tasks.prefer.preference_reference import AnswerNumbers, Floats
from workbench.recipes.tasks.sft.text_run import (
    StartedRun,
    TextOutputs,
    answer,
    conversations,
    require_whole_pictures,
)
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training import preference_objective, preflight
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.preference_objective import KtoLook, PreferenceObjective
from workbench.training.signal import TrainingSignal

Scores = dict[str, Any]
WATCHED = 4
"""Held-out prompts that are answered at each evaluation, at most."""
WATCHED_SCORES = {"tokens": "answer_tokens", "repetition": "repetition"}
"""Figures of these answers by their names in metrics.jsonl."""


def unasked(
    config: RunConfig,
    run: Run,
    callback: Callback,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder,
    pairs: Splits[PreferenceSet],
    *,
    loader: Loader = backbones.load,
) -> PreferenceRun:
    """The run, before a reference was asked."""
    good = pairs.map(lambda split: split.good)
    return PreferenceRun(config, run, callback, tokenizer, template, good, pairs=pairs, loader=loader)


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[PreferenceSet]]:
    """Tokenizer, form of the rows, and data; refuses what would fail or teach nothing."""
    tokenizer = backbones.tokenizer(config.model)
    template = conversations(config, tokenizer)
    data = tokenized.load(config.data, tokenizer, PreferenceEncoder(template), seed=config.seed)
    pairs = data.map(lambda split: _judged(split, config, tokenizer))
    require_preferences(pairs)
    require_ends(data)
    require_whole_pictures(config, data.train)
    train = mixture.mixed(pairs.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(pairs.named().values())
    preflight.require_backbone(config, splits, model_heads.of(config))
    preference_reference.find(config, tokenizer)
    start_adapter.require(config)
    return tokenizer, template, pairs


def scored_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: ChatEncoder) -> PreferenceSet:
    """The rows of `data.test` where there are any, else the held-out ones."""
    encoder = PreferenceEncoder(template)
    split = tokenized.read_files(config.data.test_files, config.data, tokenizer, encoder)
    if split is None:
        split = tokenized.load(config.data, tokenizer, encoder, seed=config.seed).held_out
    return _judged(split, config, tokenizer)


def _judged(split: TokenizedSet, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreferenceSet:
    if config.prefer.loss not in WITH_TIES:
        loss = f"prefer.loss={config.prefer.loss}"
        cure = f"Write prefer.loss={'|'.join(WITH_TIES)}, or data.on_bad_row=skip, which leaves ties out."
        split = without_ties(split, refuse=config.data.on_bad_row == "refuse", loss=loss, cure=cure)
    judged_set = preference_set(split, pairs=config.prefer.pairs)
    if config.prefer.loss != "kto":
        return judged_set
    return replace(judged_set, others=mismatched_answers(judged_set.answers, config.data, bos=tokenizer.bos_token_id))


@dataclass(frozen=True)
class PreferenceRun(StartedRun):
    """A run that learns which answers are better."""

    pairs: Splits[PreferenceSet] = field(kw_only=True)
    """The examples; `data` has the chosen or good answers."""
    ruler: PreferConfig | None = field(default=None, kw_only=True)
    """Measures held-out losses while training; None: the run's own section."""
    numbers: Mapping[str, AnswerNumbers] | None = field(default=None, kw_only=True)
    """Numbers of the answers of each split, by the reference; None where the loss has none."""

    @property
    def rows(self) -> Mapping[str, Any]:
        return self.pairs.named()

    def asked(self) -> PreferenceRun:
        """The same run, for which the reference has read all answers."""
        numbers = preference_reference.ask(self.config, self.run, self.callback, self.rows, self.tokenizer)
        return replace(self, numbers=numbers)

    @property
    def sampled_rows(self) -> Examples:
        return mixture.mixed(self.pairs.train, self.config)

    @property
    def splits(self) -> Any:
        return self.pairs.map(lambda split: split.answers)

    def for_members(self) -> PreferenceRun:
        return replace(self, ruler=self.config.prefer)

    def member_loss(self, live: ExportedModel) -> Objective:
        section = self.config.prefer
        own = self.objective(section, lambda: section.beta)

        def loss(hidden_ND: Tensor, labels_N: Tensor, scale: float) -> Tensor:
            rows = int(labels_N[:, ROW].max()) + 1
            return own(preference_objective.of_hidden(hidden_ND, labels_N, live.head), labels_N, rows=rows, scale=scale)

        return loss

    def on_held_out(self, rows: Indices) -> PreferenceRun:
        held_out, numbers = self.pairs.held_out.subset(rows), self.numbers
        if numbers is not None:
            numbers = {**numbers, "held_out": numbers["held_out"].subset(rows, held_out.each)}
        return replace(
            self,
            pairs=self.pairs._replace(held_out=held_out),
            data=self.data._replace(held_out=held_out.good),
            numbers=numbers,
        )

    def score_start(self, start: ExportedModel, scoring: ModelResults) -> Scored:
        """Scores by what was read of the reference, where that is the start: all margins are exactly 0."""
        if not preference_reference.is_start(self.config):
            return self.score(start, self.pairs.held_out, scoring)
        own = self._reference("held_out")
        assert own is not None
        with self.run.deadline.phase("answers"):
            written = answer(start, self.data.held_out, self.config, scoring)
        scores = self._summary("held_out", own.counted_S, own.mean_S, own.others_S)
        return Scored(scores | self._of_answers(written), TextOutputs(written))

    def finish(self, more: Mapping[str, Any] | None = None) -> Scores:
        path = self.run.path / "before.json"  # of a fold it comes late
        start = self.ruler is not None and preference_reference.is_start(self.config)
        if start and path.exists() and self.placement.scores:
            own = self._reference("held_out")
            assert own is not None
            before = files.read_json(path)
            before["scores"] |= self._summary("held_out", own.counted_S, own.mean_S, own.others_S)
            files.write_json(path, before)
        return super().finish(more)

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        config, train = self.config.prefer, self.pairs.train
        own = self._reference("train")
        objective = self.objective(config, lambda: config.beta_at(progress()))
        read = partial(preference_objective.log_probs, live.model, live.head)
        look = None
        if own is not None and own.others_S is not None:
            look = KtoLook(objective, train, own.others_S, read)

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            return objective(read(batch), batch.labels_N, rows=batch.rows, scale=scale)

        mixed = mixture.mixed(train, self.config)
        return TrainingSignal(mixed, loss, reads_packed=self.packs(live), meter=objective.meter, look=look)

    def objective(self, config: PreferConfig, beta: Callable[[], float]) -> PreferenceObjective:
        """The loss of training examples by a section; its `beta` is that of now."""
        own = self._reference("train")
        reference_S = None if own is None else own.counted_S
        return PreferenceObjective(config, self.pairs.train, reference_S, beta=beta, device=backbones.device())

    def _reference(self, split: str) -> AnswerNumbers | None:
        return None if self.numbers is None else self.numbers[split]

    def held_out_loss(self, live: ExportedModel) -> tuple[float, Mapping[str, float]]:
        counted_S, mean_S, others_S = self._read(live, "held_out")
        scores = self._summary("held_out", counted_S, mean_S, others_S, ruler=self.ruler)
        parts = {"held_out_preference[accuracy]": scores["accuracy"]}
        parts |= {"held_out_preference[margin]": scores["margin"]} if "margin" in scores else {}
        parts |= named_sets.held_out_losses(scores)
        return scores["loss"], parts | self._divergence(mean_S) | self._written(live)

    def _divergence(self, mean_S: Floats) -> dict[str, float]:
        """Mean log p of the reference minus that of the model, nats per token of held-out answers of each kind.

        An estimate of KL(reference || model) on texts that neither of them wrote, where it may be below 0.
        """
        own, rows = self._reference("held_out"), self.pairs.held_out
        if own is None:
            return {}
        names = ("chosen", "rejected") if rows.paired else ("good", "bad")
        kinds = {name: kind_S for name, kind_S in zip(names, (rows.desired, ~rows.desired), strict=True)}
        return {
            f"held_out_divergence[{name}]": float((own.mean_S - mean_S)[kind_S].mean())
            for name, kind_S in kinds.items()
            if kind_S.any()
        }

    def _written(self, live: ExportedModel) -> dict[str, float]:
        """Length and repetition of greedy answers to WATCHED held-out prompts, the same each time.

        None in a sweep, whose members have no such figures, and where each device holds a part of the weights.
        """
        count = min(WATCHED, self.config.evaluate.answers)
        if self.ruler is not None or not self.placement.keeps_weights or not count:
            return {}
        evaluate = self.config.evaluate.model_copy(update={"answers": count})
        written = answer(live, self.data.held_out, self.config.model_copy(update={"evaluate": evaluate}))
        scores = self._of_answers(written)
        return {f"held_out_answers[{name}]": scores[key] for name, key in WATCHED_SCORES.items() if key in scores}

    def score(self, model: ExportedModel, rows: Any, scoring: ModelResults | None = None) -> Scored:
        name = next((name for name, split in self.rows.items() if split is rows), None)
        with self.scoring_time(rows):
            if name is None:  # a few rows, to see how long it takes
                self._counted(model, rows.answers, rows.shared_tokens, None)
                return Scored({}, TextOutputs([]))
            scores = self._summary(name, *self._read(model, name, scoring))
        with self.run.deadline.phase("answers"):
            written = answer(model, rows.good, self.config, scoring)
        return Scored(scores | self._of_answers(written), TextOutputs(written))

    def _of_answers(self, written: list[GeneratedAnswer]) -> dict[str, float]:
        """Scores of written answers, of all and of those to the prompts of each named set."""
        scores = self._of_some(written)
        for name in dict.fromkeys(each.source for each in written if each.source):
            own = self._of_some([each for each in written if each.source == name])
            scores |= {named_sets.titled(score, name): value for score, value in own.items()}
        return scores

    def _of_some(self, written: list[GeneratedAnswer]) -> dict[str, float]:
        """Scores of written answers, their length in tokens, and how far they repeat themselves."""
        count = [len(self.tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in written]
        if not count:
            return {}
        repeated = generated_answers.answer_lengths([each.answer for each in written])["repetition"]
        return evaluation.answer_scores(written) | {"answer_tokens": float(np.mean(count)), "repetition": repeated}

    def _read(
        self, model: ExportedModel, name: str, scoring: ModelResults | None = None
    ) -> tuple[Floats, Floats, Floats | None]:
        """Counted log-probabilities of a split's answers, their means, and those of answers to other prompts."""
        rows: PreferenceSet = self.rows[name]
        counted_S, mean_S = self._counted(model, rows.answers, rows.shared_tokens, scoring)
        if rows.others is None:
            return counted_S, mean_S, None
        others_S, _ = self._counted(model, rows.others, rows.others.supervised, scoring)
        return counted_S, mean_S, others_S

    def _counted(
        self, model: ExportedModel, rows: TokenizedSet, shared_S: Any, scoring: ModelResults | None
    ) -> tuple[Floats, Floats]:
        return preference_scores.read(model.model, model.head, rows, shared_S, self.config.prefer, scoring=scoring)

    def _summary(
        self,
        name: str,
        counted_S: Floats,
        mean_S: Floats,
        others_S: Floats | None,
        *,
        ruler: PreferConfig | None = None,
    ) -> dict[str, float]:
        """Scores of a split, and of each of several sets in it."""
        rows: PreferenceSet = self.rows[name]
        read, known = AnswerNumbers(counted_S, mean_S, others_S), self._reference(name)

        def judged(rows: PreferenceSet, read: AnswerNumbers, known: AnswerNumbers | None) -> dict[str, float]:
            drift = 0.0
            if read.others_S is not None:
                assert known is not None and known.others_S is not None
                drift = float((read.others_S - known.others_S).mean())
            reference_S = None if known is None else known.counted_S
            section = ruler or self.config.prefer
            return preference_scores.summary(section, rows, read.counted_S, read.mean_S, reference_S, drift=drift)

        def of_set(own: Indices) -> dict[str, float]:
            part = None if known is None else known.subset(own, rows.each)
            return judged(rows.subset(own), read.subset(own, rows.each), part)

        return judged(rows, read, known) | named_sets.scored(rows, of_set)
