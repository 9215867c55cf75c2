"""Rewards of reward models: one, or the mean of several less their disagreement.

Legend: M models, S answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workbench.config.rewards_config import ModelReward
from workbench.data.batching import Indices, Row
from workbench.data.text.answer import Answer
from workbench.data.text.chat import ChatEncoder, Encoded, truncate
from workbench.errors import ConfigError
from workbench.evaluation.row_passes import over_rows
from workbench.models import reward_model
from workbench.models.reward_model import RewardModel
from workbench.runs import run_directory
from workbench.runs.trust import Trust

Floats = npt.NDArray[np.float64]


class RewardEnsemble:
    """Reward models of one or several run directories of recipe reward.

    Raises:
        ConfigError: A run is none of recipe reward, or not finished.
    """

    def __init__(self, config: ModelReward) -> None:
        self._config = config
        self._models = [_load(run, trust=config.trust) for run in config.runs]

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return self.pessimistic(self.read(answers))

    def pessimistic(self, reward_MS: Floats) -> list[float]:
        """Mean of the models less `pessimism` times their standard deviation (M - 1 degrees of freedom)."""
        penalised_rewards: list[float] = (reward_MS.mean(0) - self._config.pessimism * spread(reward_MS)).tolist()
        return penalised_rewards

    def read(self, answers: Sequence[Answer]) -> Floats:
        """Reward (M, S) of each answer by each model."""
        return np.asarray([_read(model, answers, tokens) for model, tokens in self._models], dtype=np.float64)


def spread(reward_MS: Floats) -> Floats:
    """Standard deviation (S,) of the models, 0 where there is one."""
    if len(reward_MS) < 2:
        return np.zeros(reward_MS.shape[1])
    deviation_S: Floats = reward_MS.std(0, ddof=1)
    return deviation_S


def _load(run: Path, *, trust: bool) -> tuple[RewardModel, int]:
    """The reward model of a run, and the tokens that it reads at most."""
    config = run_directory.shipped_config(run, Trust(trust, "trust: true beside the run in rewards"))
    if config.recipe != "reward":
        raise ConfigError(
            f"rewards, model: {run} is a run of recipe {config.recipe}, which tells no reward. Name a run of recipe "
            "reward: workbench run reward/quickstart data.train=pairs.jsonl"
        )
    return reward_model.load(run, config, ChatEncoder), config.data.max_tokens


def _read(model: RewardModel, answers: Sequence[Answer], max_tokens: int) -> list[float]:
    wholes = [_encoded(model.template, answer) for answer in answers]
    rows = [_row(truncate(whole, max_tokens=max_tokens, side="left"), number) for number, whole in enumerate(wholes)]
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[float]:
        batch = model.template.collate([rows[number] for number in numbers], epoch=0)
        batch_rewards: list[float] = model.rewards(batch.to(device)).double().cpu().tolist()
        return batch_rewards

    reward_by_row = over_rows(model.model, np.asarray([len(row.input_ids) for row in rows]), compute)
    return [reward_by_row[number] for number in range(len(rows))]


def _encoded(template: ChatEncoder, answer: Answer) -> Encoded:
    """An answer behind its prompt; one of nothing but white space is written as the end that follows the prompt."""
    if answer.text.strip() or not answer.messages:
        (example,) = template.expanded(answer.example, loss_on="last")
        return template.encode(example, loss_on="last")
    ids = [*template.prompt(answer.messages, answer.tools), *template.stops()[:1]]
    return Encoded(ids, [False] * len(ids))


def _row(whole: Encoded, number: int) -> Row:
    return Row(np.asarray(whole.input_ids), np.asarray(whole.supervised), 0, number)
