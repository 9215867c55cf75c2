"""`workbench lr`: what its short trainings are, on a real backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import write_questions
from tests.run_files import read_losses
from workbench.cli import render
from workbench.config import RunConfig
from workbench.errors import ConfigError, TrainingError
from workbench.recipes.verbs import rate_finder
from workbench.recipes.verbs.rate_finder import rates_between

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture
def config(tmp_path: Path, short_stories: str) -> RunConfig:
    train = write_questions(tmp_path / "train.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(60)])
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
            "adapter": {"method": "lora", "rank": 2, "alpha": 4},
            "data": {"train": str(train), "held_out": 0.1},
            "batch": {"size": 4},
            "train": {"epochs": 9, "learning_rate": 1e-2},
            "budget": {"tokens": 10**9},
            "save": {"ship": "best"},
        }
    )


def found(config: RunConfig, out: Path, **asked: Any) -> rate_finder.Tried:
    asked = {"lowest": 1e-3, "highest": 1e-1, "rates": 3, "steps": 8} | asked
    return rate_finder.find_learning_rate(config, out=out, **asked)


def test_each_rate_is_a_run_of_its_own_however_it_trains(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a bank, one after another for what a bank cannot hold, and alone: the same losses on the same rows."""
    together = found(config, tmp_path / "lr")
    assert [each.rate for each in together.choice.tried] == [1e-3, 1e-2, 1e-1] and together.alone is None
    values = config.model_dump(mode="json")
    values["train"] |= {"epochs": None, "steps": 8}
    values |= {"budget": {}, "evaluate": {"answers": 0}}
    alone = workbench.run(RunConfig.model_validate(values), out=tmp_path / "run", quiet=True)
    wanted = read_losses(alone)
    assert together.choice.tried[1].losses == pytest.approx(wanted, rel=1e-4)
    assert [each.losses[0] for each in together.choice.tried] == pytest.approx(3 * [wanted[0]])

    table = json.loads((tmp_path / "lr" / "learning_rate.json").read_text())
    assert table["suggested"] == together.suggested and len(table["rates"]) == 3
    assert (tmp_path / "lr" / "learning_rate.svg").read_text().startswith("<")
    render.learning_rates(together)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Suggested: train.learning_rate={together.suggested:g}" in printed
    assert together.whole is not None and together.whole > 100
    assert f"the root of 8 through the run's {together.whole} steps" in printed and "times as long" in printed


@pytest.mark.slow
def test_what_a_bank_cannot_hold_trains_one_by_one(config: RunConfig, tmp_path: Path) -> None:
    together = found(config, tmp_path / "lr")
    noisy = config.model_copy(
        update={"model": config.model.model_copy(update={"dropout": True})}
    )  # of which it has none
    apart = found(noisy, tmp_path / "apart")
    assert apart.alone is not None and "model.dropout" in apart.alone
    for one, other in zip(apart.choice.tried, together.choice.tried, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-4)


def test_rates_that_all_explode_are_told(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="smaller --lowest"):
        found(config, tmp_path / "lr", lowest=1e4, highest=1e6)


def test_rates_are_evenly_spaced() -> None:
    assert rates_between(1e-4, 1e-1, 4) == [1e-4, 1e-3, 1e-2, 1e-1]
    with pytest.raises(ConfigError, match="--lowest"):
        rates_between(1e-1, 1e-4, 4)
