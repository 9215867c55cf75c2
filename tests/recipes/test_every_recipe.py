"""Every recipe of one adapter with every method: it trains, and scores what it saved, or says why it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import workbench
from tests import matrix
from tests.adapters.contract import section
from tests.conftest import MINILM, Records, record_cell, save_tiny
from tests.run_files import read_metrics, read_scores
from workbench.errors import ConfigError

SHORT = ("train.steps=2", "train.learning_rate=1e-2", "evaluate.every=null", "save.every=null", "batch.size=4")
SHORT += ("data.held_out=0.25",)
RECIPES = {
    "sft": ("evaluate.answers=0", "data.limit=16", "data.max_tokens=64"),
    "mlm": ("model.id={encoder}", "data.limit=16", "data.max_tokens=56"),
    "prefer": ("evaluate.answers=0", "data.limit=24", "data.max_tokens=128", "data.on_bad_row=skip"),
    "classify": ("classes.every_class=false", "data.limit=48", "data.max_tokens=32"),
    "reward": ("data.limit=24", "data.max_tokens=128", "data.on_bad_row=skip"),
    "embed": ("data.limit=48", "data.max_tokens=32"),
    "reinforce": (
        "rewards=[{{kind: regex, pattern: '[aeiou].*[aeiou]'}}]",
        "reinforce.warm_up=null",
        "reinforce.warm_up_steps=30",
        "reinforce.warm_up_rate=null",
        "reinforce.updates=1",
        "reinforce.answers=4",
        "evaluate.answers=4",
    ),
    "tag": ("data.limit=24", "data.max_tokens=64", "data.overlap=drop"),
    "rerank": ("data.limit=16", "data.max_tokens=48", "rerank.negatives=1", "rerank.candidates=2"),
}
"""Recipes with settings that make a second of their quickstart."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny encoder that knows a mask token."""
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "MaskedLM", MINILM)


@pytest.mark.parametrize(("recipe", "name"), matrix.task_with_method())
def test_every_recipe_with_every_method(
    recipe: str, name: str, encoder: str, tmp_path: Path, record_property: Records
) -> None:
    record_cell(record_property, method=name, recipe=recipe)
    settings = section(name).model_dump(mode="json")
    if "tokens" in settings:
        settings["tokens"] = list(range(3, 400))  # those of a few rows
    if "invocation" in settings:
        settings["invocation"] = ""  # the generation prompt
    words = [word.format(encoder=encoder) for word in (*SHORT, *RECIPES[recipe])]
    try:
        run = workbench.run(
            f"{recipe}/quickstart", [*words, f"adapter={json.dumps(settings)}"], out=tmp_path / "run", quiet=True
        )
    except ConfigError as refusal:
        record_property("refused", str(refusal))
        assert f"adapter.method={name}" in str(refusal)
        return
    scores = read_scores(run)
    lines = read_metrics(run)
    assert all(map(math.isfinite, [*(line["loss"] for line in lines), scores["after"]["loss"]]))
    if recipe == "reinforce":  # a few answers may earn what they earned before
        assert any(line["grad_norm"] > 0 for line in lines), "rewards differ, and teach"
    else:
        assert scores["after"]["loss"] != scores["before"].get("loss"), "what is scored has learnt"
    assert any((run / "adapter").iterdir())
