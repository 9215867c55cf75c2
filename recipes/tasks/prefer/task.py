"""The task `prefer` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.data import mixture
from workbench.data.batching import evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text import decontamination
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceEncoder, PreferenceSet
from workbench.models import backbones, exported
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.recipes.inspection import SHOWN, Inspection, left_out, pieces
from workbench.recipes.single import token_reference
from workbench.recipes.task import DryTask, RowFile, ScoringOptions
from workbench.recipes.tasks.prefer import preference_reference, preference_run
from workbench.recipes.tasks.prefer.preference_reference import AnswerNumbers
from workbench.recipes.tasks.prefer.preference_run import PreferenceRun
from workbench.recipes.tasks.sft.task import TokenTask, dry_text, survey
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows


class PlannedPreferences(PreferenceRun):
    """A run whose tensors have no values, so that it tells none."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        return super().supervise(live, backbone, progress)._replace(meter=None, look=None)


class Planned(NamedTuple):
    """A run, and what it reads besides the rows of a step; see `DryTask`."""

    single: PlannedPreferences
    looked: float
    once: int


def planned(config: RunConfig, run: Run) -> Planned:
    """The run, and the tokens that it reads without learning from them."""
    tokenizer, template, pairs = preference_run.prepare(config)
    splits = pairs.named()
    numbers = {name: _unknown(split) for name, split in splits.items()} if config.prefer.compares else None
    good = pairs.map(lambda split: split.good)
    single = PlannedPreferences(config, run, Silent(), tokenizer, template, good, pairs=pairs, numbers=numbers)
    train = pairs.train
    looked = 0.0 if train.others is None else float(train.others.lengths.sum() / train.lengths.sum())
    return Planned(single, looked, sum(map(_read, splits.values())) if config.prefer.compares else 0)


def _read(rows: PreferenceSet) -> int:
    """Tokens that a reference reads of a set."""
    return int(rows.lengths.sum()) + (0 if rows.others is None else int(rows.others.lengths.sum()))


def _unknown(rows: PreferenceSet) -> AnswerNumbers:
    count = len(rows.answers)
    return AnswerNumbers(np.zeros(count), np.zeros(count), None if rows.others is None else np.zeros(count))


LONGER = 1.5
"""Times that chosen answers are as long as rejected ones, from which on length alone tells them apart."""


def _rendered(
    rows: PreferenceSet, example: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield title and pieces of each answer of an example."""
    for answer in range(example * rows.each, (example + 1) * rows.each):
        good = bool(rows.desired[answer])
        tie = rows.paired and bool(rows.ties[example])
        word = "tie" if tie else ("chosen" if good else "rejected") if rows.paired else ("good" if good else "bad")
        yield f"{rows.place(example)}, {word}", pieces(rows.answers[answer], tokenizer, rows.answers.processor)


def _sizes(train: PreferenceSet, held_out: PreferenceSet) -> Iterator[str]:
    for name, rows in {"Training": train, "Held-out": held_out}.items():
        good, prompts = int(rows.desired.sum()), len(np.unique(rows.answers.digests))
        kind = f"{len(rows):,} pairs" if rows.paired else f"{good:,} good and {len(rows) - good:,} bad answers"
        yield f"{name}: {kind} to {prompts:,} prompts; all answers to a prompt are on one side."


def _lengths(train: PreferenceSet) -> Iterator[str]:
    """Yield a sentence on the answers' lengths, by which alone a model may learn to tell them apart."""
    count_S = train.answer_tokens
    good_S = train.desired
    if good_S.all() or not good_S.any():
        what = "good" if good_S.all() else "bad"
        yield f"Every answer is {what}: nothing tells what to avoid. Give rows of both labels."
        return
    mean, other = float(count_S[good_S].mean()), float(count_S[~good_S].mean())
    words = ("Chosen", "rejected") if train.paired else ("Good", "bad")
    yield f"{words[0]} answers have {mean:,.0f} tokens on average, {words[1]} ones {other:,.0f}."
    if max(mean, other) > LONGER * min(mean, other):
        yield (
            "  Length alone tells most of them apart, and that is what is learnt first. "
            "prefer.length=desensitised or mean counts longer answers less."
        )


class PreferenceTask(TokenTask):
    """Better answers become likelier."""

    scores_later = False

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> PreferenceRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, template, pairs = preference_run.prepare(config)
        provenance.note_data(run, pairs.facts())
        decontamination.write_matches(pairs.train.answers.contamination, run)
        # The reference reads every answer once and is gone, so that there is one model in memory from here on.
        return preference_run.unasked(config, run, callback, tokenizer, template, pairs, loader=loader).asked()

    def inspect(self, config: RunConfig) -> Inspection:
        tokenizer, _, pairs = preference_run.prepare(config)
        train, mixed = pairs.train, mixture.mixed(pairs.train, config)
        steps = total_steps(config, len(mixed))
        shown = evenly_spaced(len(train), SHOWN).tolist()
        model = backbones.skeleton(
            config.model, task=model_heads.of(config), trainable=isinstance(config.adapter, Full)
        )
        return Inspection(
            config=config,
            data=pairs.map(lambda split: split.answers),
            examples=[each for example in shown for each in _rendered(train, example, tokenizer)],
            targets=config.adapter.modules(model),
            steps=steps,
            notes=[
                *mixture.in_words(mixed, config, steps),
                *_sizes(pairs.train, pairs.held_out),
                *_lengths(train),
                *left_out(*pairs.map(lambda split: split.answers)),
                *(train.answers.contamination.sentences if train.answers.contamination else ()),
                *preference_reference.in_words(config, tokenizer),
            ],
        )

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        model = exported.load(run, config)
        assert isinstance(model.template, ChatEncoder)
        rows = preference_run.scored_rows(config, model.tokenizer, model.template)
        finished = Run(run, None, resumed=True)
        splits = Splits(rows, rows, None)
        scoring = preference_run.unasked(config, finished, Silent(), model.tokenizer, model.template, splits).asked()
        return scoring.score(model, rows).scores

    def dry(self, config: RunConfig, run: Run) -> DryTask:

        single, looked, once = planned(config, run)
        return dry_text(single, looked=looked, once=once)

    def plan_notes(self, config: RunConfig) -> Sequence[str]:
        if not config.prefer.compares:
            return ()
        reference = token_reference.named(preference_reference.wanted(config), config)
        if reference.source.model.id == config.model.id:
            return ()
        return [f"The reference, {reference.source.name}, is taken to be as large as the model that trains."]

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        return survey(files, PreferenceEncoder(conversations(config, backbones.tokenizer(config.model))))

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        return {"reference": preference_reference.files(config)}


TASK = PreferenceTask()
