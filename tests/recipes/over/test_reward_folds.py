"""Folds of reward models: members are the runs they would be alone, score every pair once, and rate together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.conftest import trains
from tests.run_files import read_metrics, read_scores, write_lines
from workbench.config.sections.rewards_config import ModelReward
from workbench.data.text.generated_answers import Answer
from workbench.evaluation import rewards
from workbench.evaluation.rewards.reward_sum import RewardEnsemble
from workbench.recipes.load import load
from workbench.recipes.single.sampled_answers import AnswerGroup, ScoredAnswer, rows_to_write
from workbench.recipes.tasks.reward import outcome_reward
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RECIPE = """
recipe: crossval
of: reward
folds: {{k: 3}}
duplicates: {{on_duplicate: ignore}}
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, max_tokens: 96}}
batch: {{size: 8}}
train: {{steps: 6, learning_rate: 1.0e-2}}
evaluate: {{every: 3}}
"""
FOLDS, COUNT = 3, 36
ALONE = ["recipe=reward", "folds={}", "duplicates={}"]
Train = Callable[..., Path]


def pair(n: int) -> dict[str, Any]:
    """Three pairs of answers to each prompt."""
    return {
        "prompt": f"What comes after {n // 3}?",
        "chosen": f" It is {n + 1}, my friend.",
        "rejected": " No idea at all." + " Who knows?" * (n % 3),
        "tie": n % 12 == 5,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of answers."""
    found = tmp_path_factory.mktemp("folds")
    write_lines(found / "pairs.jsonl", (pair(n) for n in range(COUNT)))
    return found


@pytest.fixture(scope="module")
def train(folder: Path, short_stories: str) -> Train:
    return trains(folder, RECIPE, model=short_stories, train=folder / "pairs.jsonl")


@pytest.fixture(scope="module")
def swept(train: Train) -> Path:
    """A finished sweep over folds. Read only."""
    return train(name="swept")


def name(fold: int) -> str:
    return f"repeat-0-fold-{fold}-seed-0"


def held_out(run: Path) -> list[float]:
    lines = read_metrics(run)
    return [line["held_out_loss"] for line in lines if "held_out_loss" in line]


def test_folds_cover_each_row_once_and_no_prompt_is_on_both_sides(folder: Path, train: Train) -> None:
    seen: list[str] = []
    for number in range(FOLDS):
        words = [*ALONE, f"data.fold={{of: {FOLDS}, number: {number}, near: null}}"]
        pairs = outcome_reward.prepare(load(folder / "recipe.yaml", words))[2]
        own, others = ({rows.place(row) for row in range(len(rows))} for rows in (pairs.held_out, pairs.train))
        assert own.isdisjoint(others) and len(own | others) == COUNT
        assert not np.isin(pairs.held_out.answers.digests, pairs.train.answers.digests).any()
        seen += own
    assert len(seen) == len(set(seen)) == COUNT


def test_a_member_equals_the_same_run_alone(swept: Path, train: Train) -> None:
    words = [*ALONE, f"data.fold={{of: {FOLDS}, number: 1, near: null}}"]
    alone, member = train(*words, name="alone"), swept / "members" / name(1)
    assert held_out(member) == pytest.approx(held_out(alone), rel=1e-4)
    one, other = (read_scores(run) for run in (alone, member))
    assert one["after"] == pytest.approx(other["after"], abs=1e-4) and one["before"] == other["before"]
    assert evaluate(member, []) == other["after"], "it is a run directory"


def test_every_pair_is_scored_by_who_did_not_see_it(swept: Path) -> None:
    table = pd.read_parquet(swept / "out_of_fold.parquet")
    assert len(table) == table["row"].nunique() == COUNT and set(table["fold"]) == set(map(str, range(FOLDS)))
    judged = table[~table["tie"]]
    scores = read_scores(swept)["after"]
    right = (judged["chosen_reward"] > judged["rejected_reward"]).mean()
    assert scores["accuracy"] == pytest.approx(right, abs=1e-6)
    assert scores["accuracy_low"] < right <= scores["accuracy_high"]


def test_the_members_rate_together(swept: Path, folder: Path, tmp_path: Path) -> None:
    members = [swept / "members" / name(number) for number in range(FOLDS)]
    answers = [Answer(pair(n)["prompt"], pair(n)["chosen"]) for n in range(5)]
    ensemble = RewardEnsemble(ModelReward(run=swept))
    read_MS = RewardEnsemble(ModelReward(run=tuple(members))).read(answers)
    np.testing.assert_array_equal(ensemble.read(answers), read_MS)
    found = rewards.build([ModelReward(run=swept, weight=2.0)]).detailed(answers)
    np.testing.assert_allclose(found["model"], read_MS.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["reward_spread"], 2 * read_MS.std(0, ddof=1), atol=1e-6)
    assert "reward_spread" not in rewards.build([ModelReward(run=members[0])]).detailed(answers)
    predict(swept, str(folder / "pairs.jsonl"), out=tmp_path / "said.parquet", max_new_tokens=1)
    said = pd.read_parquet(tmp_path / "said.parquet")
    np.testing.assert_allclose(said["reward"][:10:2], read_MS.mean(0), atol=1e-5)
    np.testing.assert_allclose(said["reward_spread"][:10:2], read_MS.std(0, ddof=1), atol=1e-5)
    scores = evaluate(swept, [f"data.test={folder / 'pairs.jsonl'}"])
    assert scores["reward_spread"] == pytest.approx(said["reward_spread"].mean(), abs=1e-5)
    assert scores["reward"] == pytest.approx(said["reward"].mean(), abs=1e-5)


def test_rows_of_all_answers_tell_the_disagreement() -> None:
    question = Answer("Why? ", "").example
    answer = ScoredAnswer("So.", True, 1.0, {"model": 1.0, "reward_spread": 0.25})
    (row,) = rows_to_write([AnswerGroup(question, [answer])], "all", least=None, margin=0.0)
    assert row["reward_spread"] == 0.25 and "rewards" not in row


@pytest.mark.slow
def test_settings_in_a_bank_and_one_after_another(train: Train, folder: Path) -> None:
    words = [
        "recipe=sweep",
        *ALONE[1:],
        "sweep={over: {train.learning_rate: [1e-3, 1e-2], seed: [0, 1]}}",
        "data.held_out=0.3",
    ]
    bank = train(*words, "train.steps=3", "evaluate.every=3", name="bank")
    alone = train(
        *words[1:],
        "recipe=reward",
        "sweep={}",
        "train.steps=3",
        "evaluate.every=3",
        "train.learning_rate=1e-2",
        name="one",
    )
    assert held_out(bank / "members" / "learning_rate=0.01,seed=0") == pytest.approx(held_out(alone), rel=1e-4)
    losses = {tuple(held_out(each)) for each in (bank / "members").iterdir()}
    assert len(losses) == 4, "a seed begins with a head of its own"
    assert read_scores(bank)["after"]["loss"] == pytest.approx(min(each[-1] for each in losses), rel=1e-4)


@pytest.mark.slow
def test_folds_one_after_another_are_those_of_the_bank(swept: Path, train: Train) -> None:
    apart = train("folds.together=false", name="apart")
    for number in range(FOLDS):
        one, other = (held_out(run / "members" / name(number)) for run in (apart, swept))
        assert one == pytest.approx(other, rel=1e-4)
    tables = [pd.read_parquet(run / "out_of_fold.parquet") for run in (apart, swept)]
    np.testing.assert_allclose(*(table["margin"] for table in tables), atol=1e-4)
    shutil.rmtree(apart)
