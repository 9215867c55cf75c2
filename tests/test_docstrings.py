"""Docstrings, those of attributes too, begin with a verb or the thing itself: they are understood without the code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
BANNED = {"What", "Who", "Whose", "Whom", "Of"}


def _wrong(path: Path) -> list[str]:
    statements = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr))
    texts = (node.value.value for node in statements if isinstance(node.value, ast.Constant))
    docs = (text for text in texts if isinstance(text, str) and text.strip())
    return [f"{path.relative_to(ROOT)}: {doc}" for doc in docs if doc.split()[0].rstrip(",.:;") in BANNED]


def test_no_docstring_begins_with_a_question_word_or_a_bare_of() -> None:
    paths = [path for name in ("workbench", "adapters", "recipes", "scripts") for path in (ROOT / name).rglob("*.py")]
    assert len(paths) > 200
    assert not [each for path in sorted(paths) for each in _wrong(path)]
