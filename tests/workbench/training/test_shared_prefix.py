"""What rows begin with is computed once, and the run is the same; `auto` takes it where much need not be computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import trains
from tests.run_files import read_lines, read_losses, write_lines
from tests.stopping import stop_after
from tests.workbench.data.test_shared_prefix import Rows
from workbench.config import RunConfig
from workbench.data.batching import Row
from workbench.data.packing import PACKED, SharedPrefix
from workbench.errors import ConfigError, Stopped
from workbench.models import backbones
from workbench.training import packing

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 6, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 3}}
"""
BEGINNING = "You know every story that was ever told by the fire. Answer in one sentence. " * 2
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recomputed": ("train.checkpointing=true",),
    "loss on all": ("data.loss_on=all",),
    "weighted rows": ("data.sampling.by=infobatch", "data.limit=24"),
    "tokens that are looked at": ("data.sampling.by=selective",),
    "all weights": ("adapter={method: full}", "train.learning_rate=1e-4"),
    "frozen layers": ("freeze.policy=egeria", "freeze.every=2"),
    "cut rows": ("data.length_warm_up.start=130",),
}


@pytest.fixture
def begun(tmp_path: Path, questions: Path) -> Path:
    """Questions behind one beginning."""
    path = tmp_path / "begun.jsonl"
    rows = read_lines(questions)
    texts = [{"prompt": BEGINNING + row["question"], "completion": row["answer"]} for row in rows]
    return write_lines(path, texts)


@pytest.fixture
def train(tmp_path: Path, short_stories: str, begun: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=begun)


def shared(run: Path) -> int:
    return int(json.loads((run / "manifest.json").read_text())["batch"]["shared_tokens"])


@pytest.mark.nightly(but=["plain", "recomputed", "all weights", "frozen layers", "cut rows"])
@pytest.mark.parametrize(
    "way", [pytest.param(WAYS[name], id=name, marks=[pytest.mark.slow] if name != "plain" else []) for name in WAYS]
)
def test_the_curve_is_that_of_rows_by_themselves(train: Callable[..., Path], way: tuple[str, ...]) -> None:
    found = train(*way, "batch.shared_prefix=true", name="shared")
    apart = train(*way, "batch.shared_prefix=false", name="apart")
    assert shared(found) > 30 and not shared(apart)
    assert read_losses(found) == pytest.approx(read_losses(apart), rel=2e-5)


@pytest.mark.slow
def test_a_stopped_run_has_the_same_bits_and_any_micro_batch_the_same_curve(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["batch.shared_prefix=true", "evaluate.every=null"]
    whole = train(*words, name="whole")
    other = train(*words, "batch.tokens_per_device=250", name="other")
    assert read_losses(other) == pytest.approx(read_losses(whole), rel=1e-5)
    with monkeypatch.context() as patch:
        stop_after(patch, step=4)
        with pytest.raises(Stopped):
            train(*words, name="stopped")
    found = train(*words, name="stopped", resume=True)
    assert read_losses(found) == read_losses(whole)
    tensors, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (found, whole))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_auto_decides_by_the_rows(train: Callable[..., Path], questions: Path) -> None:
    few = ["train.steps=1"]
    assert shared(train(*few, name="begun")) > 30
    assert not shared(train(*few, f"data.train={questions}", name="questions"))
    assert not shared(train(*few, "batch.packing=false", name="padded"))
    assert not shared(train(*few, "adapter.dropout=0.1", name="dropout"))
    assert not shared(train(*few, "adapter={method: pvera, rank: 8}", name="noise"))
    assert not shared(train(*few, "optimizer.name=sophia", "batch.packing=true", name="drawn labels"))


def test_auto_shares_nothing_where_nobody_has_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, "batch": {"size": 4}})
    row = Row(np.arange(3, 203), np.ones(200, dtype=bool))
    rows = Rows([row] * 3 + [Row(np.arange(3, 204), np.ones(201, dtype=bool))])
    given = {"why": None, "tokens": 1000, "compute": torch.float32}
    assert isinstance(packing.with_shared_prefix(config, rows, PACKED, **given), SharedPrefix)
    monkeypatch.setattr(backbones, "device", lambda: torch.device("cuda"))
    assert packing.with_shared_prefix(config, rows, PACKED, **given) is PACKED


def test_rows_with_nothing_in_common_are_refused() -> None:
    rows: Any = Rows([Row(np.arange(first, first + 9), np.ones(9, bool)) for first in (3, 4)])
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "a.jsonl"}, "batch": {"shared_prefix": True}})
    with pytest.raises(ConfigError, match=r"no first token in common.*shared_prefix=auto"):
        packing.with_shared_prefix(config, rows, PACKED, why=None, tokens=99, compute=torch.float32)
    with pytest.raises(ConfigError, match="has no sdpa"):
        packing.with_shared_prefix(config, rows, PACKED, why="it has no sdpa", tokens=99, compute=torch.float32)


def test_what_is_saved_is_a_count_of_the_first_steps() -> None:
    lengths = np.full(64, 100)
    config: Any = RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "a.jsonl"}, "batch": {"size": 32, "tokens_per_device": 340}}
    )
    found = packing.saved(config, lengths, SharedPrefix(80), PACKED, tokens=340)
    assert found == pytest.approx(1 - (32 * 20 + 3 * 80) / 3200)
