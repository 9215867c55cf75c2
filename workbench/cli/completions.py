"""Words that a shell completes: recipes, settings with their values, runs, and what `explain` knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def recipes(incomplete: str) -> list[str]:
    """Shipped recipes, and YAML files and folders on the way to one."""
    from workbench.recipes import shipped

    return [*_beginning(shipped(), incomplete), *_paths(incomplete, (".yaml", ".yml"))]


def runs(incomplete: str) -> list[str]:
    """Folders on the way to a run, and runs."""
    return [*_paths(incomplete, ())]


def settings(incomplete: str) -> list[str]:
    """Keys with the = that follows, and behind it the values among which a setting chooses."""
    from workbench.config import reference

    key, equals, value = incomplete.partition("=")
    known = reference.settings()
    keys = [each for each in known if not each.is_section and "[]" not in each.key and "NAME" not in each.key]
    if not equals:
        return list(dict.fromkeys(f"{word}=" for word in _beginning([each.key for each in keys], key)))
    words = [word for each in keys if each.key == key for word in each.words]
    return [f"{key}={word}" for word in dict.fromkeys(_beginning(words, value))]


def explained(incomplete: str) -> list[str]:
    """Keys, sections, and names among which a key chooses, such as methods."""
    from workbench.config import reference

    names = [name for key in reference.choosing_keys() for name in reference.choices(key)]
    words = [*(each.key for each in reference.settings()), *names]
    return list(dict.fromkeys(_beginning(words, incomplete)))


def _beginning(words: list[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Folders that begin so, and files with one of these suffixes."""
    folder, _, name = incomplete.rpartition("/")
    place = Path(f"{folder}/" if "/" in incomplete else ".").expanduser()
    try:
        beside = sorted(place.iterdir())
    except OSError:
        return
    for path in beside:
        if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith(".")):
            if path.is_dir():
                yield f"{incomplete[: len(incomplete) - len(name)]}{path.name}/"
            elif path.suffix in suffixes:
                yield f"{incomplete[: len(incomplete) - len(name)]}{path.name}"
