"""The example of a task of a user's own keeps what our own tasks keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import workbench
from tests.conftest import write_questions
from tests.own_task import forgotten_afterwards
from workbench.config import plugins
from workbench.config.run_config import load_config
from workbench.config.yaml_text import dump_yaml
from workbench.errors import ConfigError
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate

EXAMPLE = Path(__file__).parents[2] / "scripts" / "my_task.py"
STEPS = 3


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a recipe's `plugins` load it; no other test knows its task."""
    with forgotten_afterwards():
        yield plugins.module(EXAMPLE, key="plugins")


@pytest.fixture
def recipe(example: ModuleType, tmp_path: Path, short_stories: str) -> Path:
    rows = write_questions(tmp_path / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(60)])
    values = {
        "recipe": "focal",
        "plugins": [str(EXAMPLE)],
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(rows), "held_out": 0.2},
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"steps": STEPS, "learning_rate": 5e-3},
        "evaluate": {"every": STEPS, "answers": 2, "max_new_tokens": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_yaml(values))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_loss_is_that_of_the_paper(example: ModuleType, gamma: float) -> None:
    logits_NV = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    labels_N = torch.tensor([0, 1, 2, 3, 4, -100, 0])
    factor_N = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0, 1.0])
    p_NV = logits_NV.softmax(-1)
    expected = sum(
        -float(factor_N[n]) * (1 - float(p_NV[n, label])) ** gamma * float(p_NV[n, label].log())
        for n, label in enumerate(labels_N.tolist())
        if label >= 0
    )
    assert float(example.focal(logits_NV, labels_N, factor_N, gamma=gamma)) == pytest.approx(expected, rel=1e-5)
    assert float(example.focal(logits_NV, labels_N, gamma=0.0)) == pytest.approx(
        float(F.cross_entropy(logits_NV, labels_N, reduction="sum")), rel=1e-6
    )


def test_without_focus_it_learns_as_sft_does_and_with_it_otherwise(recipe: Path, tmp_path: Path) -> None:
    for name, words in {
        "sft": ["recipe=sft"],
        "focal0": ["focal.gamma=0"],
        "focal2": ["focal.gamma=2"],
    }.items():
        workbench.run(str(recipe), words, out=tmp_path / name, quiet=True)
    assert losses(tmp_path / "focal0") == pytest.approx(losses(tmp_path / "sft"), rel=1e-5)
    assert all(own < of_sft for own, of_sft in zip(losses(tmp_path / "focal2"), losses(tmp_path / "sft"), strict=True))


def test_verbs_take_its_runs(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    workbench.run(str(recipe), out=run, quiet=True)
    after = json.loads((run / "scores.json").read_text())["after"]
    found = evaluate(run, (), trust=True)
    assert found["loss"] == pytest.approx(after["loss"], rel=1e-5)
    assert check(load_config(recipe)).config.recipe == "focal"


def test_a_bank_of_it_trains_each_member_as_alone(recipe: Path, tmp_path: Path) -> None:
    rates = ("0.001", "0.003")
    words = ["recipe=sweep", "of=focal", f"sweep.over={{train.learning_rate: [{', '.join(rates)}]}}"]
    workbench.run(str(recipe), words, out=tmp_path / "sweep", quiet=True)
    for rate in rates:
        workbench.run(str(recipe), [f"train.learning_rate={rate}"], out=tmp_path / rate, quiet=True)
        member = tmp_path / "sweep" / "members" / f"learning_rate={rate}"
        assert losses(member) == pytest.approx(losses(tmp_path / rate), rel=1e-5)


def test_its_section_is_read_and_what_it_has_no_use_for_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"focal\.gama: unknown key\. Did you mean `gamma`"):
        load_config(recipe, ["focal.gama=1"])
    with pytest.raises(ConfigError, match=r"regularise\.z_loss works on the loss of recipe=sft"):
        load_config(recipe, ["regularise.z_loss=0.1"])


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
