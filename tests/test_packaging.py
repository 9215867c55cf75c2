"""The guards of the layout: folders that are not import names, and imports that go one way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "workbench": ROOT / "workbench",
    "workbench.adapters": ROOT / "adapters",
    "workbench.recipes": ROOT / "recipes",
}

if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages() -> set[str]:
    found = set()
    for name, folder in SOURCES.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(folder).parts]))
    return found


def _modules() -> dict[str, Path]:
    found = {}
    for name, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _imports(path: Path) -> set[str]:
    """Modules of this project that a file imports, inside functions too, but not for type checking alone."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    ignored = {id(inner) for block in typing for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return {name for name in found if name.split(".")[0] == "workbench"} & _modules().keys() - {"workbench"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_package_list_equals_the_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == _packages()


def _floor(module: str) -> int:
    """How high a module stands; imports go down or stay."""
    tops = {"workbench.cli.verbs": 5, "workbench.cli.render": 4, "workbench.recipes": 3}
    bottoms = {"workbench.schema": 0, "workbench.errors": 0, "workbench.config.plugins": 0, "workbench.runs.files": 0}
    middle = {
        "workbench.adapters": 1,
        "workbench.config": 1,
        "workbench.config.cross_checks": 1,
        "workbench.config.freeze_policies": 1,
        "workbench.sections": 1,
    }
    for name, floor in {**tops, **middle, **bottoms}.items():
        if module == name or module.startswith(name + "."):
            return floor
    return 2


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in _modules().items()
        if module != "workbench"  # its functions are the public door to recipes
        for imported in _imports(path)
        if _floor(imported) > _floor(module)
    ]
    assert not wrong


def test_only_the_doors_import_recipes() -> None:
    importers = {
        module
        for module, path in _modules().items()
        if not module.startswith("workbench.recipes") and any("recipes" in name for name in _imports(path))
    }
    assert importers <= {"workbench", "workbench.cli.verbs", "workbench.cli.render"}


def test_no_import_cycles() -> None:
    graph = {module: _imports(path) - {module} for module, path in _modules().items() if module != "workbench"}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for imported in graph.get(module, ()):
                if not (imported == "workbench.recipes" or module.startswith(imported + ".")):
                    visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.slow
def test_the_wheel_has_one_top_level_name_and_the_files_that_are_needed(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"workbench"}
    for needed in (
        "workbench/py.typed",
        "workbench/starter/model.safetensors",
        "workbench/starter/fairytaleqa_train.jsonl",
        "workbench/report/templates/report.html",
        "workbench/recipes/configs/sft/quickstart.yaml",
        "workbench/adapters/lora.py",
    ):
        assert needed in names


def test_help_needs_no_torch() -> None:
    """What keeps `workbench --help` fast is that it imports nothing heavy."""
    code = (
        "import sys, workbench.cli.verbs;"
        "print([m for m in ('torch', 'transformers', 'peft', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_a_recipe_is_validated_without_torch() -> None:
    code = (
        "import sys; from workbench.recipes.load import load; load('sft/quickstart');"
        "print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    import workbench

    for name in workbench.__all__:
        assert hasattr(workbench, name)
