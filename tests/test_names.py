"""One name for one thing in the whole package, and none of the words that explain nothing to a stranger."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PATHS = sorted(path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py"))
VERBS = {"combine", "features", "plan"}
"""Recipes of verbs, named as the modules that do their work."""
BANNED = {"said", "told", "heard", "spoken", "voice", "course", "chorus", "companion", "watcher", "stepper"}
BANNED |= {"rehearse", "rehearsed", "rehearsal", "imagined"}


class Names(NamedTuple):
    """Names of a module. Its tree is not kept: of all modules it has a million objects, which slow all later garbage
    collections of the process by 0.7 s each."""

    bound: frozenset[str | None]
    """Of variables and parameters."""
    used: frozenset[str]
    """Those that other places use: of classes, functions, arguments and attributes."""
    classes: tuple[str, ...]


@functools.cache
def _names(path: Path) -> Names:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return Names(frozenset(map(_bound, nodes)), frozenset(chain.from_iterable(map(_used, nodes))), classes)


def _used(node: ast.AST) -> Iterator[str]:
    """The names that a node makes for other places."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    if isinstance(node, ast.ClassDef):
        fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
        yield from (each.id for each in fields if isinstance(each, ast.Name))


def _bound(node: ast.AST) -> str | None:
    """The name that a node binds as a variable or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def test_local_names_say_what_they_hold() -> None:
    """Variables and parameters of functions; `found` may stand for anything."""
    names = {path: _names(path).bound & (BANNED | {"found"}) for path in PATHS}
    assert not {str(path.relative_to(ROOT)): banned for path, banned in names.items() if banned}


def test_names_say_what_they_hold() -> None:
    assert len(PATHS) > 200
    names = {path: {name.strip("_") for name in _names(path).used} & BANNED for path in PATHS}
    assert not {str(path.relative_to(ROOT)): found for path, found in names.items() if found}


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PATHS:
        for name in _names(path).classes:
            places[name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in PATHS:
        if path.stem not in {"__init__", *VERBS}:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}
