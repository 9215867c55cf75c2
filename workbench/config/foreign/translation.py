"""The settings of another tool's file: the recipe that they become, and an outcome for each of them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from workbench.errors import ConfigError
from workbench.schema import shown

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of settings that a file names and does not use."""


class Translation:
    """A recipe that grows from the settings of another tool's file.

    A setting is named by its path, such as `fsdp_config.offload_params` or `datasets[0].type`. It gets an outcome where
    it is given a place in the recipe, told, or passed over; one that no rule mentions stays in `left`, which is listed
    as without an equivalent. So nothing can be left out without a word.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.recipe: dict[str, Any] = {}
        self.looks: list[str] = []
        """Sentences on what a person should look at; those on settings begin with their paths and values."""
        self.translated: dict[str, str] = {}
        """The place in the recipe of each setting that has one."""
        self.idle: list[str] = []
        """Settings that have no effect on what is learnt, or that are decided by themselves here."""
        self.left: dict[str, Any] = {}
        """Settings without an equivalent; in the beginning all of them."""
        self._values: dict[str, Any] = {}
        self._defaults: list[str] = []
        self._prefix = ""
        self.add("", settings)

    def add(self, path: str, value: Any) -> None:
        """Take in a value, and all settings within it; raises ConfigError where it is nested too deeply."""
        while path in self._values:  # long names look alike where they are cut
            path += "'"
        if path:
            self._values[path] = value
        nested = isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value)
        if nested:
            items = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
        elif isinstance(value, dict) and value:
            items = [(f"{path}.{named(key)}" if path else named(key), each) for key, each in value.items()]
        else:
            self.left[path] = value
            return
        try:
            for each in items:
                self.add(*each)
        except RecursionError:
            raise ConfigError(f"{path[:60]}: values are nested too deeply.") from None

    def at(self, path: str) -> Translation:
        """The same translation, of which only settings below `path` are read."""
        part = copy.copy(self)
        part._prefix = f"{self._prefix}{path}."
        return part

    def path(self, key: str) -> str:
        """The path of a setting in the file."""
        return self._prefix + key

    def entries(self, key: str) -> list[Translation]:
        """The mappings of a list.

        Raises:
            ConfigError: It is no list of mappings.
        """
        listed = self.value(key)
        if listed in EMPTY:
            return []
        if not isinstance(listed, list) or not all(isinstance(each, dict) and each for each in listed):
            raise ConfigError(f"{self.path(key)}: expected a list of mappings, found {shown(listed)}.")
        return [self.at(f"{key}[{number}]") for number in range(len(listed))]

    def value(self, key: str) -> Any:
        """What the file says; None where it says nothing."""
        found = self._values.get(self.path(key))
        return None if found == "" else found

    def _read(self, key: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        value = self.value(key)
        if value is None or (isinstance(value, kinds) and (expected == FLAG or not isinstance(value, bool))):
            return value
        raise ConfigError(f"{self.path(key)}: expected {expected}, found {shown(value)}.")

    def number(self, key: str) -> float | None:
        """A number, also where YAML reads it as text, as it does with 2e-4; None also for false.

        Raises:
            ConfigError: Something else stands there.
        """
        value = None if self.value(key) is False else self._read(key, (int, float, str), "a number")
        try:
            if value is None or math.isfinite(number := float(value)):
                return None if value is None else number
        except (ValueError, OverflowError):
            pass
        raise ConfigError(f"{self.path(key)}: expected a number, found {shown(value)}.")

    def whole(self, key: str) -> int | None:
        """A whole number, as `number` reads it."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise ConfigError(f"{self.path(key)}: expected a whole number, found {value:g}.")
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        """Whether a setting is on; raises ConfigError where it is neither true nor false."""
        return bool(self._read(key, bool, FLAG))

    def text(self, key: str) -> str | None:
        """A text, or a number as one; raises ConfigError for anything else."""
        value = self._read(key, (str, int, float), "a text")
        return None if value is None else str(value)

    def texts(self, key: str) -> list[str]:
        """Texts, as a list or with commas between them; raises ConfigError for anything else."""
        value = self._read(key, (str, list), "a text or a list of texts")
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{self.path(key)}: expected a list of texts, found {shown(value)}.")
        return [
            name for each in (value.split(",") if isinstance(value, str) else value or []) if (name := each.strip())
        ]

    def give(self, place: str, value: Any, *keys: str) -> None:
        """Write a value at a place of the recipe, such as train.learning_rate, to which `keys` led."""
        *sections, name = place.split(".")
        section = self.recipe
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
        self.translated |= {path: place for key in keys for path in self._settle(key)}

    def default(self, key: str, value: Any, place: str, *, theirs: Any = None) -> bool:
        """Write what holds where the file leaves a setting out, and say so; whether it does.

        Args:
            theirs: The value as the other tool writes it, where that is not `value`.
        """
        if self.value(key) is not None:
            return False
        self.give(place, value)
        self._defaults.append(f"{key}: {value if theirs is None else theirs} ({place})")
        return True

    def move(self, key: str, place: str, read: Callable[[Translation, str], Any]) -> None:
        """Give a setting its place in the recipe."""
        if (value := read(self, key)) is not None:
            self.give(place, value, key)

    def choose(self, key: str, known: Mapping[str, Any], place: str) -> None:
        """Give a named choice its name here; an unknown one is left."""
        if (name := str(self.value(key)).lower()) in known:
            self.give(place, known[name], key)

    def ignore(self, *keys: str) -> None:
        """Pass over settings that change nothing of what is learnt."""
        self.idle += [path for key in keys for path in self._settle(key)]

    def look(self, text: str, *keys: str) -> None:
        """Note what a person should look at about those of `keys` that the file has."""
        paths = [path for key in keys for path in self._open(key) if self.left[path] not in EMPTY]
        if found := {path: self.left.pop(path) for path in dict.fromkeys(paths)}:
            self.looks.append(f"{', '.join(f'{path}: {_said(value)}' for path, value in found.items())}: {text}")

    def remark(self, text: str) -> None:
        """Note what a person should look at about the whole file."""
        self.looks.append(text)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse a file whose task is not one of ours, as far as settings that are not false say so.

        Raises:
            ConfigError: One of them is there.
        """
        found = {self.path(key): key for key in reasons if self.value(key) not in (None, False, [], {})}
        if found:
            raise ConfigError(
                "\n  ".join(f"{at}: {shown(self.value(key))}: {reasons[key]}" for at, key in found.items())
            )

    def apply(self, table: Mapping[str, Rule]) -> None:
        """Follow the rule of each setting that is left; a `*` in its name stands for anything."""
        for pattern, rule in table.items():
            for name in self._names(pattern) if "*" in pattern else [pattern]:
                if self.value(name) is not None and self._open(name):
                    rule(self, name)

    def report(self) -> dict[str, list[str]]:
        """What became of each setting: lines by their title, which hold no sign that moves a cursor or ends a line."""
        report = {
            "Look at": self.looks,
            "No equivalent": [f"{path}: {_said(value)}" for path, value in self.left.items()],
            "Decided here, or without effect on what is learnt": [", ".join(self.idle)] * bool(self.idle),
            "Translated": [", ".join(f"{path} -> {place}" for path, place in self.translated.items())],
        }
        return {title: [printable(line) for line in lines] for title, lines in report.items() if lines}

    def _names(self, pattern: str) -> list[str]:
        tops = {path.removeprefix(self._prefix).split(".")[0] for path in self.left if path.startswith(self._prefix)}
        return sorted(name for name in tops if fnmatchcase(name, pattern))

    def finish(self) -> None:
        """Say which defaults were written, and pass over what is empty."""
        if self._defaults:
            self.looks.append(f"Left out of the file, and written as is usual there: {', '.join(self._defaults)}.")
        self.idle += [path for path, value in self.left.items() if value in EMPTY]
        for path in self.idle:
            self.left.pop(path, None)

    def _open(self, key: str) -> list[str]:
        """Settings at or below a key that have no outcome yet."""
        path = self.path(key)
        if path in self.left:
            return [path]
        return [each for each in self.left if path in self._values and each.startswith((f"{path}.", f"{path}["))]

    def _settle(self, key: str) -> dict[str, Any]:
        """The same with their values; they have an outcome from now on."""
        return {path: self.left.pop(path) for path in self._open(key)}


def named(key: Any) -> str:
    """A key as a part of a path: quoted where it has signs of its own."""
    return str(key) if re.fullmatch(r"[^\W\d][\w-]*", str(key)) else shown(key)


def _said(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() and len(value) <= 200 else shown(value)


def printable(text: str) -> str:
    """The text in one line, with signs that cannot be printed as \\x1b."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(text.split()))


FLAG = "true or false"
Rule = Callable[[Translation, str], None]
"""What becomes of a setting."""


def to(place: str, read: Callable[[Translation, str], Any]) -> Rule:
    """It has a place in the recipe."""
    return lambda translation, key: translation.move(key, place, read)


def told(text: str, *, but: tuple[Any, ...] = ()) -> Rule:
    """A person has to look at it; values in `but` mean what holds here anyway."""

    def rule(translation: Translation, key: str) -> None:
        if translation.value(key) in but:
            translation.ignore(key)
        else:
            translation.look(text, key)

    return rule


def no_effect(names: str) -> dict[str, Rule]:
    """Settings, with spaces between them, that change nothing of what is learnt, or that are decided here."""
    return dict.fromkeys(names.split(), lambda translation, key: translation.ignore(key))
