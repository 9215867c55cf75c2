"""The sections `sweep`, of settings that are listed, and `search`, a space of which halving finds the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator

from workbench.schema import ROOT, ConsistentSection, Mistakes, Section, Unit, explain


class SweepConfig(Section):
    """Runs of all combinations of some settings."""

    over: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Keys of a run, each with the values it takes: {train.learning_rate: [1.0e-4, 1.0e-3], seed: [0, 1]}. Of recipe
    crossval, also model.id: cross-validations over the same folds, one after another, and their blend.

    The members are all combinations, the last key changing fastest. `seed` decides an adapter's initial values and the
    order of its rows; which rows are held out depends on the run's own seed, so that all members are measured alike.
    """

    together: bool = True
    """In one bank, where the method can be; false trains one member after another."""

    @field_validator("over", mode="before")
    @classmethod
    def _dotted(cls, over: Any) -> Any:
        """sweep.over.train.learning_rate=[...] of a command line means the key train.learning_rate."""
        return flat(over) if isinstance(over, Mapping) else over


def flat(
    values: Mapping[Any, Any], prefix: str = "", *, stop: Callable[[Mapping[Any, Any]], bool] = lambda value: False
) -> dict[str, Any]:
    """Nested mappings as one with dotted keys; those that `stop` recognises stay values."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and not stop(value)
        flattened |= flat(value, f"{prefix}{key}.", stop=stop) if nested else {f"{prefix}{key}": value}
    return flattened


def shown(value: Any) -> str:
    """A value of a setting, short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


LEAST_ROWS = 8
"""Held-out rows of a comparison, where there are as many."""
_RANGE_KEYS = ("low", "high", "log", "integer")
_EXAMPLE = "{low: 1.0e-4, high: 1.0e-2, log: true}"


class Range(ConsistentSection):
    """Numbers from `low` to `high`, both included."""

    low: float
    """Lowest value."""
    high: float
    """Highest value."""
    log: bool = False
    """Draw the logarithm evenly, so that each order of magnitude counts alike."""
    integer: bool = False
    """Whole numbers only."""

    def _contradictions(self) -> Iterator[str]:
        if not self.low < self.high:
            yield f"low {self.low:g} is not below high {self.high:g}. Write the smaller one first."
        if self.log and self.low <= 0:
            yield f"log=true needs numbers above 0, found low {self.low:g}. Write log: false, or a low above 0."
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            yield f"integer=true needs whole ends, found {self.low:g} and {self.high:g}. Write whole numbers."

    @property
    def ends(self) -> tuple[float | int, ...]:
        """Both ends, and a number between them, which is a fraction where fractions are drawn."""
        if self.integer:
            return int(self.low), int(self.high)
        part = 1 / math.pi  # of the way, where no whole number is
        between = self.low * (self.high / self.low) ** part if self.log else self.low + part * (self.high - self.low)
        return self.low, between, self.high

    @property
    def size(self) -> float:
        """Number of different values."""
        return self.high - self.low + 1 if self.integer else math.inf


Choices = Annotated[tuple[Any, ...], Field(min_length=1)]


class SearchConfig(Section):
    """A search for the best settings by halving."""

    space: dict[str, Range | Choices] = Field(default_factory=dict)
    """Keys of a run, each with a list of values or with a range: {low: 1.0e-4, high: 1.0e-2, log: true}."""
    trials: Annotated[int, Field(ge=2, le=1000), Unit("settings")] = 32
    """Settings that are tried."""
    eta: Annotated[int, Field(ge=2)] = 2
    """One of so many members goes on each time that they are compared. Half of them is safest: early comparisons are
    rough, and more frequent ones cost no more."""
    rungs: Annotated[int, Field(ge=1, le=10), Unit("comparisons")] = 5
    """Times that members are compared before the end: after 1 / eta of a member's steps, before that after
    1 / eta^2, and so on. The schedule of each is that of its whole training."""
    rows: Annotated[PositiveInt | None, Unit("rows")] = 64
    """Held-out rows of the last comparison before the end; each earlier one has 1 / eta as many, but no fewer than 8,
    since members differ more and are more. null: all. Those at the end of their training are compared on all."""
    sampler: Literal["random", "tpe"] = "random"
    """How settings are proposed: by chance, or where earlier ones did well (Bergstra et al. 2011)."""
    at_once: Annotated[PositiveInt | None, Unit("members")] = None
    """Members that train at once, those that go on included; null: all trials, with `tpe` half of them."""
    together: bool = True
    """In one bank, where the method can be; false trains one member after another."""

    @field_validator("space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """search.space.train.learning_rate=[...] of a command line means the key train.learning_rate."""
        if not isinstance(space, Mapping):
            return space
        given = flat(space, stop=_is_range)
        if mistakes := [mistake for key, value in given.items() for mistake in _mistakes(key, value)]:
            raise Mistakes(mistakes)
        return given

    @property
    def settings(self) -> float:
        """Number of different settings in the space."""
        return math.prod(each.size if isinstance(each, Range) else len(each) for each in self.space.values())

    def rows_at(self, rung: int) -> int | None:
        """Held-out rows of a comparison before the end; None: all."""
        return (
            None
            if self.rows is None
            else max(min(LEAST_ROWS, self.rows), self.rows // self.eta ** (self.rungs - 1 - rung))
        )

    @property
    def most_at_once(self) -> int:
        """Members that train at once."""
        if self.at_once is not None:
            return min(self.at_once, self.trials)
        return self.trials if self.sampler == "random" else -(-self.trials // 2)


def _mistakes(key: str, value: Any) -> list[tuple[str, str]]:
    """Place and cure of what is wrong with the values of a key."""
    if isinstance(value, (list, tuple, Range)):
        return [] if value else [(f"search.space.{key}", "is empty. Write values, such as [a, b].")]
    if not isinstance(value, Mapping):
        return [(f"search.space.{key}", f"expected values such as [a, b], or {_EXAMPLE}, found {value!r}.")]
    try:
        Range.model_validate(value)
    except ValidationError as error:
        mistakes = explain(Range, value, error)
        return [(f"search.space.{key}{'' if place == ROOT else f'.{place}'}", text) for place, text in mistakes]
    return []


def _is_range(value: Mapping[Any, Any]) -> bool:
    return any(key in _RANGE_KEYS for key in value)
