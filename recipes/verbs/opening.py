"""First sentences of a run: that it has begun, and its work. Without torch, whose import takes seconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from workbench import recipes
from workbench.config.sections import fleet_config
from workbench.config.yaml_text import override, read_yaml
from workbench.errors import WorkbenchError

_METHOD = "adapter.method"
_MEASURED = "Measured "
"""How the comment of a shipped recipe begins that tells its time."""


def sentences(recipe: str, overrides: Sequence[str]) -> list[str]:
    """The run in words, from the file as it is written; mistakes in it are reported later, when all of it is read."""
    try:
        path = recipes.find(recipe)
        shipped = read_yaml(path)
        values = override(shipped, overrides)
        text = path.read_text(encoding="utf-8")
    except (WorkbenchError, OSError):
        return [f"{recipe}: reading the recipe ..."]
    model = _of(values, "model", "id", "starter")
    size = _of(values, "batch", "size", 32)
    steps, epochs = _of(values, "train", "steps", None), _of(values, "train", "epochs", None)
    budget = values.get("budget")
    given = budget if isinstance(budget, Mapping) else {}
    limits = [f"{key} {value}" for key, value in given.items() if value is not None]
    if steps is not None:
        length = f"{steps} {'step' if steps == 1 else 'steps'} of {size} rows"
    elif epochs is None and limits:
        length = f"steps of {size} rows until the budget is used up"
    else:
        length = f"{epochs or 1} {'epoch' if epochs in (None, 1) else 'epochs'} in steps of {size} rows"
    ends = f" (budget: {', '.join(limits)})" if limits else ""
    sentences = [
        f"{recipe}: recipe {values.get('recipe')} trains {', '.join(_methods(values))} over {model},",
        f"  {length}{ends}, on {_rows(values)}.",
    ]
    if recipe in recipes.shipped():
        comment = " ".join(line.removeprefix("# ") for line in itertools.takewhile(_is_comment, text.splitlines()))
        _, found, measured = comment.partition(_MEASURED)
        unchanged = "" if not overrides else "As it is shipped: "
        # Of other rows, or of another model, the measured figures say nothing.
        same = all(values.get(section) == shipped.get(section) for section in ("model", "data"))
        sentences += [f"  {unchanged}{_MEASURED}{measured}"] if found and same else []
    return [*sentences, "Loading torch, data and model ..."]


def _is_comment(line: str) -> bool:
    """Whether the line is of the comment that a recipe begins with, which ends at the line for editors."""
    return line.startswith("# ") and not line.startswith("# yaml-language-server")


def _methods(values: Mapping[str, Any]) -> list[str]:
    """The methods that train, each once: of a fleet its members', of a sweep or search those that it compares."""
    own = _of(values, "adapter", "method", "lora")
    methods: list[Any] = [own]
    members = fleet_config.of_folder(_of(values, "fleet", "members", None))
    if isinstance(members, Mapping):
        each = [given for given in members.values() if isinstance(given, Mapping)]
        methods = [given.get(_METHOD, _of(given, "adapter", "method", own)) for given in each]
    for recipe, section in (("sweep", "over"), ("search", "space")):
        compared = _of(values, recipe, section, None)
        listed = compared.get(_METHOD) if isinstance(compared, Mapping) else None
        if isinstance(listed, list):
            methods = listed
    return list(dict.fromkeys(map(str, methods or [own])))


def _rows(values: Mapping[str, Any]) -> str:
    """The training rows by their path, those of several sources by their names, of a fleet by how many have some."""
    members = fleet_config.of_folder(_of(values, "fleet", "members", None))
    if isinstance(members, Mapping):
        return f"rows of {len(members)} members"
    sources = _of(values, "data", "sources", None)
    named = ", ".join(map(str, sources)) if isinstance(sources, Mapping) else ""
    return str(_of(values, "data", "train", (named and f"rows of {named}") or "?"))


def _of(values: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    section_values = values.get(section)
    value = section_values.get(key) if isinstance(section_values, Mapping) else None
    return default if value is None else value
