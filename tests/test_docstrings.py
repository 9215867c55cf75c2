"""Docstrings begin with a verb or the thing itself, so that they are understood without the code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
BANNED = {"What", "Who", "Whose", "Whom", "Of"}


def _wrong(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        doc = ast.get_docstring(node) if documented else None
        if doc and doc.split()[0].rstrip(",.:;") in BANNED:
            found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {doc.splitlines()[0]}")
    return found


def test_no_docstring_begins_with_a_question_word_or_a_bare_of() -> None:
    paths = [path for name in ("workbench", "adapters", "recipes", "scripts") for path in (ROOT / name).rglob("*.py")]
    assert len(paths) > 200
    assert not [each for path in sorted(paths) for each in _wrong(path)]
