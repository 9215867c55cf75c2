"""The task `reward` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.preference_pairs import PreferenceEncoder, PreferenceSet, preference_set
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import reward_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.evaluation.reward_scores import Floats
from workbench.evaluation.rewards import SPREAD
from workbench.evaluation.rewards.reward_sum import spread
from workbench.models import backbones, reward_model
from workbench.models.backbones import Loader
from workbench.models.reward_model import RewardModel
from workbench.recipes.inspection import SHOWN, Inspection, left_out, pieces
from workbench.recipes.task import (
    ROWS,
    DryTask,
    PredictionTable,
    RowFile,
    Scores,
    ScoringOptions,
    Task,
    largest_numbers,
)
from workbench.recipes.tasks.classify.task import Gap, NumberReference
from workbench.recipes.tasks.reward import outcome_reward, process_reward
from workbench.recipes.tasks.reward.outcome_reward import RewardRun
from workbench.recipes.tasks.reward.process_reward import ProcessRun
from workbench.recipes.tasks.reward.reward_run import load
from workbench.recipes.tasks.sft.task import survey
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import run_directory, units
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.text.quality.survey import SourceRows


def _word(rows: PreferenceSet, example: int, side: int) -> str:
    return "tie" if rows.ties[example] else ("chosen", "rejected")[side]


def _by_members(run: Path, config: RunConfig, rows: TokenizedSet, scoring: ModelResults | None) -> Floats:
    """Reward (M, S) of each answer by each model of a cross-validation; by the one model of another run."""
    reward_MS = []
    for each in run_directory.fold_members(run):
        own = None if scoring is None else scoring.store.by(each.name)
        reward_MS.append(outcome_reward.rewards(run, load(each, config), rows, config, own))
    return np.asarray(reward_MS, dtype=np.float64)


def held_out(model: RewardModel, config: RunConfig) -> TokenizedSet:
    """The held-out answers."""
    if config.reward.kind == "process":
        return process_reward.held_out(model, config).answers
    return outcome_reward.read(config, model.tokenizer, model.template).held_out


class RewardReference(NumberReference[RewardModel, TokenizedSet]):
    """Rewards of answers."""

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        again = reward_model.make(model, backbone, self.tokenizer, self.unmerged.template, self.config)
        return self._gap(reward_scores.read_rewards(again, self.rows))


class RewardTask(Task):
    """Rewards of answers, or of their steps."""

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> RewardRun | ProcessRun:
        if config.reward.kind == "process":
            return ProcessRun(config, run, callback, *process_reward.prepare(config)[:3], loader=loader)
        return RewardRun(config, run, callback, *outcome_reward.prepare(config)[:3], loader=loader)

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        rewards = self.begin(config, run, callback)
        rewards.note_rows()
        rewards.train()
        return rewards.finish()

    def inspect(self, config: RunConfig) -> Inspection:
        if config.reward.kind == "process":
            return process_reward.inspect(config)
        tokenizer, _, pairs, targets = outcome_reward.prepare(config)
        train, mixed = pairs.train, mixture.mixed(pairs.train, config)
        steps = total_steps(config, len(mixed))
        shown, processor = evenly_spaced(len(train), SHOWN).tolist(), train.answers.processor
        examples = [
            (
                f"{train.place(example)}, {_word(train, example, side)}",
                [(text, side == 0) for text, _ in pieces(train.answers[2 * example + side], tokenizer, processor)],
            )
            for example in shown
            for side in (0, 1)
        ]
        ties, count_P2 = int(train.ties.sum()), train.answer_tokens.reshape(-1, 2)[~train.ties]
        longer = float((count_P2[:, 0] > count_P2[:, 1]).mean())
        notes = [f"{ties:,} of {len(train):,} pairs are ties, whose rewards are to be equal."] if ties else []
        sentence = f"Of {len(count_P2):,} pairs the longer answer is the better one in {units.percent(longer)}."
        return Inspection(
            config=config,
            data=pairs.map(lambda split: split.answers),
            examples=examples,
            targets=targets,
            steps=steps,
            notes=[
                *mixture.in_words(mixed, config, steps),
                *notes,
                sentence + (" A reward model learns length first." if abs(longer - 0.5) > 0.15 else ""),
                *left_out(*pairs.map(lambda split: split.answers)),
            ],
        )

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        if config.reward.kind == "process":
            return process_reward.evaluate(run, config, turn.scoring)
        model = load(run_directory.fold_members(run)[0], config)
        data = outcome_reward.without_margins(config.data)
        rows = tokenized.read_files(data.test_files, data, model.tokenizer, PreferenceEncoder(model.template))
        if rows is None:
            held = preference_set(held_out(model, config), pairs=True)
            return outcome_reward.score(run, model, held, config, turn.scoring)[0]
        reward_MS = _by_members(run, config, rows, turn.scoring)
        scores = reward_scores.reward_scores_by_set(
            preference_set(rows, pairs=True), reward_MS.mean(0), centre=config.reward.centre
        )
        return scores | ({SPREAD: round(float(spread(reward_MS).mean()), 6)} if len(reward_MS) > 1 else {})

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        if config.reward.kind == "process":
            return process_reward.predict(run, source, config, turn.scoring)
        model = load(run_directory.fold_members(run)[0], config)
        rows = tokenized.read(
            source, outcome_reward.without_margins(config.data), model.tokenizer, PreferenceEncoder(model.template)
        )
        reward_MS = _by_members(run, config, rows, turn.scoring)
        columns = {
            "row": [rows.place(row) for row in range(len(rows))],
            "text": [str(model.tokenizer.decode(rows[row].input_ids)) for row in range(len(rows))],
            "reward": reward_MS.mean(0),
        }
        columns |= {SPREAD: spread(reward_MS)} if len(reward_MS) > 1 else {}
        return PredictionTable(pd.DataFrame(columns), rows.skipped)

    def pooled(self, config: RunConfig, table: pd.DataFrame) -> dict[str, float]:
        from workbench.evaluation import reward_scores

        if config.reward.kind == "process":
            return {}
        judged = table[~table["tie"]]
        return reward_scores.of_gaps((judged["chosen_reward"] - judged["rejected_reward"]).to_numpy())

    def outputs(self, run: Path, config: RunConfig) -> RewardReference:
        unmerged = load(run, config)
        rows = held_out(unmerged, config)
        rows = rows.subset(np.arange(min(ROWS, len(rows))))
        return RewardReference(config, unmerged, rows, reward_scores.read_rewards(unmerged, rows)[:, None])

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        single = self.begin(config, run, Silent())
        answers = single.rows["held_out"].answers
        return DryTask(single, largest_numbers(answers, lambda live, batch: live.rewards(batch)))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        template = conversations(config, backbones.tokenizer(config.model))
        steps = config.reward.kind == "process"
        encoder = process_reward.encoder(template, config) if steps else PreferenceEncoder(template)
        return survey(files, encoder)


TASK = RewardTask()
