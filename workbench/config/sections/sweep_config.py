"""The section `sweep`: settings that its members differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from workbench.schema import Section


class SweepConfig(Section):
    """Runs of all combinations of some settings."""

    over: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Keys of a run, each with the values it takes: {train.learning_rate: [1.0e-4, 1.0e-3], seed: [0, 1]}.

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
