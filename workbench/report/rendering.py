"""Pages from templates; what rows and files say is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

LONGEST_TEXT = 4000
"""Characters of a prompt or an answer that a page shows."""


def render(template: str, **values: Any) -> str:
    """The page of a template in `templates`, from all values that it names."""
    return _environment().get_template(template).render(longest=LONGEST_TEXT, **values)


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
    environment.filters["end"] = _end
    return environment


def _end(text: str, length: int) -> str:
    """The end of a text from a whole word on, which is where a prompt asks its question."""
    return text if len(text) <= length else "… " + text[-length:].split(maxsplit=1)[-1]
