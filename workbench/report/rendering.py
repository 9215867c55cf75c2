"""What every page needs: templates with all text escaped, values in words, and facts as lines and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jinja2

from workbench.runs import units

LONGEST_TEXT = 4000
"""Characters of a prompt or an answer that a page shows."""
NARROW = 3
"""Columns of a table that a narrow screen has room for."""
LISTED = 12
"""Entries of a list that are written out; a longer table is folded away."""


def render(template: str, **values: Any) -> str:
    """The page of a template in `templates`, from all values that it names."""
    page = _environment().get_template(template).render(longest=LONGEST_TEXT, **values)
    return re.sub(r'<table class="numbers.*?</table>', lambda found: _with_labels(found[0]), page, flags=re.DOTALL)


def _with_labels(table: str) -> str:
    """A wide table whose cells carry the heading of their column: a narrow screen shows it beside them (page.css)."""
    head, found, body = table.partition("</thead>")
    names = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", head, flags=re.DOTALL)]

    if len(names) <= NARROW:
        return table

    def row(cells: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub(r"<t[hd]\b(?! colspan)", lambda cell: f'{cell[0]} data-label="{next(columns, "")}"', cells[0])

    return head + found + re.sub(r"<tr\b.*?</tr>", row, body, flags=re.DOTALL)


@cache
def _environment() -> jinja2.Environment:
    """Templates that are compiled once in a process."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("workbench.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The end of a text from a whole word on, which is where a prompt asks its question.
    environment.filters["end"] = lambda text, length: (
        text if len(text) <= length else "… " + text[-length:].split(maxsplit=1)[-1]
    )
    return environment


def begins(text: str, longest: int) -> str:
    """The first `longest` characters of a text."""
    return text if len(text) <= longest else text[:longest] + "…"


def ends(text: str, longest: int) -> str:
    """The beginning and the end of a long text, of `longest` characters each: prompts stand first, answers last."""
    return text if len(text) <= 2 * longest else f"{text[:longest].rstrip()} … {text[-longest:].lstrip()}"


def in_words(value: Any) -> str:
    """One value of a JSON file in words."""
    if value is None:
        return units.NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return units.number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = [f"... ({len(value):,} in all)"] if len(value) > LISTED else []
        return ", ".join([*map(in_words, value[:LISTED]), *more]) or "none"
    return str(value)


class FactTable(NamedTuple):
    """Facts of the same things, such as the classes: one row for each thing, one column for each fact."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    long: bool
    """Whether it is better folded away."""


class FactList(NamedTuple):
    """Facts for a page: the name and value of each, and tables."""

    lines: list[tuple[str, str]]
    tables: list[FactTable]


def fact_list(facts: Mapping[str, Any]) -> FactList:
    """Facts as lines, and mappings as columns of tables; a nested fact is labelled by its path of names.

    A list beside one of equal length called `names` gives one value to each name.
    """
    names = facts.get("names")
    if isinstance(names, list):
        fit = {key for key, value in facts.items() if isinstance(value, list) and len(value) == len(names)}
        if len(fit) > 1:
            facts = {
                key: dict(zip(names, value, strict=True)) if key in fit else value
                for key, value in facts.items()
                if key != "names"
            }
    lines: list[tuple[str, str]] = []
    columns: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for label, value in _flat(facts):
        if isinstance(value, Mapping) and value:
            columns.setdefault(tuple(value), []).append((label, value))
        else:
            lines.append((label, in_words(value)))
    tables = []
    for things, named in columns.items():
        rows = tuple((thing, *(in_words(values[thing]) for _, values in named)) for thing in things)
        tables.append(FactTable(("", *(label for label, _ in named)), rows, len(rows) > LISTED))
    return FactList(lines, tables)


def _flat(facts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        name = within + str(key).replace("_", " ")
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            yield from _flat(value, f"{name}: ")
        else:
            yield name, value
