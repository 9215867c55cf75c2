"""Rewards of single answers: numbers, regular expressions, JSON schemas, unit tests, and functions of the user."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import plugins
from workbench.config.sections.rewards_config import (
    FunctionReward,
    JsonReward,
    LikelihoodReward,
    NumberReward,
    PatternReward,
    UnitTestReward,
    VoteReward,
)
from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.data.time_limit import time_limit
from workbench.errors import ConfigError, DataError
from workbench.evaluation.rewards import final_answers, math_equality, sandbox
from workbench.evaluation.rewards.final_answers import FinalAnswer
from workbench.evaluation.rewards.sandbox import SandboxLimits
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_ANNOTATIONS = ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples")
"""Keywords of a JSON schema that do not restrict values."""
_MOST_THREADS = 8  # answers that are tested at the same time where `threads` is auto, at most
SIGNATURE = "def {}(answers: list[Answer]) -> list[float]"


def fenced(text: str) -> str:
    """The last block between lines of three backticks; the whole text where there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def column(answer: Answer, name: str, *, kind: str) -> Any:
    """The column of an answer's row that a verifier reads. Raises DataError: the row has none of that name."""
    if answer.row.get(name) is None:
        raise DataError(
            f"{answer.place}: no column `{name}`, which the reward of kind={kind} reads."
            + did_you_mean(name, [key for key, value in answer.row.items() if value is not None])
            + " Name another one in rewards, or add it to the row."
        )
    return answer.row[name]


def reference(answer: Answer, name: str) -> FinalAnswer:
    """The right answer of an answer's row. Raises DataError: the column holds neither one number nor one expression, or
    an expression that no installed library compares."""
    cell = column(answer, name, kind="number")
    right = final_answers.of_reference(str(cell))
    if right is None:
        raise _no_reference(answer, name, "holds no number, or more than one")
    if right.number is None and not math_equality.installed():
        raise DataError(
            f"{answer.place}: `{name}` is {excerpt(cell)}, which is not one number, and comparing sets, intervals and "
            "formulas needs math-verify. Run: pip install 'peft-workbench[math]', or name another column."
        )
    return right


def _no_reference(answer: Answer, name: str, problem: str) -> DataError:
    return DataError(
        f"{answer.place}: `{name}` {problem}, found {excerpt(answer.row[name])}. Correct the row, such as to `3/4` or "
        "`#### 72`, or name another column as `answer` of the reward."
    )


class NumberVerifier:
    """1 where the final answer equals that of its row, else 0."""

    def __init__(self, config: NumberReward) -> None:
        self._config = config

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        name, tolerance = self._config.answer, self._config.tolerance
        right = [reference(answer, name) for answer in answers]
        own = [final_answers.of_answer(answer.text) for answer in answers]
        scores = [float(b is not None and a.equals(b, tolerance=tolerance)) for a, b in zip(right, own, strict=True)]
        formulas = [n for n, (a, b) in enumerate(zip(right, own, strict=True)) if a.number is None and b is not None]
        pairs = [(right[n].expression, b.expression) for n in formulas if (b := own[n]) is not None]
        for n, verdict in zip(formulas, math_equality.equal(pairs), strict=True):
            if verdict is None:
                raise _no_reference(answers[n], name, "has no mathematical meaning")
            scores[n] = float(verdict)
        return scores


class Vote:
    """The share of the answers to a prompt that say what an answer says, its own voice included."""

    def __init__(self, config: VoteReward) -> None:
        pass

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        groups: dict[tuple[str, str], list[FinalAnswer]] = {}
        said = [_said(answer.text) for answer in answers]
        asked = [(answer.place, answer.prompt) for answer in answers]
        for key, own in zip(asked, said, strict=True):
            groups.setdefault(key, []).append(own)
        return [
            sum(_agree(own, other) for other in groups[key]) / len(groups[key])
            for key, own in zip(asked, said, strict=True)
        ]


def _said(text: str) -> FinalAnswer:
    return final_answers.of_answer(text) or FinalAnswer(None, text)


def _agree(one: FinalAnswer, other: FinalAnswer) -> bool:
    words = [" ".join(each.expression.casefold().split()) for each in (one, other)]
    return one.equals(other, tolerance=0) or (one.number is None and other.number is None and words[0] == words[1])


class WriterLikelihood:
    """How likely an answer was to its writer, which came with it."""

    def __init__(self, config: LikelihoodReward) -> None:
        pass

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        known = [answer.likelihood for answer in answers if answer.likelihood is not None]
        assert len(known) == len(answers), "the writer is asked for it"
        return known


class PatternVerifier:
    """1 where a regular expression matches an answer (and its first group equals the row's column), else 0."""

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
    """1 where an answer, or its last fenced block, is JSON that satisfies a schema, else 0."""

    def __init__(self, config: JsonReward) -> None:
        self._schema, self._timeout = schema_validator(config.json_schema), config.timeout

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        with time_limit(self._endless, seconds=self._timeout):
            return [self._score(fenced(answer.text)) for answer in answers]

    def _score(self, text: str) -> float:
        def refuse(constant: str) -> None:  # NaN and Infinity, which Python's parser accepts
            raise ValueError(f"{constant} is not JSON")

        try:
            return float(self._schema.is_valid(json.loads(text, parse_constant=refuse)))
        except (ValueError, RecursionError):
            return 0.0

    def _endless(self) -> ConfigError:
        return ConfigError(
            f"rewards, json: the schema took more than {self._timeout:g} s on some answers. Write its patterns without "
            "repetitions inside of repetitions, or a higher timeout for it."
        )


def schema_validator(source: Path | Mapping[str, Any]) -> Validator:
    """A validator for a JSON schema, of the draft that the schema names, else 2020-12. Raises ConfigError: it cannot be
    read, is no schema, or refers to another file; the message names the place. `source`: the schema, or a JSON file
    that holds it."""
    from jsonschema import Draft202012Validator, SchemaError, validators
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    name = str(source) if isinstance(source, Path) else "json_schema"
    schema: Any = source
    if isinstance(source, Path):
        try:
            schema = json.loads(source.expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"rewards, json: {source}: cannot be read as JSON ({error}). Name a file with a JSON schema, or write "
                "the schema itself as json_schema."
            ) from None
    if not isinstance(schema, Mapping):
        raise _schema_error(name, f"is {excerpt(schema)}, and a schema is an object")
    kind = validators.validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        raise _schema_error(name, f"{error.json_path}: {error.message}") from None
    known = {*kind.VALIDATORS, *_ANNOTATIONS}
    if unknown := [key for key in schema if key not in known]:  # the library would ignore them
        raise _schema_error(name, f"{unknown[0]} is no keyword.{did_you_mean(unknown[0], sorted(known))}")
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    whole = resource.id() or ""
    registry: Registry[Any] = Registry().with_resource(whole, resource)  # holds nothing else, so nothing is fetched
    resolver = registry.resolver(whole)
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise _schema_error(name, f"$ref {reference!r} leads nowhere; only places in the schema are read") from None
    return kind(schema, registry=registry)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _schema_error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"rewards, json: {name}: {problem}. Correct the schema.")


class UnitTestVerifier:
    """The share of its row's unit tests that the code in an answer passes, or whether it passes all. Raises
    ConfigError: the machine cannot confine untrusted code."""

    def __init__(self, config: UnitTestReward) -> None:
        self._config = config
        self._limits = SandboxLimits(config.seconds, int(config.memory), int(config.output))
        self._threads = min(_MOST_THREADS, os.cpu_count() or 1) if config.threads == "auto" else config.threads
        sandbox.require(self._limits)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        tests = []
        for answer in answers:
            cell = column(answer, self._config.tests, kind="unit_tests")
            tests.append([cell] if isinstance(cell, str) else cell)
            if not isinstance(tests[-1], list) or not tests[-1] or not all(isinstance(each, str) for each in tests[-1]):
                raise DataError(
                    f"{answer.place}: `{self._config.tests}` must be Python code, or a list of pieces of it, found "
                    f"{excerpt(cell)}. Correct the row, or name another column as `tests` of the reward."
                )
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._score, answers, tests))

    def _score(self, answer: Answer, tests: list[str]) -> float:
        passed = sandbox.passed(fenced(answer.text), tests, self._limits)
        return float(all(passed)) if self._config.score == "all" else sum(passed) / len(passed)


class UserFunction:
    """Scores answers by a function in a user's Python file, within a time limit. Raises ConfigError: the file has no
    such function, or fails."""

    def __init__(self, config: FunctionReward) -> None:
        self._config = config
        self._key = f"rewards, {config.function}"
        signature = SIGNATURE.format(config.function)
        self._function: Callable[..., Any] = plugins.function(
            config.file, config.function, signature, key="rewards.file"
        )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        seconds, place = self._config.timeout, answers[0].place
        try:
            with time_limit(lambda: _TookTooLong(), seconds=seconds, clock="wall"):
                values = self._function(list(answers))
        except _TookTooLong:
            raise self._error(
                f"took more than {seconds:g} s for {len(answers)} answers, from {place} on. Make it faster, or write a "
                "higher timeout for it"
            ) from None
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise plugins.failed(self._config.file, error, key=f"{self._key}, from {place} on") from error
        try:
            if any(isinstance(value, (str, bytes)) for value in values):
                raise TypeError
            reward_values = [float(value) for value in values]
        except (TypeError, ValueError):
            raise self._error(f"returned {excerpt(values)}. Return a list of numbers, one for each answer") from None
        if len(reward_values) != len(answers):
            raise self._error(
                f"returned {len(reward_values)} rewards for {len(answers)} answers. Return one for each answer"
            )
        return reward_values

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._key}: {self._config.function}() of {self._config.file} {problem}.")


class _TookTooLong(Exception):
    pass
