"""Views and merging of predictions that a user's Python file defines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from workbench.config import plugins
from workbench.config.sections.tta_config import TtaConfig
from workbench.data.labelled.labels import Floats
from workbench.data.rows import excerpt
from workbench.errors import ConfigError
from workbench.schema import did_you_mean

Fields: TypeAlias = tuple[str, ...]
UserMerge: TypeAlias = Callable[[Floats], Floats]
"""Merges values (V, N, C) of the views, the original rows first, to values (N, C), each row by itself."""
KEY = "tta.function"
"""The setting that names the file, for messages."""


class UserViews:
    """Views that a user's function `views` returns: equally many for every row, with texts in the same columns.

    Args:
        path: The user's file.
        columns: Names of the columns of a row.
        example: Columns of the row that decides how many views there are.
        place: Place of that row.

    Raises:
        ConfigError: The file has no such function, or its results do not fit.
    """

    def __init__(self, path: Path, *, columns: Fields, example: Fields, place: str) -> None:
        self._path, self._columns, self._example_place = path, columns, place
        self._function = plugins.function(
            path, "views", "def views(row: dict[str, str]) -> list[dict[str, str]]", key=KEY
        )
        views = self._call(example, place)
        if not views:
            raise self._error(place, "returned no view. Return a list of one or more rows")
        if self._call(example, place) != views:
            raise self._error(place, "returned other views when called again. Derive randomness from the row alone")
        self.count = len(views)
        self._cache = {example: views}

    def views(self, fields: Fields, place: str) -> list[Fields]:
        """The views of a row."""
        if fields not in self._cache:
            views = self._call(fields, place)
            if len(views) != self.count:
                raise self._error(
                    place,
                    f"returned {len(views)} views, but {self.count} for {self._example_place}. Return equally many for "
                    "every row; the row itself may be one",
                )
            self._cache[fields] = views
        return self._cache[fields]

    def _call(self, fields: Fields, place: str) -> list[Fields]:
        try:
            views = self._function(dict(zip(self._columns, fields, strict=True)))
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(self._path, error, key=f"{KEY}, called with {place}") from error
        if not isinstance(views, (list, tuple)):
            raise self._error(place, f"returned {excerpt(views)}. Return a list of rows")
        return [self._fields(row, place) for row in views]

    def _fields(self, row: Any, place: str) -> Fields:
        if not isinstance(row, dict):
            raise self._error(
                place, f"returned {excerpt(row)} as a row. Return {{{', '.join(self._columns)}}}, each with its text"
            )
        for name in self._columns:
            if name not in row:
                raise self._error(
                    place, f"returned a row without `{name}`. Return every column: {', '.join(self._columns)}"
                )
            if not isinstance(row[name], str):
                raise self._error(place, f"returned {excerpt(row[name])} as `{name}`. Return text")
        for name in row:
            if name not in self._columns:
                hint = did_you_mean(str(name), self._columns)
                raise self._error(
                    place, f"returned a row with `{name}`, which classes.text does not name.{hint} Leave it out"
                )
        return tuple(row[name] for name in self._columns)

    def _error(self, place: str, problem: str) -> ConfigError:
        return ConfigError(f"{KEY}: views() of {self._path}, called with {place}, {problem}.")


def require_used(config: TtaConfig) -> None:
    """Raise ConfigError where the user's file defines a function that the configuration does not use."""
    if config.function is None:
        return
    defined = vars(plugins.module(config.function, key=KEY))
    for name, is_used, remedy in (
        ("views", "user" in config.views, "add user to tta.views"),
        ("merge", config.merge == "user", "write tta.merge=user"),
    ):
        if callable(defined.get(name)) and not is_used:
            raise ConfigError(
                f"{KEY}: {config.function} defines {name}(), which is not used. To use it, {remedy}; "
                "otherwise give it another name."
            )


def user_merge(config: TtaConfig) -> UserMerge | None:
    """The user's function `merge`, where `tta.merge` is user; workbench/crossval/tta.py checks its results.

    Raises:
        ConfigError: The file has no such function.
    """
    path = config.function
    if path is None or config.merge != "user":
        return None
    merge = plugins.function(path, "merge", "def merge(p: ndarray) -> ndarray", key=KEY)

    def called(values_VNC: Floats) -> Floats:
        try:
            return np.asarray(merge(values_VNC.copy()), dtype=np.float64)
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(path, error, key=KEY) from error

    return called
