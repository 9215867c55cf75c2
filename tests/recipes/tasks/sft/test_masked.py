"""Masked language modelling goes through the same loop and the same verbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench import report
from workbench.errors import ConfigError, Stopped
from workbench.models import exported
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT, dropout and all, with the vocabulary of a real one."""
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "MaskedLM", MINILM)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, encoder: str) -> Train:
    folder = tmp_path_factory.mktemp("runs")
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "to", "a", "big", "red", "house")
    rows = [" ".join(words[number % 5 : 5 + number * 7 % 11]) + f" {number}" for number in range(60)]
    write_lines(folder / "rows.jsonl", ({"text": row} for row in rows))

    def run(name: str, *words: str, resume: bool = False) -> Path:
        known = [f"model.id={encoder}", "model.weights=float32", f"data.train={folder}/rows.jsonl", "data.held_out=0.2"]
        known += ["data.columns={}", "adapter={method: full}", "train.steps=10", "train.learning_rate=1e-2"]
        known += ["batch.size=12", "evaluate.every=null", "save.every=null", "batch.tokens_per_device=100000"]
        return workbench.run("mlm/quickstart", [*known, *words], out=folder / name, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run over two and a half epochs. Read only."""
    return train("taught")


def test_held_out_loss_falls_and_the_report_says_so(taught: Path) -> None:
    scores = read_scores(taught)
    assert set(scores["after"]) == {"loss", "perplexity", "token_accuracy"}
    assert scores["after"]["loss"] < 0.85 * scores["before"]["loss"]
    assert scores["after"]["token_accuracy"] > scores["before"]["token_accuracy"]
    assert "Held-out" in (taught / "report.html").read_text()
    assert evaluate(taught, []) == scores["after"], "held-out masks are fixed"


def test_same_curve_for_any_micro_batch(train: Train, taught: Path) -> None:
    parts = train("parts", "batch.tokens_per_device=32")
    assert read_losses(parts) == pytest.approx(read_losses(taught), rel=1e-5)


def test_a_stopped_run_resumes_to_the_same_bits(train: Train, taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped, match="after step 1 of 10"):
            train("broken")
    assert read_losses(train("broken", resume=True)) == read_losses(taught)


@pytest.mark.nightly
def test_a_lora_run_merges_into_a_stock_model(train: Train, tmp_path: Path) -> None:
    run = train("lora", "adapter={method: lora, rank: 4}", "train.steps=3")
    assert read_losses(run)[-1] < read_losses(run)[0]
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all("lora" in name for name in tensors) and len(tensors) == 2 * 2 * 6
    found = merge(run, out=tmp_path / "merged", weights="float32")
    assert found.agreement.top1 == 1.0 and 0 <= found.agreement.kl < 1e-8
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("The cat [MASK] on a mat.", return_tensors="pt")
    merged = AutoModelForMaskedLM.from_pretrained(tmp_path / "merged")
    ours: Any = exported.load(run, run_directory.read_config(run)).model
    with torch.no_grad():
        torch.testing.assert_close(merged(**ids).logits, ours(**ids).logits, rtol=1e-4, atol=1e-5)


def test_check_shows_the_masks(encoder: str, train: Train, taught: Path) -> None:
    words = [f"model.id={encoder}", f"data.train={taught.parent}/rows.jsonl", "data.columns={}"]
    found = check(load("mlm/quickstart", words))
    pieces = [piece for _, each in found.examples for piece in each]
    assert any(text == "[MASK]" and loss for text, loss in pieces)
    assert not any("[CLS]" in text and loss for text, loss in pieces)


def test_such_a_run_writes_no_text(taught: Path, tmp_path: Path) -> None:
    for verb in (
        lambda: generate(taught, "Hello", max_new_tokens=4),
        lambda: predict(taught, "x.jsonl", out=tmp_path / "out.csv", max_new_tokens=4),
    ):
        with pytest.raises(
            ConfigError, match=r"recipe mlm trains no model that writes text.*recipes prefer, reinforce, sft"
        ):
            verb()


@pytest.mark.parametrize(
    ("recipe", "word", "cure"),
    [
        ("mlm/quickstart", "data.loss_on=all", "leave model.chat_template and data.loss_on out"),
        ("sft/quickstart", "masking.share=0.3", "Leave masking out"),
    ],
)
def test_settings_of_another_recipe_are_refused(recipe: str, word: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        load(recipe, [word])


def test_runs_are_compared_on_the_same_masks_only(train: Train, taught: Path, tmp_path: Path) -> None:
    slower, masked = train("slower", "train.learning_rate=1e-3"), train("more-masks", "masking.share=0.3")
    comparison = report.compare([taught, slower, masked], tmp_path / "page.html")
    assert [row[:3] for row in comparison.paired] == [("slower", "loss", "12")]
    assert any(note.startswith("taught and more-masks: no paired difference") for note in comparison.notes)
