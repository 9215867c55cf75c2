"""Reward models from the command's side: judgements are learnt, however they are computed; stock code loads them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import special
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import trains
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config.sections.rewards_config import ModelReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError, DataError, Stopped
from workbench.evaluation import reward_scores, rewards
from workbench.evaluation.rewards.reward_sum import RewardEnsemble
from workbench.recipes.load import load
from workbench.recipes.task import ScoringOptions
from workbench.recipes.tasks.prefer import preference_run
from workbench.recipes.tasks.reward import outcome_reward, task
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RECIPE = """
recipe: reward
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.2, max_tokens: 96}}
batch: {{size: 8}}
train: {{steps: 20, learning_rate: 1.0e-2}}
evaluate: {{every: null}}
save: {{every: null}}
"""
Train = Callable[..., Path]


def pair(n: int) -> dict[str, Any]:
    return {
        "prompt": f"What comes after {n}?" + " Think." * (n % 3),
        "chosen": f" It is {n + 1}, my friend." + " Yes." * (n % 4),
        "rejected": " No idea at all." + " Who knows?" * (n % 5),
        "strength": 1 + n % 3,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of answers."""
    found = tmp_path_factory.mktemp("reward")
    write_lines(found / "pairs.jsonl", (pair(n) for n in range(60)))
    return found


@pytest.fixture(scope="module")
def train(folder: Path, short_stories: str) -> Train:
    return trains(folder, RECIPE, model=short_stories, train=folder / "pairs.jsonl")


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run. Read only."""
    return train(name="taught")


def test_judgements_are_learnt(taught: Path) -> None:
    before, after = (read_scores(taught)[when] for when in ("before", "after"))
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6) and before["accuracy"] == 0.5
    assert after["accuracy"] > 0.8 and after["loss"] < 0.5
    assert after["accuracy_low"] < after["accuracy"] <= after["accuracy_high"]
    found = pd.read_parquet(taught / "predictions.parquet")
    gap = found["chosen_reward"] - found["rejected_reward"]
    assert float((gap > 0).mean()) == pytest.approx(after["accuracy"], abs=1e-6)
    assert float(-special.log_expit(gap).mean()) == pytest.approx(after["log_loss"], abs=1e-6)
    page = (taught / "report.html").read_text()
    assert "higher reward" in page and "Calibration error" in page and "Baseline" in page
    assert "nats per token" not in page and "Answers<" not in page


def test_equal_rewards_count_half_and_scored_rows_need_no_margins(folder: Path, train: Train) -> None:
    rows = [{name: value for name, value in pair(n).items() if name != "strength"} for n in range(100, 110)]
    write_lines(folder / "held_out.jsonl", rows)
    words = [f"data.held_out={folder / 'held_out.jsonl'}", "data.columns={margin: strength}"]
    _, _, pairs, _ = outcome_reward.prepare(load(folder / "recipe.yaml", words))
    assert pairs.train.margins.max() == 3 and not pairs.held_out.margins.any()
    even = reward_scores.reward_scores(pairs.held_out, np.zeros(20), centre=0.0)
    assert even["accuracy"] == even["longer"] == 0.5 and even["accuracy_low"] < 0.5 < even["accuracy_high"]


def test_verbs_agree_with_the_run(taught: Path, folder: Path, tmp_path: Path) -> None:
    assert evaluate(taught, []) == read_scores(taught)["after"]
    found = predict(taught, str(folder / "pairs.jsonl"), out=tmp_path / "said.parquet", max_new_tokens=1)
    assert found.rows == 120
    said, known = pd.read_parquet(tmp_path / "said.parquet"), pd.read_parquet(taught / "predictions.parquet")
    reward_of = dict(zip(said["row"], said["reward"], strict=True))
    for row in known.itertuples():
        assert reward_of[f"{row.row}, answer 1 of 2"] == pytest.approx(row.chosen_reward, abs=1e-5)
    with pytest.raises(ConfigError, match=r"recipe reward trains no model that writes text.*can rate every answer"):
        generate(taught, "Hello", max_new_tokens=2)
    with pytest.raises(ConfigError, match="cannot change reward"):
        evaluate(taught, ["reward.centre=1"])


def test_an_ensemble_gives_answers_the_reward_of_its_models(taught: Path, tmp_path: Path) -> None:
    known, other = pd.read_parquet(taught / "predictions.parquet"), tmp_path / "other"
    shutil.copytree(taught, other)
    weights = load_file(other / "adapter" / "adapter_model.safetensors")
    save_file({name: 0.5 * each for name, each in weights.items()}, other / "adapter" / "adapter_model.safetensors")
    answers = []
    for row in known["row"]:
        number = int(row.rpartition(" ")[2]) - 1
        answers += [Answer(pair(number)["prompt"], pair(number)[side]) for side in ("chosen", "rejected")]
    both = ModelReward(run=(taught, other), pessimism=0.5)
    read_2S = RewardEnsemble(both).read(answers)
    np.testing.assert_allclose(read_2S[0], known[["chosen_reward", "rejected_reward"]].to_numpy().ravel(), atol=1e-5)
    lower, upper = read_2S.min(0), read_2S.max(0)  # of two, half their distance / sqrt(2) off their mean
    summed = rewards.build([both])(answers)
    np.testing.assert_allclose(summed, (lower + upper) / 2 - 0.5 * (upper - lower) / 2**0.5, atol=1e-6)
    one = rewards.build([ModelReward(run=taught)])
    np.testing.assert_allclose(one(answers), read_2S[0], atol=1e-6)
    chat = Answer("Why?", " ", ({"role": "user", "content": "Why?"},))
    assert np.isfinite(one([chat])).all()  # of an empty answer, which models give


def test_a_merged_model_is_a_stock_reward_model(taught: Path, tmp_path: Path) -> None:
    found = merge(taught, out=tmp_path / "merged", weights="float32")
    assert found.agreement.same == 1  # type: ignore[union-attr]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    known = pd.read_parquet(taught / "predictions.parquet").iloc[0]
    config = load(taught.parent / "recipe.yaml", [])
    _, _, pairs, _ = outcome_reward.prepare(config)
    ids = torch.from_numpy(pairs.held_out.answers[0].input_ids)[None]
    assert model.config.num_labels == 1 and tokenizer.pad_token_id == model.config.pad_token_id
    with torch.no_grad():
        assert float(model(ids).logits) == pytest.approx(known["chosen_reward"], abs=1e-4)


def test_scores_of_rewards_that_are_known(train: Train, folder: Path) -> None:
    config = load(folder / "recipe.yaml", [])
    rows = outcome_reward.prepare(config)[2].held_out
    longer = np.sign(np.diff(rows.answer_tokens.reshape(-1, 2))[:, 0]) * -1
    by_length = np.stack([longer, -longer], axis=1).ravel().astype(float)
    found = reward_scores.reward_scores(rows, by_length, centre=0.0)
    assert found["longer"] == 1 and found["accuracy"] == pytest.approx((longer > 0).mean(), abs=1e-6)
    assert found["longer_chosen"] == pytest.approx((longer[longer != 0] > 0).mean(), abs=1e-6)
    sure = reward_scores.reward_scores(rows, np.tile([9.0, -9.0], len(rows)), centre=0.5)
    assert sure["accuracy"] == 1 and sure["calibration_error"] < 1e-6 and sure["loss"] == sure["log_loss"]


def test_check_shows_both_answers(train: Train, folder: Path) -> None:
    found = check(load(folder / "recipe.yaml", []))
    assert [place.rpartition(", ")[2] for place, _ in found.examples[:2]] == ["chosen", "rejected"]
    assert any("the longer answer is the better one in" in note for note in found.notes)


def test_rows_that_are_scored_need_no_margins(taught: Path, folder: Path) -> None:
    rows = [{name: each for name, each in pair(n).items() if name != "strength"} for n in range(4)]
    bare = folder / "bare.jsonl"
    write_lines(bare, rows)
    config = load(taught.parent / "recipe.yaml", [f"data.test={bare}", "data.columns={margin: strength}"])
    assert len(task.TASK.predict(taught, str(bare), config, ScoringOptions()).table) == 8
    assert 0 <= task.TASK.evaluate(taught, config, ScoringOptions())["accuracy"] <= 1


def test_ties_count_in_the_loss_and_in_no_accuracy(train: Train, folder: Path) -> None:
    rows = [pair(n) | {"tie": n % 3 == 0} for n in range(60)]
    write_lines(folder / "ties.jsonl", rows)
    words = [f"data.train={folder / 'ties.jsonl'}"]
    config = load(folder / "recipe.yaml", words)
    _, _, pairs, _ = outcome_reward.prepare(config)
    assert pairs.train.facts()["ties"] + pairs.held_out.facts()["ties"] == 20
    reward_S, tie_P = np.random.default_rng(0).normal(size=2 * len(pairs.held_out)), pairs.held_out.ties
    gap_P = reward_S[::2] - reward_S[1::2]
    found = reward_scores.reward_scores(pairs.held_out, reward_S, centre=0.0)
    assert found["accuracy"] == pytest.approx((gap_P[~tie_P] > 0).mean(), abs=1e-6)
    entropy_P = np.where(tie_P, np.abs(gap_P) / 2 + np.log1p(np.exp(-np.abs(gap_P))), np.log1p(np.exp(-gap_P)))
    assert found["loss"] == pytest.approx(entropy_P.mean(), abs=1e-6)
    assert found["tie_gap"] == pytest.approx(np.abs(gap_P[tie_P]).mean(), abs=1e-6)
    assert any("pairs are ties" in note for note in check(config).notes)
    preferred = load(folder / "recipe.yaml", [*words, "recipe=prefer", "prefer.loss=hinge", "data.on_bad_row=skip"])
    kept = preference_run.prepare(preferred)[2]
    assert len(kept.train) + len(kept.held_out) == 40
    assert any("ties, for which prefer.loss=hinge has no target" in note for note in kept.train.answers.skipped)


@pytest.mark.slow
def test_same_curve_for_any_micro_batch(train: Train) -> None:
    words = ["train.steps=5", "data.columns={margin: strength}", "adapter.dropout=0.3"]
    whole, parts, single = (
        train(*words, f"batch.tokens_per_device={tokens}", name=f"of-{tokens}") for tokens in (10_000, 300, 130)
    )
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=1e-5)
    assert read_losses(single) == pytest.approx(read_losses(whole), rel=1e-5)
    plain = train("train.steps=5", "adapter.dropout=0.3", name="plain")
    assert read_losses(plain)[0] < read_losses(whole)[0], "a margin is asked for"


@pytest.mark.nightly(but=["nf4"])
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_quantised_weights_are_learnt_over(train: Train, weights: str) -> None:
    """Over layers that are frozen, whose outputs are not kept."""
    found = train(f"model.weights={weights}", "freeze={policy: static, layers: 1}", name=weights)
    assert read_scores(found)["after"]["accuracy"] > 0.8
    assert read_scores(found)["after"]["loss"] < read_scores(found)["before"]["loss"]


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = train("train.steps=6", name="unbroken")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            train("train.steps=6", name="broken")
    assert read_losses(train("train.steps=6", name="broken", resume=True)) == read_losses(unbroken)


@pytest.mark.slow
def test_a_plan(train: Train, folder: Path) -> None:
    found = plan(load(folder / "recipe.yaml", ["batch.tokens_per_device=200"]))
    assert found.dry_run.micro_batches > 1 and found.size.trainable > 0


@pytest.mark.slow
def test_rewards_of_kept_views_are_their_mean_in_every_verb(train: Train, folder: Path, tmp_path: Path) -> None:
    run = train("tta={views: [lower, typos], copies: 2, keep: true}", name="viewed")
    scores, config = read_scores(run), load(run / "config.yaml")
    assert evaluate(run, []) == pytest.approx(scores["after"]) and scores["after"]["loss"] != scores["plain"]["loss"]
    model = task.load(run, config)
    answers = task.held_out(model, config)
    views = list(outcome_reward.seen(answers, config, model.tokenizer))
    assert [view.name for view in views] == ["lower", "typos", "typos"]
    reward_VS = [reward_scores.read_rewards(model, each) for each in (answers, *views)]
    kept = pd.read_parquet(run / "predictions.parquet")
    wanted = np.mean(reward_VS, axis=0).reshape(-1, 2)
    np.testing.assert_allclose(kept[["chosen_reward", "rejected_reward"]], wanted, atol=1e-6)
    predict(run, str(folder / "pairs.jsonl"), out=tmp_path / "p.csv", max_new_tokens=1)
    found = pd.read_csv(tmp_path / "p.csv").set_index("row")["reward"]
    np.testing.assert_allclose(found[[answers.place(n) for n in range(len(answers))]], wanted.ravel(), atol=1e-5)
    for ask in (
        lambda: merge(run, out=tmp_path / "merged"),
        lambda: rewards.build([ModelReward(run=str(run))]),
    ):
        with pytest.raises(ConfigError, match="several views of a row"):
            ask()


def test_views_that_held_out_pairs_cannot_judge_are_refused(folder: Path, train: Train, short_stories: str) -> None:
    write_lines(folder / "one.jsonl", [pair(1000)] * 3)
    lower = {name: value.lower() if isinstance(value, str) else value for name, value in pair(1001).items()}
    write_lines(folder / "lower.jsonl", [lower, {**lower, "prompt": "and now?"}])
    for words, told in (
        (["tta={views: [lower]}", f"data.held_out={folder / 'one.jsonl'}"], "all alike, cannot say whether tta.views"),
        (["tta={views: [lower]}", f"data.held_out={folder / 'lower.jsonl'}"], "view lower changes no row"),
        (["tta={views: [swap]}"], "recipe=reward needs views that keep every word"),
        (["tta={views: [lower]}", "reward.kind=process"], "rates their steps. Leave tta out"),
    ):
        with pytest.raises((ConfigError, DataError), match=told):
            check(load(folder / "recipe.yaml", words))
