"""The guards of the layout: folders that are not import names, and imports that go one way."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_package_list_equals_the_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == _packages()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as an install lays it out, adapters and recipes inside of it."""
    site = tmp_path_factory.mktemp("site")
    for name, folder in SOURCES.items():
        shutil.copytree(folder, site.joinpath(*name.split(".")), ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_imports_keep_their_contracts(installed: Path) -> None:
    """The order of the packages, and no circle, imports for type checking included: [tool.importlinter]."""
    command = ["lint-imports", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=installed,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stdout


def test_only_the_doors_import_recipes() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for name in ("workbench", "workbench.adapters")
        for path in SOURCES[name].rglob("*.py")
        if "workbench.recipes" in path.read_text()
    }
    assert importers == {
        "workbench/__init__.py",
        "workbench/cli/answering_verbs.py",
        "workbench/cli/check_plot.py",
        "workbench/cli/completions.py",
        "workbench/cli/embed_table.py",
        "workbench/cli/data_table.py",
        "workbench/cli/init_verb.py",
        "workbench/cli/listing_table.py",
        "workbench/cli/picture_table.py",
        "workbench/cli/rate_table.py",
        "workbench/cli/render.py",
        "workbench/cli/sample_table.py",
        "workbench/cli/shipping_verbs.py",
        "workbench/cli/ui/form.py",
        "workbench/cli/ui/inspections.py",
        "workbench/cli/verbs.py",
    }


def test_the_top_of_the_package_is_short() -> None:
    names = [path for path in SOURCES["workbench"].iterdir() if path.name != "__pycache__"]
    assert sum(path.is_dir() for path in names) <= 12
    assert sum(path.is_file() for path in names) <= 4


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


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
        "workbench/config/freeze_policies/smartfrz.safetensors",
        "workbench/data/starter/sign_digits.zip",
        "workbench/data/starter/vision/model.safetensors",
        "workbench/data/starter/vision/preprocessor_config.json",
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


def test_public_names() -> None:
    import workbench

    for name in workbench.__all__:
        assert hasattr(workbench, name)
