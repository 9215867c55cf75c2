"""One name for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = sorted(path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py"))


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PATHS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert not {name: where for name, where in places.items() if len(where) > 1}
