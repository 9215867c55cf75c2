"""The guards of the layout: folders that are not import names, and imports that go one way."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_adapters_and_recipes_import_from_the_checkout() -> None:
    """The tree is the package: without an install, and under one name alone."""
    code = "import workbench.adapters; from workbench.recipes.load import load; print(load('sft/quickstart').recipe)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.strip() == "sft", done.stderr


def test_imports_keep_their_contracts() -> None:
    """The order of the packages, and no circle, imports for type checking included: [tool.importlinter]."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["lint-imports", "--no-cache"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout


def test_only_the_doors_import_recipes() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for name in ("workbench", "adapters")
        for path in (ROOT / name).rglob("*.py")
        if "workbench.recipes" in path.read_text()
    }
    assert importers == {
        "workbench/__init__.py",
        "workbench/cli/arguments.py",
        "workbench/cli/check_output.py",
        "workbench/cli/each_value.py",
        "workbench/cli/render.py",
        "workbench/cli/ui/form.py",
        "workbench/cli/verbs.py",
        "workbench/config/task_facts.py",
    }


def test_the_package_needs_no_tests() -> None:
    """An install has none; from the checkout they could be imported."""
    paths = [path for name in ("workbench", "adapters", "recipes") for path in (ROOT / name).rglob("*.py")]
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    modules = [(path, each.name) for path, node in nodes if isinstance(node, ast.Import) for each in node.names]
    modules += [(path, node.module or "") for path, node in nodes if isinstance(node, ast.ImportFrom)]
    assert len(modules) > 1000
    assert not [(path, module) for path, module in modules if module.split(".")[0] == "tests"]


WITHOUT_EXTRAS = """
import importlib, importlib.util, sys
extras, find_spec = set(sys.argv[1].split(",")), importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in extras else find_spec(name, *more)

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in extras:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def test_every_task_and_orchestration_is_there_without_extras() -> None:
    """What only an extra installs is imported by what needs it alone: a new environment has none of it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = chain(*(packages for extra, packages in extras.items() if extra not in ("test", "docs")))
    names = {re.split(r"[\[<>=;]", each)[0].replace("-", "_") for each in named}
    assert {"starlette", "soundfile", "onnx"} < names
    files = chain((ROOT / "recipes/tasks").rglob("*.py"), (ROOT / "recipes/over").glob("*.py"))
    paths = (path.relative_to(ROOT).with_suffix("") for path in files if path.stem != "__init__")
    modules = sorted(".".join(["workbench", *path.parts]) for path in paths)
    assert len(modules) > 40
    command = [sys.executable, "-c", WITHOUT_EXTRAS, ",".join(sorted(names)), ",".join(modules)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


def test_all_is_every_extra_but_those_of_developers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (all_of_them,) = extras.pop("all")
    assert set(all_of_them.removeprefix("peft-workbench[").rstrip("]").split(",")) == extras.keys() - {
        "browser",
        "docs",
        "test",
    }


def test_the_top_of_the_package_is_short() -> None:
    names = [path for path in (ROOT / "workbench").iterdir() if path.name != "__pycache__"]
    assert {path.name for path in names if path.is_symlink()} == {"adapters", "recipes"}
    assert sum(path.is_dir() and not path.is_symlink() for path in names) <= 12
    assert sum(path.is_file() for path in names) <= 5


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
        "workbench/data/starter/model.safetensors",
        "workbench/data/starter/fairytaleqa_train.jsonl",
        "workbench/data/starter/oasst_pairs_train.jsonl",
        "workbench/data/starter/sign_digits.zip",
        "workbench/data/starter/vision/model.safetensors",
        "workbench/data/starter/vision/preprocessor_config.json",
        "workbench/data/starter/sound/model.safetensors",
        "workbench/data/starter/spoken_digits.zip",
        "workbench/data/starter/vision-language/model.safetensors",
        "workbench/data/starter/vision-language/chat_template.jinja",
        "workbench/data/starter/tools/calculator.py",
        "workbench/data/starter/tools/chat_template.jinja",
        "workbench/data/starter/tools/start/config.yaml",
        "workbench/data/starter/tools/start/adapter/adapter_model.safetensors",
        "workbench/data/starter/easy_vqa.zip",
        "workbench/data/starter/easy_vqa_train.jsonl",
        "workbench/cli/ui/static/index.html",
        "workbench/cli/ui/static/vendor/uPlot.iife.min.js",
        "workbench/cli/ui/static/vendor/LICENSE.uPlot",
        "workbench/report/templates/report.html",
        "workbench/report/templates/search.html",
        "workbench/recipes/configs/sft/quickstart.yaml",
        "workbench/recipes/configs/recipe.schema.json",
        "workbench/adapters/updates/lora.py",
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
