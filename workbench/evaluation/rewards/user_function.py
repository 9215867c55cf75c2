"""Rewards that a user's Python file defines: named where they fail, and bounded in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.config import plugins
from workbench.config.sections.rewards_config import FunctionReward
from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.data.time_limit import time_limit
from workbench.errors import ConfigError

SIGNATURE = "def {}(answers: list[Answer]) -> list[float]"


class UserFunction:
    """Scores answers by the function that a configuration names.

    Raises:
        ConfigError: The file has no such function, or fails.
    """

    def __init__(self, config: FunctionReward) -> None:
        self._config = config
        self._key = f"rewards, {config.function}"
        signature = SIGNATURE.format(config.function)
        self._function: Callable[..., Any] = plugins.function(
            config.file, config.function, signature, key="rewards.file"
        )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        values = self._call(list(answers))
        try:
            reward_values = [_number(value) for value in values]
        except (TypeError, ValueError):
            raise self._error(f"returned {excerpt(values)}. Return a list of numbers, one for each answer") from None
        if len(reward_values) != len(answers):
            raise self._error(
                f"returned {len(reward_values)} rewards for {len(answers)} answers. Return one for each answer"
            )
        return reward_values

    def _call(self, answers: list[Answer]) -> Any:
        seconds = self._config.timeout
        too_long = self._error(
            f"took more than {seconds:g} s for {len(answers)} answers, from {answers[0].place} on. Make it faster, or "
            "write a higher timeout for it"
        )
        try:
            with time_limit(lambda: _TookTooLong(), seconds=seconds, clock="wall"):
                return self._function(answers)
        except _TookTooLong:
            raise too_long from None
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise plugins.failed(self._config.file, error, key=f"{self._key}, from {answers[0].place} on") from error

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._key}: {self._config.function}() of {self._config.file} {problem}.")


class _TookTooLong(Exception):
    pass


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    return float(value)
