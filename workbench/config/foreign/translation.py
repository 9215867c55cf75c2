"""A recipe that grows while the settings of another tool's file are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import ConfigError


class Translation:
    """The settings that are left of a file, and the recipe that the others became."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._left = {key: value for key, value in settings.items() if value not in (None, "", [], {})}
        self.recipe: dict[str, Any] = {}
        self.looks: list[str] = []
        """Points to look at: settings that mean something else here, or that could not be taken whole."""
        self.idle: list[str] = []
        """Settings that have no effect on what is learnt, or that are decided by themselves here."""

    @property
    def left(self) -> dict[str, Any]:
        """Settings without an equivalent."""
        return dict(self._left)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a setting, which is read with this; `default` where the file has none."""
        return self._left.pop(key, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, also where YAML reads it as text, as it does with 2e-4.

        Raises:
            ConfigError: Something else stands there.
        """
        value = self.take(key, default)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key}: expected a number, found {value!r}.") from None

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(f"{key}: expected a whole number, found {value:g}.")
        return None if value is None else int(value)

    def give(self, place: str, value: Any) -> None:
        """Write a value at a place of the recipe, such as train.learning_rate; None writes nothing."""
        if value is None:
            return
        *sections, key = place.split(".")
        section = self.recipe
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value

    def move(self, key: str, place: str, read: Callable[[str], Any] | None = None) -> None:
        """Give a setting its place in the recipe."""
        self.give(place, (read or self.take)(key))

    def choose(self, key: str, known: Mapping[str, Any], place: str) -> None:
        """Give a named choice its name here; an unknown one is left."""
        value = self._left.get(key)
        if value is not None and str(value).lower() in known:
            self.give(place, known[str(self.take(key)).lower()])

    def ignore(self, *keys: str) -> None:
        """Pass over settings that change nothing of what is learnt."""
        self.idle += [key for key in keys if self._left.pop(key, None) is not None]

    def look(self, text: str) -> None:
        """Note what a person should look at."""
        self.looks.append(text)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a file whose task is not one of ours, as far as the setting says so.

        Raises:
            ConfigError: The setting is there, and is not false.
        """
        value = self._left.get(key)
        if value not in (None, False):
            raise ConfigError(f"{key}: {value!r}: {reason}")
