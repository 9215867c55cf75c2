"""The form that starts a run: recipes, settings with their values and meanings, and mistakes in an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench import recipes
from workbench.cli.ui.run_folder import flat
from workbench.config import reference
from workbench.config.reference import SettingReference
from workbench.config.yaml_text import read_yaml
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.runs import trust
from workbench.schema import ROOT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TOP = ("model.id", "data.train", "adapter.method", "train.learning_rate", "train.epochs", "train.steps", "batch.size")
"""Settings that most runs change."""

Answers = Mapping[str, str]
"""Settings by their key, as they would stand behind `key=` on the command line."""


def names() -> list[str]:
    """Shipped recipes, and YAML files of the folder that the server was started in."""
    return [*recipes.shipped(), *sorted(str(path) for path in Path().glob("*.y*ml") if _is_recipe(path))]


def recipe(name: str) -> dict[str, Any] | None:
    """A recipe's text and values; None where `names` has none of that name."""
    if name not in names():
        return None
    path = recipes.find(name)
    values = read_yaml(path)
    return {"name": name, "text": path.read_text(encoding="utf-8"), "written": flat(values)}


@lru_cache(maxsize=1)
def settings() -> list[dict[str, Any]]:
    """Every setting that has a place of its own, sections before their keys."""
    return [_field(each) for each in reference.settings() if "NAME" not in each.key and "[]" not in each.key]


def _field(setting: SettingReference) -> dict[str, Any]:
    return {
        "key": setting.key,
        "values": setting.values,
        "words": setting.words,
        "closed": setting.is_closed,
        "choices": reference.choices(setting.key),
        "default": setting.default,
        "meaning": setting.meaning,
        "why": setting.why,
        "unit": setting.unit,
        "papers": setting.papers,
        "of": setting.of,
        "section": setting.is_section,
        "top": setting.key in _TOP,
    }


def words(answers: Answers) -> list[str]:
    """As they stand on the command line."""
    return [f"{key}={value}" for key, value in answers.items()]


def mistakes(name: str, answers: Answers) -> list[tuple[str, str]]:
    """Place and cure of each mistake; none is looked for where Python code would be executed for it."""
    try:
        if not code(name, answers):
            load(name, words(answers))
        return []
    except ConfigError as error:
        return list(error.mistakes) or [(ROOT, str(error))]


def code(name: str, answers: Answers) -> list[str]:
    """Settings that execute Python code, in the recipe or in the answers; raises ConfigError for no recipe."""
    named = trust.code(read_yaml(recipes.find(name)))
    return [*named, *(key for key in answers if key in ("plugins", "tta.function", "model.trust_remote_code"))]


def require_name(name: str, taken: Sequence[str]) -> None:
    """Raise ConfigError where a run cannot be called so."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a run's name has letters, digits, dots, - and _, and no more than 100.")
    if name in taken:
        raise ConfigError(f"A run is called {name} already. Write another name.")


def free_name(name: str, taken: Sequence[str]) -> str:
    """A name for a run of a recipe that no other has."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name.removesuffix(".yaml").removesuffix(".yml")).strip("-.") or "run"
    number = 1
    candidate = stem
    while candidate in taken:
        number += 1
        candidate = f"{stem}-{number}"
    return candidate


def _is_recipe(path: Path) -> bool:
    try:
        return bool(re.search(r"^recipe:", path.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return False
