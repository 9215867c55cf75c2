"""The names of `workbench` are documented, their examples run, and they take what the commands take."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench
from workbench.adapters import METHODS
from workbench.cli import verbs
from workbench.config import task_facts

NAMES = [name for name in workbench.__all__ if not name.startswith("__")]
PRINTED = {"json", "longest_row", "plot"}
"""Options of commands about what they print."""
LAUNCHED = {"devices"}
"""A launcher's: a script that it starts calls the same function in each process."""
VERBS = {
    **{name: name for name in ("check", "features", "plan", "predict", "generate", "sample")},
    **{name: name for name in ("distill_cache", "distill_student")},
    **{name: name for name in ("adopt", "merge", "export", "combine", "blend", "compare", "doctor", "family")},
    "run": "run run_each",
    "data": "data_report",
    "lr": "find_learning_rate",
    "evaluate": "evaluate win_rate benchmark drafts",
}
"""Public functions of each command."""
OTHERWISE = {"merge": "whole", "picture": "pictures", "recording": "recordings"}
"""Options that have another name in Python, where it is that of a function beside it."""


def public(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(workbench, name)
    return found


def test_type_checkers_see_what_is_imported() -> None:
    """The imports for type checkers, the table of places and `__all__` are the same."""
    tree = ast.parse(Path(workbench.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {name: f"workbench.{place}" for name, place in workbench._PLACES.items()}
    assert seen == {**places, "RunConfig": "workbench.config:RunConfig"}
    assert sorted([*places, "__version__", "run"]) == workbench.__all__
    assert {*workbench.__all__} <= {*dir(workbench)}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        workbench.nothing  # noqa: B018


def test_an_import_takes_neither_torch_nor_pydantic() -> None:
    code = "import sys, workbench; print({'torch', 'transformers', 'peft', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_documented(name: str) -> None:
    text, signature = inspect.getdoc(public(name)) or "", inspect.signature(public(name))
    told = text.partition("Args:")[2].partition("\n\n")[0]
    assert [each for each in signature.parameters if f"{each}: " not in told] == []
    assert ("Returns:" in text) is (signature.return_annotation not in ("None", None))
    assert "Examples:" in text and ">>> " in text


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_takes_what_its_command_takes(verb: str) -> None:
    taken = {name for each in VERBS[verb].split() for name in inspect.signature(public(each)).parameters}
    options = {OTHERWISE.get(name, name) for name in inspect.signature(getattr(verbs, verb)).parameters}
    assert options - PRINTED - LAUNCHED <= taken
    assert ("devices" in taken) is (verb == "plan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the examples run: that of `run` first, whose run the others use."""
    known: list[dict[str, Any]] = [METHODS, task_facts.TASKS]
    before = [dict(each) for each in known]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        shown("run")
        yield Path.cwd()
    for each, own in zip(known, before, strict=True):  # without what examples registered
        each.clear()
        each.update(own)


def shown(name: str) -> None:
    """Run the example of a name."""
    (example,) = doctest.DocTestFinder(recurse=False).find(public(name), name, module=False, globs={})
    told: list[str] = []
    result = doctest.DocTestRunner().run(example, out=told.append)
    assert result.attempted and not result.failed, "".join(told)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "run"])
def test_an_example_runs(name: str, folder: Path, drawn: None) -> None:
    shown(name)
