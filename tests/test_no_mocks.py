"""Production code replaces nothing at run time: what varies is handed in."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _imported(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name.split(".")[0] for name in names}
    return found


def test_no_mocks_in_production() -> None:
    paths = [path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py")]
    assert len(paths) > 200
    assert not [path.name for path in paths if _imported(path) & {"unittest", "mock"}]
