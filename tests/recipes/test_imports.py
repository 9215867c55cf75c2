"""A run of one recipe imports what that recipe needs: each library takes a part of the time to the first step."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import workbench
from workbench.cli.verbs import app
from workbench.config import task_facts
from workbench.recipes.task import Task

UNUSED = {"sklearn", "scipy.stats", "matplotlib", "nltk", "rouge_score", "optuna", "deepspeed", "pandas", "datasets"}
"""Libraries of other recipes, of tests, of pages and of what follows training, which come when they are asked for."""


@pytest.mark.slow
def test_training_and_plans_import_nothing_of_other_recipes_no_compiler_and_pages_of_text_no_class_scores() -> None:
    """As a command imports it: PEFT imports bitsandbytes, which would import a compiler."""
    code = """if True:
        import sys
        from workbench.runs.process_memory import importing
        with importing():
            import workbench.recipes.verbs.run
            import workbench.recipes.over.crossval, workbench.recipes.tasks.classify.task
            import workbench.recipes.tasks.sft.task
        from workbench.evaluation import metrics
        metrics.rouge_l("a word", "a word")
        print(*sys.modules)
        import workbench.recipes.verbs.plans.plan
        print(*sys.modules)
        import workbench.report.pages
        print(*sys.modules)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    trained, planned, told = (set(line.split()) for line in ended.stdout.splitlines()[-3:])
    assert not UNUSED & trained and not UNUSED & planned
    assert "bitsandbytes" in trained and "torch._inductor.compile_fx" not in trained
    assert not {"sklearn", "scipy.stats"} & told and "workbench.report.pages" in told


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["ls", "recipes"], ["ls", "runs"]])
def test_lists_help_and_versions_come_without_torch(words: list[str], tmp_path: Path) -> None:
    code = f"import sys; from workbench.cli.verbs import app; app({words}, standalone_mode=False); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert not {"torch", "numpy", "workbench.config"} & set(ended.stdout.splitlines()[-1].split())


def test_the_version_is_one_line_of_what_is_installed() -> None:
    told = CliRunner().invoke(app, ["--version"])
    names = ("peft-workbench", "torch", "transformers", "peft")
    assert told.exit_code == 0
    assert told.stdout == ", ".join(f"{name} {metadata.version(name)}" for name in names) + "\n"
    assert f"peft-workbench {workbench.__version__}," in told.stdout


def test_every_task_and_every_recipe_over_tasks_is_carried_out() -> None:
    for facts in task_facts.TASKS.values():
        assert isinstance(import_module(facts.module).TASK, Task)
    for over in task_facts.OVER.values():
        assert callable(import_module(over.module).main)
