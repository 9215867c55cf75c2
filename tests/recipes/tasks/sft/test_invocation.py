"""Activated LoRA in a run: its invocation is the generation prompt, and rows without it are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import trains
from tests.run_files import read_losses, read_scores
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.errors import ConfigError, Stopped
from workbench.recipes.tasks.sft.text_run import last_invocation
from workbench.schema import parse

RECIPE = """
recipe: sft
model: {{id: {model}, compute: float32}}
adapter: {{method: alora, rank: 4}}
data: {{train: {train}, held_out: 0.2}}
batch: {{size: 4}}
train: {{steps: 2, learning_rate: 1.0e-2}}
evaluate: {{every: null, answers: 2, max_new_tokens: 3}}
"""


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


@pytest.mark.parametrize(
    ("row", "place"), [([1, 2, 3, 1, 2], 3), ([1, 2, 3], 0), ([2, 1], None), ([1], None), ([1, 1, 2, 1], 1)]
)
def test_the_last_of_several_counts(row: list[int], place: int | None) -> None:
    assert last_invocation(np.array(row), [1, 2]) == place


def test_a_run_learns_from_the_generation_prompt_on(train: Callable[..., Path]) -> None:
    run = train(name="run")
    saved = json.loads((run / "adapter/adapter_config.json").read_text())
    said = (run / "log.txt").read_text() if (run / "log.txt").exists() else ""
    assert saved["peft_type"] == "LORA" and saved["alora_invocation_tokens"]
    scores = read_scores(run)
    assert scores["after"]["loss"] != scores["before"]["loss"]
    assert not said or "The adapter acts from the last" in said


@pytest.mark.slow
def test_micro_batches_and_a_restart_do_not_matter(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = "adapter.dropout=0.1"
    whole = train(dropout, name="whole")
    assert np.allclose(
        read_losses(whole), read_losses(train(dropout, "batch.tokens_per_device=100", name="small")), atol=1e-4
    )
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped, match="after step 1 of 2"):
            train(dropout, name="broken")
    assert read_losses(train(dropout, name="broken", resume=True)) == read_losses(whole)


def test_an_invocation_that_no_row_has_is_refused(train: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"no row of .* before a token that carries loss"):
        train("adapter.invocation=zzzz", name="none")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"recipe": "mlm"}, "Write recipe=sft"),
        ({"token_drop": {"blocks": [1, 2], "keep": 0.5}}, "token_drop"),
        ({"train": {"compile": True}}, "Write train.compile=false"),
        ({"batch": {"packing": True}}, "batch.packing=true does not go with adapter.method=alora"),
        ({"freeze": {"policy": "static"}}, "does not go with adapter.method=alora"),
    ],
)
def test_what_would_hide_the_invocation_is_refused(settings: dict[str, Any], says: str) -> None:
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "adapter": {"method": "alora"}, **settings}
    with pytest.raises(ConfigError, match=says):
        parse(RunConfig, values, source="here")
