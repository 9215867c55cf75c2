"""Test and held-out prompts in several named files: answers to each earn what they earn alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests.recipes.test_named_sets import FAST, assert_each_scores_as_alone, of
from tests.run_files import read_lines, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.errors import DataError, Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs import data_report
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.plans.plan import plan
from workbench.report import compare

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
REWARDS = """
def vowels(answers):
    return [sum(letter in "aeiou" for letter in each.text) / (1 + len(each.text)) for each in answers]

def bonus(answers):
    return [float(each.row["bonus"]) for each in answers]
"""
REINFORCE = """
recipe: reinforce
model: {{id: {model}}}
data: {{train: {folder}/prompts.jsonl, max_tokens: 96}}
rewards: [{{file: {folder}/rewards.py, function: vowels}}, {{file: {folder}/rewards.py, function: bonus, weight: 0.5}}]
reinforce: {{answers: 2, max_new_tokens: 4, updates: 2}}
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A recipe of rewards, beside prompts to train on and two unlike sets of others, in files of one name."""
    found = tmp_path_factory.mktemp("prompts")
    for part, size, first in (("prompts.jsonl", 12, 0), ("a/rows.jsonl", 5, 20), ("b/rows.jsonl", 9, 40)):
        (found / part).parent.mkdir(exist_ok=True)
        rows = [{"question": f"What comes after {n}?", "bonus": n / 10} for n in range(first, first + size)]
        write_lines(found / part, rows)
    (found / "rewards.py").write_text(REWARDS)
    (found / "recipe.yaml").write_text(REINFORCE.format(folder=found, model=short_stories))
    return found


def rewarded(prompts: Path, out: Path, *more: str, resume: bool = False) -> Path:
    """A run with both sets as held-out and as test rows."""
    known = [*of_prompts(prompts), *more]
    return workbench.run(prompts / "recipe.yaml", known, out=out, resume=resume, quiet=True)


def of_prompts(prompts: Path) -> list[str]:
    named = f"{{a: {prompts}/a/rows.jsonl, b: {prompts}/b/rows.jsonl}}"
    more = ["batch.size=4", "train.steps=4", "evaluate.answers=0"]
    return [f"data.held_out={named}", f"data.test={named}", *FAST, *more]


@pytest.fixture(scope="module")
def answered(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of recipe reinforce with two held-out and two test sets. Read only."""
    return rewarded(prompts, tmp_path_factory.mktemp("answered") / "run")


def test_answers_to_each_set_of_prompts_earn_what_they_earn_alone(answered: Path, prompts: Path) -> None:
    assert_each_scores_as_alone(answered, {name: prompts / name / "rows.jsonl" for name in "ab"}, trust=True)
    found = read_scores(answered)
    assert found["after"] == found["test"], "the same prompts"
    assert found["before"].keys() == found["after"].keys()
    own = {"reward", "reward_low", "reward_high", "loss", "reward[vowels]", "reward[bonus]"}
    assert of(found["after"], "a").keys() == own | {"answer_tokens", "repetition"}
    assert of(found["after"], "a")["reward[bonus]"] == pytest.approx(2.2)  # of 2.0 to 2.4
    assert of(found["after"], "b")["reward[bonus]"] == pytest.approx(4.4)
    page = (answered / "report.html").read_text()
    assert "Reward, a" in page and "Reward, bonus, b" in page and "held out, greedy, b" in page


def test_held_out_rewards_of_each_set_are_followed(answered: Path, prompts: Path, tmp_path: Path) -> None:
    keys = ("mean", "a", "b")
    watched = [[line.get(f"held_out_reward[{key}]") for key in keys] for line in read_metrics(answered)]
    evaluated = [row for row in watched if row[0] is not None]
    assert len(evaluated) == 2
    for mean, a, b in evaluated:
        assert mean == pytest.approx((5 * a + 9 * b) / 14, rel=1e-6), "the mean over prompts"
    assert evaluated[-1][1] == pytest.approx(read_scores(answered)["after"]["reward[a]"], abs=1e-5)
    table = {row[0]: row[1:] for row in compare([answered], tmp_path / "compared.html").rows}
    assert {
        "mean reward after",
        "mean reward after, a",
        "test mean reward, b",
        "held-out loss after, b",
    } <= table.keys()
    places = pd.read_parquet(answered / "predictions.parquet")["row"].tolist()
    assert sorted(places)[:1] == ["a: rows.jsonl, row 1"] and len(set(places)) == 14


def test_a_stop_and_micro_batches_change_no_reward_of_a_set(
    answered: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            rewarded(prompts, tmp_path / "broken")
    assert read_scores(rewarded(prompts, tmp_path / "broken", resume=True)) == read_scores(answered)
    small = rewarded(prompts, tmp_path / "small", "batch.tokens_per_device=60")
    assert read_scores(small)["after"] == pytest.approx(read_scores(answered)["after"], abs=1e-4)


def test_a_set_without_a_column_of_the_rewards_is_named(prompts: Path, tmp_path: Path) -> None:
    rows = [{"question": f"Who is {n}?", "answer": str(n)} for n in range(12)]
    (tmp_path / "a").mkdir()
    train = write_lines(tmp_path / "train.jsonl", rows)
    other = write_lines(tmp_path / "a" / "rows.jsonl", [{"question": "Who?", "answer": "1"}])
    known = [f"data.train={train}", f"data.held_out={{a: {other}, b: {prompts}/b/rows.jsonl}}", "data.test=null"]
    with pytest.raises(DataError, match=r"b: rows\.jsonl, row 1: no column `answer`"):
        check(load(str(prompts / "recipe.yaml"), [*known, "rewards=[{kind: number}]"]))


def test_so_many_prompts_of_each_set_are_answered(prompts: Path, tmp_path: Path) -> None:
    run = rewarded(prompts, tmp_path / "run", "evaluate.answers=2", "evaluate.every=null", "train.steps=1")
    table = pd.read_parquet(run / "predictions.parquet")
    assert sorted(place[0] for place in table["row"]) == ["a", "a", "b", "b"]
    expected = table.groupby(table["row"].str[0])["reward_after"].mean()
    assert read_scores(run)["after"]["reward[b]"] == pytest.approx(expected["b"], abs=1e-6)


def test_check_plan_and_data_take_sets_of_prompts(prompts: Path, tmp_path: Path) -> None:
    config = load(str(prompts / "recipe.yaml"), of_prompts(prompts))
    notes = check(config).notes
    assert "Held-out rows: a 5, b 9." in notes and "Test rows: a 5, b 9." in notes
    assert plan(config).steps == 4
    found = data_report.data_report(config, out=tmp_path).findings
    assert [each.read.title for each in found] == ["Train", "Held-out: a", "Held-out: b", "Test: a", "Test: b"]


def test_a_set_named_as_a_source_is_read_from_its_own_file(prompts: Path, tmp_path: Path) -> None:
    """Sources whose prompts stand in other columns, and as many rows, so that a mix-up would not be told."""
    known, sources = of_prompts(prompts), []
    for name, size in {"a": 5, "b": 9}.items():
        rows = [{"ask": f"Who is {name} {n}?", "bonus": -1} for n in range(size)]
        path = write_lines(tmp_path / f"{name}.jsonl", rows)
        sources.append(f"{name}: {{path: {path}, columns: {{question: ask}}}}")
    known += [f"data.sources={{{', '.join(sources)}}}", "data.train=null", "train.steps=1"]
    run = workbench.run(prompts / "recipe.yaml", known, out=tmp_path / "run", quiet=True)
    after = read_scores(run)["after"]
    assert after["reward[bonus][a]"] == pytest.approx(2.2) and after["reward[bonus][b]"] == pytest.approx(4.4)
    assert read_metrics(run)[0]["reward[bonus]"] == -1


def test_a_training_prompt_in_any_set_is_found(prompts: Path, tmp_path: Path) -> None:
    planted = [*read_lines(prompts / "prompts.jsonl"), read_lines(prompts / "b" / "rows.jsonl")[3]]
    known = [*of_prompts(prompts), f"data.train={write_lines(tmp_path / 'train.jsonl', planted)}"]
    with pytest.raises(DataError, match=r"also in .*b/rows\.jsonl"):
        check(load(str(prompts / "recipe.yaml"), known))
    found: Any = check(load(str(prompts / "recipe.yaml"), [*known, "data.overlap=drop"])).data
    assert len(found.train) == len(planted) - 1
