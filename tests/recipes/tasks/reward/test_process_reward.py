"""Process reward models from the command's side: rated steps are learnt, and rate the answers of other runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.conftest import trains
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config.sections.rewards_config import ModelReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError, Stopped
from workbench.evaluation import reward_scores, rewards
from workbench.recipes.load import load
from workbench.recipes.tasks.reward import process_reward
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RECIPE = """
recipe: reward
reward: {{kind: process}}
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 8, alpha: 16}}
data: {{train: {train}, held_out: 0.2, max_tokens: 128}}
batch: {{size: 32}}
train: {{steps: 60, learning_rate: 1.0e-2}}
evaluate: {{every: null}}
save: {{every: null}}
"""
Train = Callable[..., Path]


def doubled(n: int) -> dict[str, Any]:
    """An answer of one to four additions, of which three in ten are wrong by one."""
    draw, steps, labels = random.Random(n), list[str](), list[bool]()
    for _ in range(1 + n % 4):
        number, right = draw.randrange(2, 10), draw.random() < 0.7
        steps.append(f"{number} + {number} = {2 * number + (0 if right else 1)}")
        labels.append(right)
    return {"prompt": f"Double the numbers of task {n % 40}.\n", "completions": steps, "labels": labels, "w": 1 + n % 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers whose steps are rated."""
    found = tmp_path_factory.mktemp("process")
    write_lines(found / "steps.jsonl", (doubled(n) for n in range(240)))
    return found


@pytest.fixture(scope="module")
def train(folder: Path, short_stories: str) -> Train:
    return trains(folder, RECIPE, model=short_stories, train=folder / "steps.jsonl")


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run. Read only."""
    return train(name="taught")


@pytest.mark.slow
def test_rated_steps_are_learnt(taught: Path, folder: Path, tmp_path: Path) -> None:
    scores = read_scores(taught)
    before, after = scores["before"], scores["after"]
    assert after["accuracy"] > before["accuracy"] + 0.1 and after["loss"] < before["loss"]
    assert after["accuracy_low"] < after["accuracy"] < after["accuracy_high"]
    assert after["f1"] > 0.5 and after["auc_min"] > 0.7 and before["f1"] == 0
    table = pd.read_parquet(taught / "predictions.parquet")
    assert ((table["probability"] >= 0.5) == (table["label"] >= 0.5)).mean() == pytest.approx(
        after["accuracy"], abs=1e-6
    )
    page = (taught / "report.html").read_text()
    assert "steps are rated rightly" in page and "Surest mistakes" in page and "steps one probability" in page
    assert evaluate(taught, []) == after
    bare = [{name: value for name, value in doubled(n).items() if name != "labels"} for n in range(240)]
    write_lines(folder / "bare.jsonl", bare)
    predict(taught, str(folder / "bare.jsonl"), out=tmp_path / "said.parquet", max_new_tokens=1)
    said = pd.read_parquet(tmp_path / "said.parquet")
    assert len(said) == sum(len(row["completions"]) for row in bare)
    lowest = said.groupby("row")["probability"].transform("min")
    np.testing.assert_allclose(said["reward"], lowest)
    key = dict(
        zip(zip(said["row"].str.split("row").str[1], said["step"], strict=True), said["probability"], strict=True)
    )
    for row in table.itertuples():
        assert key[row.row.split("row")[1], row.step] == pytest.approx(row.probability, abs=1e-5)


@pytest.mark.parametrize("how", [None, "min", "product", "mean", "last"])
def test_answers_have_the_aggregate_of_their_steps(taught: Path, how: Any) -> None:
    table = pd.read_parquet(taught / "predictions.parquet")
    answers, expected = [], []
    for place, own in table.groupby("row", sort=False):
        row = doubled(int(str(place).rpartition(" ")[2]) - 1)
        answers.append(Answer(row["prompt"], "\n".join(row["completions"])))
        expected.append(reward_scores.AGGREGATES[how or "min"](own["probability"].to_numpy()))
    found = rewards.build([ModelReward(run=taught, aggregate=how)])(answers)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_other_answers_and_other_models(taught: Path) -> None:
    rate = rewards.build([ModelReward(run=taught, aggregate="mean")])
    question = ({"role": "user", "content": "Double 3."},)
    answers = [Answer("Double 3.", text, question) for text in (" ", "3 + 3 = 6", "3 + 3 = 6\n\n3 + 3 = 7\n", "\n")]
    found = rate(answers)
    assert all(0 < each < 1 for each in found) and found[1] != found[2]
    assert rate(answers[1:2]) == pytest.approx(found[1:2], abs=1e-6)


def test_a_merged_model_gives_the_last_step_as_stock_code_reads_it(taught: Path, tmp_path: Path) -> None:
    assert merge(taught, out=tmp_path / "merged", weights="float32").agreement.same == 1  # type: ignore[union-attr]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    _, _, answers, _ = process_reward.prepare(load(taught.parent / "recipe.yaml", []))
    table = pd.read_parquet(taught / "predictions.parquet")
    ids = torch.from_numpy(answers.held_out.answers[0].input_ids)[None]
    with torch.no_grad():
        last = float(model(ids).logits.sigmoid())
    assert last == pytest.approx(table["probability"][int(answers.held_out.steps[0]) - 1], abs=1e-4)


def test_check_tells_what_is_right_and_what_is_cut(train: Train, folder: Path) -> None:
    found = check(load(folder / "recipe.yaml", ["data.max_tokens=64", "data.truncate=right"]))
    assert any("steps of" in note and "have no wrong one" in note for note in found.notes)
    assert any("leaves out" in note and "steps" in note for note in found.notes)
    assert sum(carries for _, carries in found.examples[0][1]) >= 1


def test_a_run_of_pairs_rates_no_steps(train: Train, folder: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f" It is {n}.", "rejected": " No."} for n in range(12)]
    write_lines(folder / "pairs.jsonl", rows)
    run = train(f"data.train={folder / 'pairs.jsonl'}", "reward.kind=outcome", "train.steps=1", name="pairs")
    with pytest.raises(ConfigError, match=r"aggregate=min is for models that rate steps.*Leave aggregate out"):
        rewards.build([ModelReward(run=run, aggregate="min")])


@pytest.mark.slow
def test_same_curve_for_any_micro_batch_of_steps(train: Train) -> None:
    words = ["train.steps=4", "data.columns={weight: w}", "adapter.dropout=0.3"]
    whole, parts, single = (
        train(*words, f"batch.tokens_per_device={tokens}", name=f"of-{tokens}") for tokens in (10_000, 400, 130)
    )
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=1e-5)
    assert read_losses(single) == pytest.approx(read_losses(whole), rel=1e-5)
    packed = train(*words, "batch.packing=on", name="packed")
    assert read_losses(packed) == pytest.approx(read_losses(whole), rel=1e-5)


@pytest.mark.slow
def test_a_stopped_run_of_steps_resumes_to_the_same_bits(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = train("train.steps=5", name="unbroken")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            train("train.steps=5", name="broken")
    assert read_losses(train("train.steps=5", name="broken", resume=True)) == read_losses(unbroken)


@pytest.mark.slow
def test_a_plan_of_steps(train: Train, folder: Path) -> None:
    found = plan(load(folder / "recipe.yaml", ["batch.tokens_per_device=400"]))
    assert found.dry_run.micro_batches > 1 and found.size.trainable > 0
