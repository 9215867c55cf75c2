"""Facts of any shape, as a JSON file holds them, in lines and tables that a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.runs import units

LISTED = 12
"""Entries of a list that are written out; a longer table is folded away."""


@dataclass(frozen=True)
class Table:
    """Facts of the same things, such as the classes: one row for each thing, one column for each fact."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def long(self) -> bool:
        """Whether it is better folded away."""
        return len(self.rows) > LISTED


@dataclass(frozen=True)
class FactList:
    """Facts for a page."""

    lines: list[tuple[str, str]]
    """Name and value of each fact."""
    tables: list[Table]


def fact_list(facts: Mapping[str, Any]) -> FactList:
    """Facts as lines, and mappings as columns of tables; a nested fact is labelled by its path of names.

    A list beside one of equal length called `names` gives one value to each name.
    """
    lines: list[tuple[str, str]] = []
    columns: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for label, value in _flat(_named(facts)):
        if isinstance(value, Mapping) and value:
            columns.setdefault(tuple(value), []).append((label, value))
        else:
            lines.append((label, text(value)))
    return FactList(lines, [_table(things, named) for things, named in columns.items()])


def text(value: Any) -> str:
    """One value in words."""
    if value is None:
        return units.NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return units.number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = [f"... ({len(value):,} in all)"] if len(value) > LISTED else []
        return ", ".join([*map(text, value[:LISTED]), *more]) or "none"
    return str(value)


def _flat(facts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        name = within + _label(key)
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            yield from _flat(value, f"{name}: ")
        else:
            yield name, value


def _named(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    names = facts.get("names")
    if not isinstance(names, list):
        return facts
    fit = {key: value for key, value in facts.items() if isinstance(value, list) and len(value) == len(names)}
    if len(fit) < 2:
        return facts
    return {
        key: dict(zip(names, value, strict=True)) if key in fit else value
        for key, value in facts.items()
        if key != "names"
    }


def _table(things: tuple[str, ...], named: list[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = tuple((thing, *(text(values[thing]) for _, values in named)) for thing in things)
    return Table(("", *(label for label, _ in named)), rows)


def _label(key: str) -> str:
    return str(key).replace("_", " ")
