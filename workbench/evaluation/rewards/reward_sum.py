"""The reward of a configuration: a weighted sum of its rewards, each of which is named where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from workbench.config.sections.rewards_config import (
    FunctionReward,
    JsonReward,
    ModelReward,
    NumberReward,
    PatternReward,
    RewardSource,
    UnitTestReward,
)
from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation.rewards.model_rewards import RewardEnsemble
from workbench.evaluation.rewards.unit_tests import UnitTestVerifier
from workbench.evaluation.rewards.user_function import UserFunction
from workbench.evaluation.rewards.verifiers import JsonVerifier, NumberVerifier, PatternVerifier, column
from workbench.runs import provenance, trust
from workbench.runs.trust import Trust

SPREAD = "reward_spread"
"""Name of the disagreement of reward models beside rewards by name."""


class Reward(Protocol):
    """Tells how good answers are."""

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """A finite number for each answer: the higher, the better."""


class Part(NamedTuple):
    """One of several rewards."""

    name: str
    weight: float
    score: Reward


class RewardSum:
    """A weighted sum of rewards, which is a Reward itself."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return self.total(self.named(answers), len(answers))

    def named(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """The reward of each answer by each part, without its weight.

        Raises:
            WorkbenchError: A part fails, takes too long, or gives no finite number for each answer; it is named.
        """
        return {part.name: _checked(part, answers, part.score(answers)) for part in self.parts} if answers else {}

    def detailed(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """As `named`; with SPREAD, where reward models are ensembles: how far their sum would be off by disagreement.

        The standard deviation over the models of an ensemble, times its weight; of several the root of the sum of
        squares, as if they were independent.
        """
        named, spread_S, several = dict[str, list[float]](), [0.0] * len(answers), False
        for part in self.parts if answers else ():
            if isinstance(part.score, RewardEnsemble) and part.score.several:
                part_rewards, spreads, several = *part.score.rated(answers), True
                spread_S = [math.hypot(all_, part.weight * own) for all_, own in zip(spread_S, spreads, strict=True)]
            else:
                part_rewards = part.score(answers)
            named[part.name] = _checked(part, answers, part_rewards)
        return named | {SPREAD: spread_S} if several else named

    def total(self, named: dict[str, list[float]], count: int) -> list[float]:
        """The weighted sum of what `named` gave for so many answers."""
        return [sum(part.weight * named[part.name][number] for part in self.parts) for number in range(count)]


def build(sources: Sequence[RewardSource], *, read_from: tuple[Path, Trust] | None = None) -> RewardSum:
    """The sum of the rewards that a configuration names.

    Args:
        read_from: The run directory whose configuration it is, and whether its code is trusted; None for one that a
            person gave to be run.

    Raises:
        ConfigError: A file, function, schema or run is not there or not right, or the machine has no sandbox.
    """
    if read_from is not None and not read_from[1].given:
        for source in sources:
            if isinstance(source, FunctionReward):
                raise trust.refused(read_from[0], f"its rewards need {source.file}", read_from[1])
    names = [source.name for source in sources]
    numbered = [f"{name} {1 + names[:number].count(name)}" for number, name in enumerate(names)]
    return RewardSum(
        [
            Part(name if names.count(name) == 1 else long, source.weight, _MADE[type(source)](source))
            for name, long, source in zip(names, numbered, sources, strict=True)
        ]
    )


def require_columns(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse rows without a column that a reward reads, before anything is answered.

    Args:
        rows: Place and columns of each, by their names in the file.

    Raises:
        DataError: A row lacks one; it is named.
    """
    for place, columns in rows:
        for source in sources:
            for name in source.columns:
                column(Answer("", "", row=columns, place=place), name, kind=source.kind)


def digests(sources: Sequence[RewardSource]) -> dict[str, str]:
    """Digests of the files that rewards are read from, by their names; one that is not there is left out."""
    digest_by_name: dict[str, str] = {}
    for path in (path for source in sources for path in source.files):
        place = path.expanduser()
        digest_by_name |= {str(path): provenance.digest(place)} if place.is_file() else {}
        digest_by_name |= provenance.digests(place, title=str(path)) if place.is_dir() else {}
    return digest_by_name


_MADE: dict[type[RewardSource], Callable[..., Reward]] = {
    FunctionReward: UserFunction,
    NumberReward: NumberVerifier,
    PatternReward: PatternVerifier,
    JsonReward: JsonVerifier,
    UnitTestReward: UnitTestVerifier,
    ModelReward: RewardEnsemble,
}
"""The reward that scores answers, from the section of its kind."""


def _checked(part: Part, answers: Sequence[Answer], part_rewards: list[float]) -> list[float]:
    for answer, value in zip(answers, part_rewards, strict=True):
        if not math.isfinite(value):
            raise ConfigError(
                f"rewards, {part.name}: the reward of an answer is {value}, which nothing can be learnt from: "
                f"{answer.place}, {excerpt(answer.text)}. Let it give a finite number for every answer."
            )
    return part_rewards
