"""A run of one recipe imports what that recipe needs: each library takes a part of the time to the first step."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from workbench.config import RunConfig
from workbench.recipes.run import main_of

UNUSED = {"sklearn", "matplotlib", "nltk", "optuna", "deepspeed"}
"""Libraries of other recipes, of scores and of pages, which come when they are asked for."""


@pytest.mark.slow
def test_training_a_language_model_imports_nothing_of_other_recipes() -> None:
    code = "import sys, workbench.recipes.run as run; run.main_of('sft'); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not UNUSED & set(ended.stdout.split())


def test_every_recipe_has_a_function_that_carries_it_out() -> None:
    for recipe in get_args(RunConfig.model_fields["recipe"].annotation):
        assert main_of(recipe).__module__.startswith("workbench.recipes.")
