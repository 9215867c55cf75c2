"""Reward models: judged answers in, a number for how good an answer is, its scores and a report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig, model_heads
from workbench.config.sections.basic_sections import MARGIN
from workbench.data import mixture, named_sets
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.held_out_split import Splits
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
from workbench.recipes.single.single_run import Scored
from workbench.recipes.tasks.reward.reward_run import RatingRun, chat_encoder
from workbench.training import preflight
from workbench.training.bank_trainer import Objective
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[PreferenceSet], list[str]]:
    """Tokenizer, form of the rows, data, and the names of the modules that get an adapter; refuses what would fail."""
    backbones.of_one_sequence(config.model, recipe="reward")
    tokenizer = backbones.tokenizer(config.model)
    reward_model.settle_padding(tokenizer)
    template = chat_encoder(config, tokenizer)
    data = read(config, tokenizer, template)
    pairs = data.map(lambda split: preference_set(split, pairs=True))
    require_preferences(pairs)
    train = mixture.mixed(pairs.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(pairs.named().values())
    return tokenizer, template, pairs, preflight.require_backbone(config, splits, model_heads.of(config))


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
        packed = live.classifier.reads_packed(self.config.adapter)
        return TrainingSignal(mixture.mixed(train, self.config), loss, reads_packed=packed)

    def held_out_loss(self, live: RewardModel) -> tuple[float, Mapping[str, float]]:
        scores, _ = score(live, self.pairs.held_out, self.config)
        return scores["loss"], {"held_out_reward[accuracy]": scores["accuracy"]} | named_sets.held_out_losses(scores)

    def score(self, model: RewardModel, rows: PreferenceSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            return Scored(*score(model, rows, self.config, scoring))

    def predictions(
        self, model: RewardModel, rows: PreferenceSet, outputs: Floats, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return table(model, rows, outputs)


def score(
    model: RewardModel, rows: PreferenceSet, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[dict[str, float], Floats]:
    """Scores of a reward model on pairs, and the reward of each answer (S,)."""
    reward_S = reward_scores.read_rewards(model, rows.answers, scoring=scoring)
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
