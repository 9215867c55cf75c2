"""A user's own views of a row, and a user's own way to merge what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from workbench.config import plugins
from workbench.config.tta_config import TtaConfig
from workbench.data.labelled.labels import Floats
from workbench.data.rows import shown
from workbench.errors import ConfigError
from workbench.schema import did_you_mean

Fields: TypeAlias = tuple[str, ...]
UserMerge: TypeAlias = Callable[[Floats], Floats]
"""Values (V, N, C) of the views, the plain row first, to values (N, C); each row by itself."""
_KEY = "tta.function"


class UserViews:
    """The other rows that a user's function makes of a row: as many of every row, texts in the same columns.

    Args:
        path: The file.
        columns: That a row has.
        example: Columns of the row that says how many views there are.
        place: Of that row.

    Raises:
        ConfigError: The file defines no such function, or it does otherwise than that; says what to write.
    """

    def __init__(self, path: Path, *, columns: Fields, example: Fields, place: str) -> None:
        self._path, self._columns, self._first = path, columns, place
        self._views = _function(path, "views", "def views(row: dict[str, str]) -> list[dict[str, str]]")
        made = self._made(example, place)
        if not made:
            raise self._wrong(place, "gave no view. Return a list of one or more rows")
        if self._made(example, place) != made:
            raise self._wrong(place, "gave other views when asked again. Let chance depend on the row alone")
        self.count = len(made)
        self._known = {example: made}

    def of(self, fields: Fields, place: str) -> list[Fields]:
        """The views of a row."""
        if fields not in self._known:
            made = self._made(fields, place)
            if len(made) != self.count:
                raise self._wrong(
                    place,
                    f"gave {len(made)} views, and {self.count} of {self._first}. Return as many of every row; the row "
                    "itself may be one",
                )
            self._known[fields] = made
        return self._known[fields]

    def _made(self, fields: Fields, place: str) -> list[Fields]:
        try:
            found = self._views(dict(zip(self._columns, fields, strict=True)))
        except Exception as error:  # a user's code: whatever it raises, it cannot be used
            raise plugins.failed(self._path, error, key=f"{_KEY}, called with {place}") from error
        if not isinstance(found, (list, tuple)):
            raise self._wrong(place, f"gave {shown(found)}. Return a list of rows")
        return [self._read(each, place) for each in found]

    def _read(self, row: Any, place: str) -> Fields:
        if not isinstance(row, dict):
            raise self._wrong(
                place, f"gave {shown(row)} as a row. Return {{{', '.join(self._columns)}}}, each with its text"
            )
        for name in self._columns:
            if name not in row:
                raise self._wrong(
                    place, f"gave a row without `{name}`. Return every column: {', '.join(self._columns)}"
                )
            if not isinstance(row[name], str):
                raise self._wrong(place, f"gave {shown(row[name])} as `{name}`. Return text")
        for name in row:
            if name not in self._columns:
                hint = did_you_mean(str(name), self._columns)
                raise self._wrong(
                    place, f"gave a row with `{name}`, which classes.text does not name.{hint} Leave it out"
                )
        return tuple(row[name] for name in self._columns)

    def _wrong(self, place: str, what: str) -> ConfigError:
        return ConfigError(f"{_KEY}: views() of {self._path}, called with {place}, {what}.")


def require_used(config: TtaConfig) -> None:
    """Raise ConfigError where the user's file defines what the configuration would not use."""
    if config.function is None:
        return
    defined = vars(plugins.module(config.function, key=_KEY))
    for name, is_used, word in (
        ("views", "user" in config.views, "add user to tta.views"),
        ("merge", config.merge == "user", "write tta.merge=user"),
    ):
        if callable(defined.get(name)) and not is_used:
            raise ConfigError(
                f"{_KEY}: {config.function} defines {name}(), which nothing asks for. To use it, {word}; "
                "otherwise give it another name."
            )


def user_merge(config: TtaConfig) -> UserMerge | None:
    """The user's own way to merge, where `merge` is user; workbench/crossval/tta.py judges what it returns.

    Raises:
        ConfigError: The file has none.
    """
    path = config.function
    if path is None or config.merge != "user":
        return None
    merge = _function(path, "merge", "def merge(p: ndarray) -> ndarray")

    def called(values_VNC: Floats) -> Floats:
        try:
            return np.asarray(merge(values_VNC.copy()), dtype=np.float64)
        except Exception as error:  # a user's code: whatever it raises, it cannot be used
            raise plugins.failed(path, error, key=_KEY) from error

    return called


def _function(path: Path, name: str, wanted: str) -> Callable[..., Any]:
    found = vars(plugins.module(path, key=_KEY)).get(name)
    if not callable(found):
        raise ConfigError(f"{_KEY}: {path} defines no function {name}. Write `{wanted}` in it.")
    function: Callable[..., Any] = found
    return function
