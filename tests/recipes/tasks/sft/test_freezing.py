"""Freezing from the command's side: a bank that computes each row once, and adapters that stock PEFT loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_scores, write_lines
from workbench.cli.console import Terminal
from workbench.errors import Stopped
from workbench.models import exported
from workbench.runs import run_directory
from workbench.training.freezing import prefix_cache
from workbench.training.freezing.cached_prefix import CachedPrefix

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

FOLDS = 5
ROWS = 40
TEST = 10
WORDS = {"sun": "bright warm sun", "rain": "cold wet rain", "snow": "white deep snow"}
HALF = "freeze={policy: static, layers: 0.5, cache: %s}"


def _write(path: Path, rows: int, *, first: int) -> str:
    """Sentences whose words say their class, no two of them alike."""
    names = list(WORDS)
    numbers = range(first, first + rows)
    lines = [
        {"text": f"{WORDS[names[n % 3]]} over {'the ' * (n % 4)}house {n}", "label": names[n % 3]} for n in numbers
    ]
    write_lines(path, lines)
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of four blocks with the vocabulary of a real one, dropout and all."""
    folder = tmp_path_factory.mktemp("frozen")
    save_tiny(folder, "Bert", "SequenceClassification", MINILM, num_hidden_layers=4)
    return folder


@pytest.fixture
def prefixes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CachedPrefix]]:
    """Every cached prefix of a run."""
    found: list[CachedPrefix] = []

    made = prefix_cache.PrefixCache.cached_prefix

    def remembered(*args: Any, **named: Any) -> CachedPrefix:
        found.append(made(*args, **named))
        return found[-1]

    monkeypatch.setattr(prefix_cache.PrefixCache, "cached_prefix", remembered)
    yield found


def _crossval(home: Path, name: str, *more: str, resume: bool = False) -> Path:
    words = [
        f"data.train={_write(home / 'train.jsonl', ROWS, first=0)}",
        f"data.test={_write(home / 'test.jsonl', TEST, first=1000)}",
        *(f"model.id={home}", "model.weights=float32", "model.compute=float32", "data.limit=null"),
        *(f"folds.k={FOLDS}", "train.learning_rate=1e-2", "train.steps=12", "batch.size=8"),
        *("adapter.rank=4", "save.every=5", "duplicates.on_duplicate=ignore", "data.overlap=tell"),
    ]
    return workbench.run("crossval/quickstart", [*words, *more], out=home / name, resume=resume, quiet=True)


def _outputs(run: Path) -> list[np.ndarray[Any, Any]]:
    tables = [pd.read_parquet(run / name) for name in ("out_of_fold.parquet", "predictions.parquet")]
    return [table.filter(like="p_").to_numpy() for table in tables]


@pytest.fixture(scope="module")
def plain(home: Path) -> Path:
    """A cross-validation that computes its frozen blocks each time. Read only."""
    return _crossval(home, "plain", HALF % "off")


def test_a_bank_computes_each_row_once_in_the_whole_run(home: Path, plain: Path, prefixes: list[CachedPrefix]) -> None:
    """Five adapters, three epochs, predictions out of fold and of the test rows: fifty rows, fifty computed."""
    run = _crossval(home, "kept", HALF % "memory")
    assert len(prefixes) == 1 + FOLDS, "one in training, and one for the predictions of each adapter"
    assert sum(cached.computed for cached in prefixes) == ROWS + TEST
    assert sum(each.read for each in prefixes) > 10 * (ROWS + TEST) and not any(each.passed for each in prefixes)
    for found, wanted in zip(_outputs(run), _outputs(plain), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    members = sorted(path.parent.relative_to(plain) for path in plain.glob("members/round-0/*/metrics.jsonl"))
    assert len(members) == FOLDS
    for member in members:
        assert read_losses(run / member) == pytest.approx(read_losses(plain / member), rel=1e-5)


def test_on_disk_the_next_run_computes_none(home: Path, plain: Path, prefixes: list[CachedPrefix]) -> None:
    first = _crossval(home, "disk", HALF % "disk")
    assert sum(cached.computed for cached in prefixes) == ROWS + TEST
    prefixes.clear()
    second = _crossval(home, "disk-again", HALF % "disk", "train.learning_rate=5e-3")
    assert prefixes and sum(cached.computed for cached in prefixes) == 0
    for found, wanted in zip(_outputs(first), _outputs(plain), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not np.allclose(_outputs(second)[0], _outputs(first)[0], atol=1e-5)


@pytest.mark.slow
def test_a_bank_that_was_stopped_ends_with_the_same_result(
    home: Path, prefixes: list[CachedPrefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its second epoch: what was kept is gone."""
    whole = _crossval(home, "whole", HALF % "memory")
    asked = iter([False] * 6 + [True] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: next(asked))
        with pytest.raises(Stopped):
            _crossval(home, "stopped", HALF % "memory")
    prefixes.clear()
    resumed = _crossval(home, "stopped", HALF % "memory", resume=True)
    assert sum(cached.computed for cached in prefixes) == ROWS + TEST
    for found, wanted in zip(_outputs(resumed), _outputs(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.nightly
def test_a_bank_equals_its_adapters_alone_with_a_frozen_half(home: Path, plain: Path) -> None:
    apart = _crossval(home, "apart", HALF % "memory", "folds.together=false")
    for found, wanted in zip(_outputs(apart), _outputs(plain), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)


@pytest.mark.nightly
def test_a_bank_ships_what_its_adapters_alone_ship(home: Path) -> None:
    """Not the values that the optimizer tries out, but those that it evaluates."""
    words = ["optimizer={name: schedule_free}", "schedule={name: constant, warmup: 0}", "train.steps=6"]
    together, apart = (
        _crossval(home, f"shipped-{told}", HALF % "memory", *words, f"folds.together={told}")
        for told in ("true", "false")
    )
    for found, wanted in zip(_outputs(together), _outputs(apart), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)


def _sft(short_stories: str, questions: Path, out: Path, *words: str) -> Path:
    known = [f"model.id={short_stories}", f"data.train={questions}", "data.held_out=0.1", "data.limit=60"]
    known += ["model.weights=float32", "model.compute=float32", "adapter={method: lora, rank: 4, alpha: 8}"]
    known += ["batch.size=6", "train.steps=20", "train.learning_rate=3e-3", "evaluate.every=5"]
    known += ["evaluate.answers=0", "save.every=null"]
    return workbench.run("sft/quickstart", [*known, *words], out=out, quiet=True)


def test_an_adapter_over_a_frozen_half_is_one_that_stock_peft_loads(
    short_stories: str, questions: Path, tmp_path: Path, prefixes: list[CachedPrefix]
) -> None:
    """It has nothing below the line, and says so."""
    run = _sft(short_stories, questions, tmp_path / "run", HALF % "memory")
    assert len(prefixes) == 1 and prefixes[0].computed <= 60
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    blocks = {int(name.split("layers.")[1].split(".")[0]) for name in tensors}
    number = AutoModelForCausalLM.from_pretrained(short_stories).config.num_hidden_layers
    line = max(1, round(number / 2))
    assert blocks == set(range(line, number))
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["exclude_modules"]

    own = exported.load(run, run_directory.read_config(run)).model
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(short_stories), run / "adapter").eval()
    assert {name for name in stock.state_dict() if "lora" in name} == {
        name for name in own.state_dict() if "lora" in name
    }
    ids_BL = torch.arange(3, 19)[None]
    with torch.no_grad():
        found, wanted = stock(input_ids=ids_BL).logits, own(input_ids=ids_BL).logits
    assert torch.equal(found, wanted)
    with torch.no_grad(), stock.disable_adapter():
        assert not torch.allclose(stock(input_ids=ids_BL).logits, wanted, atol=1e-3), "the adapter learnt nothing"


def test_the_recipe_gives_the_same_curve_kept_or_not(short_stories: str, questions: Path, tmp_path: Path) -> None:
    kept, computed = (_sft(short_stories, questions, tmp_path / cache, HALF % cache) for cache in ("memory", "off"))
    assert read_losses(kept) == pytest.approx(read_losses(computed), rel=1e-5)
    scores = [read_scores(run) for run in (kept, computed)]
    assert scores[0]["after"]["loss"] == pytest.approx(scores[1]["after"]["loss"], rel=1e-5)
    assert scores[0]["after"]["loss"] < scores[0]["before"]["loss"]


@pytest.mark.nightly
def test_quantised_weights_learn_over_a_frozen_half(short_stories: str, questions: Path, tmp_path: Path) -> None:
    kept, computed = (
        _sft(short_stories, questions, tmp_path / cache, HALF % cache, "model.weights=nf4")
        for cache in ("memory", "off")
    )
    assert read_losses(kept) == pytest.approx(read_losses(computed), rel=1e-4)
    assert np.mean(read_losses(kept)[-5:]) < np.mean(read_losses(kept)[:5])
