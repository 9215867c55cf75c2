"""`check` and `evaluate` of recipe prefer: both answers of a pair as the model sees them, and how it judges them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.data import mixture
from workbench.data.batching import evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.models import backbones, exported
from workbench.recipes.inspection import SHOWN, Inspection, left_out, pieces
from workbench.recipes.tasks.prefer import preference_reference, preference_run
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Silent
from workbench.training.optim.schedules import total_steps

LONGER = 1.5
"""Times that chosen answers are as long as rejected ones, from which on length alone tells them apart."""


def inspect(config: RunConfig) -> Inspection:
    """Findings of `check`, for a run that is not refused."""
    tokenizer, _, pairs = preference_run.prepare(config)
    train, mixed = pairs.train, mixture.mixed(pairs.train, config)
    steps = total_steps(config, len(mixed))
    shown = evenly_spaced(len(train), SHOWN).tolist()
    model = backbones.skeleton(config.model, task=model_heads.of(config), trainable=isinstance(config.adapter, Full))
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
            *left_out(train.answers),
            *preference_reference.in_words(config, tokenizer),
        ],
    )


def evaluate(path: Path, config: RunConfig) -> dict[str, float]:
    """Scores of the saved adapter of the run at `path`, on test rows where there are any, else on the held-out ones."""
    model = exported.load(path, config)
    assert isinstance(model.template, ChatEncoder)
    rows = preference_run.scored_rows(config, model.tokenizer, model.template)
    run = Run(path, None, resumed=True)
    splits = Splits(rows, rows, None)
    scoring = preference_run.unasked(config, run, Silent(), model.tokenizer, model.template, splits).asked()
    return scoring.score(model, rows).scores


def _rendered(
    rows: PreferenceSet, example: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield title and pieces of each answer of an example."""
    for answer in range(example * rows.each, (example + 1) * rows.each):
        good = bool(rows.desired[answer])
        tie = rows.paired and bool(rows.ties[example])
        word = "tie" if tie else ("chosen" if good else "rejected") if rows.paired else ("good" if good else "bad")
        yield f"{rows.place(example)}, {word}", pieces(rows.answers[answer], tokenizer)


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
