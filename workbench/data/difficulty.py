"""The difficulty of rows by which `data.curriculum` opens them: numbers that their file or a user's function gives.

Legend: N rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from workbench.config import plugins
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data.rows import RawRow, excerpt, finite
from workbench.errors import ConfigError, DataError
from workbench.schema import did_you_mean

Floats: TypeAlias = npt.NDArray[np.float64]
KEY = "data.curriculum"


def of_rows(config: CurriculumConfig, rows: Iterable[RawRow]) -> Floats:
    """Difficulty (N,) of rows as they stand in their file, for by=column and by=function.

    Raises:
        ConfigError: The user's file is wrong, or says no number.
        DataError: A row has no number in the column.
    """
    if config.by == "column":
        assert config.column is not None
        column = config.column
        return np.asarray([_number_in(row, column) for row in rows], dtype=np.float64)
    return np.asarray(list(_judged(config, rows)), dtype=np.float64)


def by_chance(rows: int, *, seed: int) -> Floats:
    """Stands in for a difficulty that only a run can measure: different for all rows, and without meaning."""
    return np.random.default_rng([seed, 10]).permutation(rows).astype(np.float64)


def _number_in(row: RawRow, column: str) -> float:
    if column not in row.columns:
        known = list(row.columns)
        raise DataError(f"{row.place}: {KEY}.column: the row has no `{column}`.{did_you_mean(column, known)}")
    value = row.columns[column]
    if (number := _finite(value)) is None:
        raise DataError(
            f"{row.place}: `{column}` is to say how difficult the row is, and is {excerpt(value)}. Write a number."
        )
    return number


def _judged(config: CurriculumConfig, rows: Iterable[RawRow]) -> Iterable[float]:
    """Difficulty of each row by the user's function, which must say the same of the same row."""
    path, key = config.function, f"{KEY}.function"
    assert path is not None
    signature = "def difficulty(row: dict[str, Any]) -> float"
    judge: Callable[..., Any] = plugins.function(path, "difficulty", signature, key=key)

    def judged(row: RawRow) -> float:
        try:
            value = judge(dict(row.columns))
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(path, error, key=f"{key}, called with {row.place}") from error
        if (number := _finite(value)) is None:
            raise ConfigError(
                f"{key}: difficulty() of {path}, called with {row.place}, returned {excerpt(value)}. Return a number."
            )
        return number

    every = iter(rows)
    for first in itertools.islice(every, 1):
        if (number := judged(first)) != judged(first):
            raise ConfigError(
                f"{key}: difficulty() of {path}, called twice with {first.place}, returned two numbers. "
                "Derive randomness from the row alone."
            )
        yield number
    yield from map(judged, every)


def _finite(value: Any) -> float | None:
    """A number; None where it is none, or none that has a place in an order. Text of a csv file may be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.integer | np.floating):
        return None
    return finite(value)
