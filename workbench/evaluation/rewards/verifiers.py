"""Verifiers of answers by their text alone: numbers, regular expressions, JSON, and the code in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from workbench.config.sections.rewards_config import JsonReward, NumberReward, PatternReward
from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.data.time_limit import time_limit
from workbench.errors import ConfigError, DataError
from workbench.evaluation.rewards import json_schema
from workbench.schema import did_you_mean

_MARK = "####"
"""GSM8K writes the result behind it."""
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}\b)?"
)
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def number_in(text: str) -> Decimal | None:
    """The first number behind the last `####`, or else the last one of the text; None where there is none."""
    _, mark, behind = text.rpartition(_MARK)
    numbers = _NUMBER.findall(behind if mark else text)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", "").replace("\u2212", "-"))


def fenced(text: str) -> str:
    """The last block between lines of three backticks, or all of a text that has none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def column(answer: Answer, name: str, *, kind: str) -> Any:
    """The column of an answer's row that a verifier reads.

    Raises:
        DataError: The row has none of that name.
    """
    if answer.row.get(name) is None:
        raise DataError(
            f"{answer.place}: no column `{name}`, which the reward of kind={kind} reads."
            + did_you_mean(name, [key for key, value in answer.row.items() if value is not None])
            + " Name another one in rewards, or add it to the row."
        )
    return answer.row[name]


class NumberVerifier:
    """1 where an answer's number is that of its row, else 0."""

    def __init__(self, config: NumberReward) -> None:
        self._config = config

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> float:
        right = column(answer, self._config.answer, kind="number")
        wanted, predicted = number_in(str(right)), number_in(answer.text)
        if wanted is None:
            raise DataError(
                f"{answer.place}: `{self._config.answer}` holds no number, found {excerpt(right)}. Correct the row, or "
                "name another column as `answer` of the reward."
            )
        return float(predicted is not None and abs(predicted - wanted) <= Decimal(str(self._config.tolerance)))


class PatternVerifier:
    """1 where a regular expression is found in an answer, and its first group where the row has it, else 0."""

    def __init__(self, config: PatternReward) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern)
        if config.answer is not None and not self._pattern.groups:
            raise ConfigError(
                f"rewards, regex: {config.pattern!r} has no group to compare with column `{config.answer}`. Put the "
                "part to compare into brackets, or leave `answer` out."
            )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        with time_limit(self._endless, seconds=self._config.timeout):
            return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> float:
        search = self._pattern.fullmatch if self._config.whole else self._pattern.search
        match = search(answer.text)
        if match is None or self._config.answer is None:
            return float(match is not None)
        right = str(column(answer, self._config.answer, kind="regex"))
        return float((match[1] or "").strip() == right.strip())

    def _endless(self) -> ConfigError:
        return ConfigError(
            f"rewards, regex: {self._config.pattern!r} took more than {self._config.timeout:g} s. Write a pattern "
            "without repetitions inside of repetitions, or a higher timeout for it."
        )


class JsonVerifier:
    """1 where an answer, or its last fenced block, is JSON that fits a schema, else 0."""

    def __init__(self, config: JsonReward) -> None:
        self._schema, self._timeout = json_schema.validator(config.json_schema), config.timeout

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        with time_limit(self._endless, seconds=self._timeout):
            return [self._score(fenced(answer.text)) for answer in answers]

    def _score(self, text: str) -> float:
        try:
            return float(self._schema.is_valid(json.loads(text, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return 0.0

    def _endless(self) -> ConfigError:
        return ConfigError(
            f"rewards, json: the schema took more than {self._timeout:g} s on some answers. Write its patterns without "
            "repetitions inside of repetitions, or a higher timeout for it."
        )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
