"""Every function that does one thing on an accelerator and another elsewhere is listed, with its test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "scripts" / "gpu" / "README.md"
ROW = re.compile(r"^\| `([\w/]+\.py)` (.+?) \| .+? \| (.+?) \|$", re.MULTILINE)
ASKS = {"cuda", "accelerator", "is_cuda"}
"""Names of modules and attributes of torch that a branch asks."""


def branches() -> set[str]:
    """Functions, as FILE and NAME, that ask of which kind a device is, or of an accelerator."""
    paths = (path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py"))
    return {f"{path.relative_to(ROOT)} {name}" for path in paths for name in _asking(ast.parse(path.read_text()), "")}


def _asking(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        name = node.name
    if isinstance(node, ast.Attribute) and (_kind(node) or _torch(node)):
        yield name or "module"
    for child in ast.iter_child_nodes(node):
        yield from _asking(child, name)


def _kind(node: ast.Attribute) -> bool:
    """Whether it is the type of a device."""
    owner = ast.unparse(node.value)
    return node.attr == "type" and ("device" in owner or owner == "target")


def _torch(node: ast.Attribute) -> bool:
    return node.attr in ASKS and ast.unparse(node.value) in ("torch", "tensor")


def listed() -> dict[str, str]:
    """The test of each function, as the list has it."""
    rows = [(file, names, test) for file, names, test in ROW.findall(LIST.read_text())]
    return {f"{file} {name}": test for file, names, test in rows for name in re.findall(r"`([\w.]+)`", names)}


def test_every_branch_is_listed() -> None:
    found = branches()
    assert len(found) > 30
    assert found == set(listed()), "scripts/gpu/README.md lists the functions that ask of a device"


def test_the_tests_are_there() -> None:
    for test in listed().values():
        for path in re.findall(r"`(tests/[^`]+\.py)`", test):
            assert (ROOT / path).exists(), path
        assert "`tests/" in test, test
