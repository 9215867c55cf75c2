"""Reward models: judged answers in, a number for how good an answer is, its scores and a report out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig, model_heads
from workbench.config.sections.basic_sections import MARGIN
from workbench.data import mixture, named_sets
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.held_out_split import Splits
from workbench.data.labelled.labels import Labels
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import (
    PreferenceEncoder,
    PreferenceSet,
    RatedPairs,
    preference_set,
    require_preferences,
)
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import reward_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.evaluation.reward_scores import Floats
from workbench.models import backbones, reward_model
from workbench.models.backbones import Backbone
from workbench.models.reward_model import RewardModel
from workbench.recipes.single import word_run
from workbench.recipes.single.single_run import Scored
from workbench.recipes.tasks.reward.reward_run import RatingRun
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import run_directory
from workbench.training import preflight
from workbench.training.bank_trainer import Objective
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.text.conversation_views import ConversationView

Scores = dict[str, Any]


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[PreferenceSet], list[str]]:
    """Tokenizer, form of the rows, data, and the names of the modules that get an adapter; refuses what would fail."""
    backbones.of_one_sequence(config.model, recipe="reward")
    tokenizer = backbones.tokenizer(config.model)
    reward_model.settle_padding(tokenizer)
    template = conversations(config, tokenizer)
    data = read(config, tokenizer, template)
    pairs = data.map(lambda split: preference_set(split, pairs=True))
    require_preferences(pairs)
    _require_views(pairs.held_out, config, tokenizer)
    train = mixture.mixed(pairs.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(pairs.named().values())
    return tokenizer, template, pairs, preflight.require_backbone(config, splits, model_heads.of(config))


def _require_views(rows: PreferenceSet, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where the held-out pairs could not judge a view."""
    if not config.tta.wanted:
        return
    from workbench.crossval import run_views  # which few runs ask for

    run_views.require_witnesses(rows.answers.source, prompts(rows)[~rows.ties])
    for view in seen(rows.answers, config, tokenizer):
        pairs = ((rows.answers[row].input_ids, view[row].input_ids) for row in range(len(view)))
        run_views.require_change(rows.answers.source, view.name, pairs)


def seen(answers: TokenizedSet, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[ConversationView]:
    """Answers in each view that `tta` names."""
    from workbench.data.text import conversation_views  # which few runs ask for

    max_tokens = config.data.max_tokens
    return conversation_views.views(answers, config.tta, tokenizer, seed=config.seed, max_tokens=max_tokens)


def read(config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: ChatEncoder) -> Splits[TokenizedSet]:
    """All answers of each split."""
    scored = without_margins(config.data)
    return tokenized.load(config.data, tokenizer, PreferenceEncoder(template), seed=config.seed, scored=scored)


def without_margins(data: DataConfig) -> DataConfig:
    """The same for rows that are scored, which no margin changes: their file needs none."""
    return data.model_copy(update={"columns": {name: own for name, own in data.columns.items() if name != MARGIN}})


@dataclass(frozen=True)
class RewardRun(RatingRun[PreferenceSet]):
    """A run that learns how good answers are, from pairs of them."""

    pairs: Splits[PreferenceSet]

    @property
    def rows(self) -> Mapping[str, PreferenceSet]:
        return self.pairs.named()

    def baseline(self) -> dict[str, float]:
        return reward_scores.reward_baseline(self.pairs.held_out)

    @property
    def sampled_rows(self) -> Examples:
        return mixture.mixed(RatedPairs(self.pairs.train.answers, paired=True), self.config)

    def member_outputs(self, live: RewardModel, batch: MicroBatch) -> Tensor:
        return live.step_logits(batch)

    def member_loss(self, live: RewardModel) -> Objective:
        loss = reward_model.judged_loss(self.pairs.train, centre=self.config.reward.centre)
        return lambda outputs, labels, scale: loss(outputs, labels[::2, 0].cpu().numpy() // 2, scale)

    def on_held_out(self, rows: Indices) -> RewardRun:
        return replace(self, pairs=self.pairs._replace(held_out=self.pairs.held_out.subset(rows)))

    def supervise(self, live: RewardModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        train = self.pairs.train
        loss = live.pair_loss(train, centre=self.config.reward.centre)
        return TrainingSignal(mixture.mixed(train, self.config), loss, reads_packed=self.packs(live))

    @property
    def pictured(self) -> bool:
        return self.pairs.train.answers.pictured

    def held_out_loss(self, live: RewardModel) -> tuple[float, Mapping[str, float]]:
        scores, _ = score(self.run.home, live, self.pairs.held_out, self.config)
        return scores["loss"], {"held_out_reward[accuracy]": scores["accuracy"]} | named_sets.held_out_losses(scores)

    def score(self, model: RewardModel, rows: PreferenceSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            return Scored(*score(self.run.home, model, rows, self.config, scoring))

    def decide_views(self, model: RewardModel, scoring: ModelResults) -> Mapping[str, Any] | None:
        from workbench.crossval import gains, run_views  # which few runs ask for

        rows = self.pairs.held_out
        reward_VS = rewards_in_views(model, rows.answers, self.config, scoring)
        gap_P, merged_P = (np.diff(each.reshape(-1, 2))[:, 0][~rows.ties] for each in (reward_VS[0], reward_VS.mean(0)))
        before_P2, after_P2 = (special.expit(np.stack([-gap, gap], axis=1)) for gap in (gap_P, merged_P))
        gain = gains.gain(
            Labels("pair", ("chosen", "rejected")),
            before_P2,
            after_P2,
            np.tile(np.asarray([1, 0], dtype=np.float32), (len(gap_P), 1)),
            least=self.config.tta.least_gain,
            groups_N=prompts(rows)[~rows.ties],
        )
        gain = run_views.settled(self.config, gain)
        why = f"{len(reward_VS) - 1} views of all pairs. {gain.sentence}"
        run_views.tell(self.config, self.run, self.callback, gain, why)
        return word_run.view_facts(self.config.tta) if gain.accepted else None

    def predictions(
        self, model: RewardModel, rows: PreferenceSet, outputs: Floats, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return table(model, rows, outputs)


def rewards_in_views(
    model: RewardModel, answers: TokenizedSet, config: RunConfig, scoring: ModelResults | None = None
) -> Floats:
    """Rewards (V, S) of answers as they are, and in each view that `tta` names."""
    views: list[TokenizedSet | ConversationView] = [answers, *seen(answers, config, model.tokenizer)]
    return np.stack([reward_scores.read_rewards(model, each, scoring=scoring) for each in views])


def rewards(
    run: Path, model: RewardModel, answers: TokenizedSet, config: RunConfig, scoring: ModelResults | None = None
) -> Floats:
    """Reward (S,) of each answer by the model of the run at `run`: the mean over views, where it decided so."""
    if run_directory.reads_views(run, config):
        mean_S: Floats = rewards_in_views(model, answers, config, scoring).mean(0)
        return mean_S
    return reward_scores.read_rewards(model, answers, scoring=scoring)


def prompts(rows: PreferenceSet) -> Indices:
    """Number of the prompt (P,) of each pair: the tokens that both its answers begin with."""
    shared = []
    for pair in range(len(rows)):
        one, other = (rows.answers[2 * pair + side].input_ids for side in (0, 1))
        length = min(len(one), len(other))
        parts = np.flatnonzero(one[:length] != other[:length])
        shared.append(one[: parts[0] if len(parts) else length].tobytes())
    return np.unique(shared, return_inverse=True)[1]


def score(
    run: Path, model: RewardModel, rows: PreferenceSet, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[dict[str, float], Floats]:
    """Scores of a run's reward model on pairs, and the reward of each answer (S,)."""
    reward_S = rewards(run, model, rows.answers, config, scoring)
    return reward_scores.reward_scores_by_set(rows, reward_S, centre=config.reward.centre), reward_S


def table(model: RewardModel, rows: PreferenceSet, reward_S: Floats) -> pd.DataFrame:
    """One line a pair: its two answers behind their prompt, their rewards, and the chosen answer's margin."""
    import pandas as pd  # 0.2 s, which a plan need not wait for

    texts = [str(model.tokenizer.decode(rows.answers[row].input_ids)) for row in range(len(rows.answers))]
    chosen_P, rejected_P = reward_S.reshape(-1, 2).T
    return pd.DataFrame(
        {
            "row": [rows.place(example) for example in range(len(rows))],
            "text": texts[::2],
            "rejected": texts[1::2],
            "chosen_reward": chosen_P,
            "rejected_reward": rejected_P,
            "margin": chosen_P - rejected_P,
            "tie": rows.ties,
        }
    )
