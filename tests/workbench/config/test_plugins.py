"""A user's own file adds a method to the configuration, and a broken one is told by its line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from workbench.adapters import METHODS
from workbench.config import load_config, plugins
from workbench.errors import ConfigError

METHOD = """
from typing import ClassVar, Literal
from workbench.adapters import Method, MethodInfo, register

@register
class Mine(Method):
    about: ClassVar = {{"{name}": MethodInfo("nothing", "none")}}
    method: Literal["{name}"]
    size: int = 3
"""
RECIPE = "recipe: sft\nadapter: {method: lora, rank: 4}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def _plugin(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(METHOD.format(name=name))
    return path


def test_a_file_adds_a_method_with_its_own_keys(recipe: Path, tmp_path: Path) -> None:
    path = _plugin(tmp_path, "mine")
    config = load_config(recipe, [f"plugins=[{path}]", "adapter.method=mine", "adapter.size=5"])
    assert config.adapter.model_dump() == {"method": "mine", "size": 5}
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert plugins.fingerprints(config.plugins) == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    with pytest.raises(ConfigError, match=r"adapter\.sise: unknown key\. Did you mean `size`\?"):
        load_config(recipe, [f"plugins=[{path}]", "adapter.method=mine", "adapter.sise=5"])
    del METHODS["mine"]


def test_a_name_that_is_taken_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.py, line 5: ValueError: adapter.method lora exists already"):
        load_config(recipe, [f"plugins=[{_plugin(tmp_path, 'lora')}]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_here\n", r"broken.py, line 1: ModuleNotFoundError: No module named 'nothing_here'"),
        ("x = 1\nx +\n", r"broken.py, line 2: SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\n\nf()\n", r"broken.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_broken_file_is_told_by_its_line(recipe: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    for _ in range(2):  # a failed file is not remembered as done
        with pytest.raises(ConfigError, match=message):
            load_config(recipe, [f"plugins=[{tmp_path / 'broken.py'}]"])


def test_no_such_file(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins: none\.py is no Python file\. Write the path of one"):
        load_config(recipe, ["plugins=[none.py]"])
