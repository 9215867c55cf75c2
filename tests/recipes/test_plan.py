"""Plans against the same runs: what they hold at most, counted storage by storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from workbench.config import RunConfig
from workbench.engine import Fit
from workbench.errors import ConfigError
from workbench.planning.ledger import Ledger
from workbench.planning.plan import Plan
from workbench.planning.rehearsal import hold
from workbench.recipes.load import load
from workbench.recipes.plan import plan

SHORT = ["train.steps=8", "train.epochs=null", "evaluate.answers=0", "save.every=null"]


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ledger]]:
    """Of every training."""
    found: list[Ledger] = []
    work = Fit.work

    def counted(fit: Fit) -> None:
        with Ledger() as ledger:
            hold(ledger, fit)
            work(fit)
        found.append(ledger)

    monkeypatch.setattr(Fit, "work", counted)
    yield found


@pytest.fixture
def compare(ledgers: list[Ledger], tmp_path: Path) -> Callable[..., tuple[Plan, int]]:
    """Plans a run, runs it, and gives the plan and what was measured."""

    def both(recipe: str, *words: str) -> tuple[Plan, int]:
        planned = plan(load(recipe, [*words, *SHORT]))
        workbench.run(recipe, [*words, *SHORT], out=tmp_path / "run", quiet=True)
        return planned, ledgers[-1].peak

    return both


@pytest.mark.parametrize(
    "words",
    [
        ["model.weights=float32"],
        ["model.weights=bfloat16", "train.checkpointing=true"],
        ["model.weights=bfloat16", "adapter={method: full}"],
        ["model.weights=float32", "adapter={method: houlsby}"],
        ["model.weights=float32", "adapter={method: prefix}"],
        ["model.weights=nf4"],
        ["model.weights=int8"],
        ["freeze={policy: static, layers: 0.5, cache: off}"],
        ["batch.tokens_per_device=2000", "batch.size=6", "optimizer={name: sgd}"],
    ],
    ids=" ".join,
)
def test_a_plan_predicts_the_peak(words: list[str], compare: Callable[..., tuple[Plan, int]]) -> None:
    planned, measured = compare("sft/quickstart", "data.limit=300", *words)
    assert measured * 0.97 <= planned.rehearsed.peak <= measured * 1.05
    assert sum(planned.rehearsed.at_peak.values()) <= planned.rehearsed.peak


def test_of_a_classifier_too(compare: Callable[..., tuple[Plan, int]], tmp_path: Path) -> None:
    bert = save_tiny(
        tmp_path / "bert", "Bert", "SequenceClassification", MINILM, num_hidden_layers=4, max_position_embeddings=128
    )
    planned, measured = compare("classify/quickstart", f"model.id={bert}", "adapter={method: full}", "data.limit=300")
    assert measured * 0.97 <= planned.rehearsed.peak <= measured * 1.05


def test_a_plan_counts_what_a_run_counts(compare: Callable[..., tuple[Plan, int]], tmp_path: Path) -> None:
    planned, _ = compare("sft/quickstart", "data.limit=300")
    manifest: dict[str, Any] = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert planned.size.trainable == manifest["model"]["trainable"]
    assert planned.size.file_bytes == (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert planned.tokens_per_device == manifest["batch"]["tokens_per_device"]
    assert planned.rehearsed.at_peak["weights"] >= manifest["model"]["weight_bytes"]
    assert planned.steps == 8


def test_it_says_what_fits() -> None:
    config = load("sft/quickstart", ["data.limit=300", *SHORT])
    tight, wide = plan(config, memory=100_000_000), plan(config, memory=100_000_000_000)
    assert not tight.fits and "are missing" in tight.reasons[0]
    assert wide.fits and "are left" in wide.reasons[0]
    facts = json.loads(json.dumps(wide.facts))
    assert facts["fits"] is True and facts["bytes"]["peak"] == wide.rehearsed.peak
    assert {"weights", "gradients", "optimizer", "activations", "peak"} <= set(facts["bytes"])


def test_a_recipe_that_cannot_be_planned_is_refused() -> None:
    config = load("crossval/quickstart")
    assert isinstance(config, RunConfig)
    with pytest.raises(ConfigError, match="recipe=crossval: `plan` knows the recipes sft, mlm, classify"):
        plan(config)
