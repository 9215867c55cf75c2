"""One name for one thing in the whole package, and none of the words that explain nothing to a stranger."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = sorted(path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py"))
VERBS = {"combine", "features", "plan"}
"""Recipes of verbs, named as the modules that do their work."""
BANNED = {"said", "told", "heard", "spoken", "voice", "course", "chorus", "companion", "watcher", "stepper"}
BANNED |= {"rehearse", "rehearsed", "rehearsal", "imagined"}


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a module."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def _names(path: Path) -> Iterator[str]:
    """Names that other places use: of classes, functions, arguments and attributes."""
    for node in _nodes(path):
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
    names = {path: {_bound(node) for node in _nodes(path)} & (BANNED | {"found"}) for path in PATHS}
    assert not {str(path.relative_to(ROOT)): banned for path, banned in names.items() if banned}


def test_names_say_what_they_hold() -> None:
    assert len(PATHS) > 200
    names = {path: {name.strip("_") for name in _names(path)} & BANNED for path in PATHS}
    assert not {str(path.relative_to(ROOT)): found for path, found in names.items() if found}


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PATHS:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in PATHS:
        if path.stem not in {"__init__", *VERBS}:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}
