"""Rewards of reward models: one, or the mean of several less their disagreement.

Legend: M models, S answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config.sections.reward_config import RewardConfig
from workbench.config.sections.rewards_config import ModelReward
from workbench.data.batching import Indices, Row
from workbench.data.text import stepwise
from workbench.data.text.chat import ChatEncoder, Encoded, truncate
from workbench.data.text.generated_answers import Answer
from workbench.data.text.stepwise import StepEncoder
from workbench.errors import ConfigError
from workbench.evaluation import step_scores
from workbench.evaluation.row_passes import over_rows
from workbench.models import reward_model
from workbench.models.reward_model import RewardModel
from workbench.runs import run_directory
from workbench.runs.trust import Trust

Floats = npt.NDArray[np.float64]


class Rater(NamedTuple):
    """A reward model that is loaded."""

    model: RewardModel
    max_tokens: int
    """Tokens that it reads at most."""
    config: RewardConfig

    @property
    def steps(self) -> bool:
        """Whether it rates the steps of an answer."""
        return self.config.kind == "process"


class RewardEnsemble:
    """Reward models of one or several run directories of recipe reward.

    Raises:
        ConfigError: A run is none of recipe reward, or not finished, or rates no steps where these are aggregated.
    """

    def __init__(self, config: ModelReward) -> None:
        self._config = config
        runs = [member for run in config.runs for member in run_directory.fold_members(run.expanduser())]
        self._models = [_load(run, config) for run in runs]

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return self.rated(answers)[0]

    def rated(self, answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
        """The reward of each answer, and the standard deviation of the models' rewards; 0 where there is one."""
        reward_MS = self.read(answers)
        return self.pessimistic(reward_MS), [float(each) for each in spread(reward_MS)]

    @property
    def several(self) -> bool:
        """Whether models can disagree."""
        return len(self._models) > 1

    def pessimistic(self, reward_MS: Floats) -> list[float]:
        """Mean of the models less `pessimism` times their standard deviation (M - 1 degrees of freedom)."""
        penalised_rewards: list[float] = (reward_MS.mean(0) - self._config.pessimism * spread(reward_MS)).tolist()
        return penalised_rewards

    def read(self, answers: Sequence[Answer]) -> Floats:
        """Reward (M, S) of each answer by each model."""
        return np.asarray([_read(model, answers) for model in self._models], dtype=np.float64)


def spread(reward_MS: Floats) -> Floats:
    """Standard deviation (S,) of the models, 0 where there is one."""
    if len(reward_MS) < 2:
        return np.zeros(reward_MS.shape[1])
    deviation_S: Floats = reward_MS.std(0, ddof=1)
    return deviation_S


def _load(run: Path, wanted: ModelReward) -> Rater:
    """The reward model of a run."""
    config = run_directory.shipped_config(run, Trust(wanted.trust, "trust: true beside the run in rewards"))
    if config.recipe != "reward":
        raise ConfigError(
            f"rewards, model: {run} is a run of recipe {config.recipe}, which tells no reward. Name a run of recipe "
            "reward: workbench run reward/quickstart data.train=pairs.jsonl"
        )
    own = config.reward
    if wanted.aggregate is not None:
        if own.kind != "process":
            raise ConfigError(
                f"rewards, model: aggregate={wanted.aggregate} is for models that rate steps, and {run} rates whole "
                "answers. Leave aggregate out, or name a run with reward.kind=process."
            )
        own = own.model_copy(update={"aggregate": wanted.aggregate})
    return Rater(reward_model.load(run, config, ChatEncoder), config.data.max_tokens, own)


def _read(rater: Rater, answers: Sequence[Answer]) -> list[float]:
    """The reward of each answer: the model's output, or the aggregate of how sure it is that each step is right."""
    model, template = rater.model, rater.model.template
    wholes = [_encoded(rater, answer) for answer in answers]
    cut = [truncate(whole, max_tokens=rater.max_tokens, side="left") for whole in wholes]
    rows = [Row(np.asarray(each.input_ids), np.asarray(each.supervised)) for each in cut]
    device, combine = next(model.model.parameters()).device, step_scores.AGGREGATES[rater.config.aggregate]

    def compute(numbers: Indices) -> list[float]:
        batch = template.collate([rows[number] for number in numbers], epoch=0).to(device)
        if not rater.steps:
            batch_rewards: list[float] = model.rewards(batch).double().cpu().tolist()
            return batch_rewards
        logits = model.step_logits(replace(batch, positions_N=batch.positions_N + 1)).double().cpu()
        counts = [int(rows[number].supervised[1:].sum()) for number in numbers]
        return [combine(each.sigmoid().numpy()) for each in logits.split(counts)]

    reward_by_row = over_rows(model.model, np.asarray([len(row.input_ids) for row in rows]), compute)
    return [reward_by_row[number] for number in range(len(rows))]


def _encoded(rater: Rater, answer: Answer) -> Encoded:
    """An answer behind its prompt; one of nothing but white space is written as the end that follows the prompt."""
    template, text = rater.model.template, answer.text
    if text.strip() or not answer.messages:
        (example,) = template.expanded(answer.example, loss_on="last")
        if not rater.steps:
            return template.encode(example, loss_on="last")
        steps = stepwise.parted(text, rater.config.separator) or (text,)
        return StepEncoder(template, labelled=False).encode(replace(example, steps=steps), loss_on="last")
    ids = [*template.prompt(answer.messages, answer.tools), *template.stops()[:1]]
    return Encoded(ids, [False] * (len(ids) - 1) + [rater.steps])
