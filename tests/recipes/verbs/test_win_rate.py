"""A run against another one, from the command's side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import workbench
from tests.run_files import read_lines, write_lines
from workbench import evaluation
from workbench.config.sections.rewards_config import ModelReward
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError, DataError
from workbench.evaluation import rewards
from workbench.evaluation.generation import question_of
from workbench.models import exported
from workbench.recipes.single import sampled_answers
from workbench.recipes.verbs.win_rate import win_rate
from workbench.report import task_sections
from workbench.runs import score_files, units


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of one's own: what it won is kept in it."""
    return shutil.copytree(trained, tmp_path / "own")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    write_lines(path, ({"question": f"What comes after {n}?", "answer": str(n + 1)} for n in range(4)))
    return path


def test_a_run_and_itself_are_even(run: Path, asked: Path, tmp_path: Path) -> None:
    word = "{kind: regex, pattern: 'It is'}"
    out = tmp_path / "answers.jsonl"
    found = win_rate(run, run, [f"data.test={asked}"], score=[word], max_new_tokens=12, out=out)
    assert (found["win_rate"], found["ties"], found["reward"]) == (0.5, 1, found["reward_other"])
    assert found["win_rate_low"] < 0.5 < found["win_rate_high"]
    rows = read_lines(tmp_path / "answers.jsonl")
    assert len(rows) == 4 and all(row["answer"] == row["other"] and row["win"] == 0.5 for row in rows)
    judged = win_rate(run, run, [f"data.test={asked}"], judge="sed s/.*/1/", max_new_tokens=2)
    assert judged["win_rate"] == 0.5 and judged["order_agreement"] == 0


def test_each_model_goes_on_from_its_own_answers(run: Path, tmp_path: Path) -> None:
    """Two turns of each question in MT-Bench's form, against the backbone, whose answers are those of stock weights."""
    turns = [[f"What comes after {n}?", f"And after {n + 5}?"] for n in range(3)]
    asked = write_lines(tmp_path / "mt.jsonl", ({"question_id": n, "turns": each} for n, each in enumerate(turns)))
    judge = f"sh -c 'tee {tmp_path / 'pairs'} | sed s/.*/1/'"
    out, words = tmp_path / "answers.jsonl", [f"data.test={asked}"]
    found = win_rate(run, "backbone", words, judge=judge, max_new_tokens=6, out=out)
    answers, pairs = read_lines(out), read_lines(tmp_path / "pairs")[:6]
    assert found["win_rate"] == found["win_rate_turn_2"] == 0.5 and found["win_rate_turn_1_low"] == 0.5
    for (first, second), one, two, pair in zip(turns, answers, answers[3:], pairs[3:], strict=False):
        assert (one["prompt"], two["prompt"]) == (first, second) and one["answer"] != one["other"]
        for side, name in {"answer": "messages", "other": "second_messages"}.items():
            assert [each["content"] for each in pair[name]] == [first, one[side], second]
    config = workbench.load_recipe(run / "config.yaml")
    model = sampled_answers.stock(config.model, config)
    ids = question_of(model, Example("a row", messages=({"role": "user", "content": turns[0][0]},))).ids
    (bare,) = evaluation.complete(model.model, [ids], model.tokenizer, stop=model.stop, max_new_tokens=6)
    assert answers[0]["other"] == bare
    asked.write_text(asked.read_text() + json.dumps({"turns": ["One alone."]}) + "\n")
    with pytest.raises(ConfigError, match="rows have 1 to 2 turns"):
        win_rate(run, "backbone", words, judge=judge)


def test_prompts_of_all_files_are_answered(run: Path, asked: Path) -> None:
    second = asked.with_name("second.jsonl")
    second.write_text(json.dumps({"question": "And then?", "answer": "Nothing."}) + "\n")
    with pytest.raises(DataError, match=r"second.jsonl, row 1: .* holds no number"):
        win_rate(run, run, [f"data.test={{one: {asked}, two: {second}}}"], score=["number"], max_new_tokens=1)


def test_rows_that_are_left_out_are_counted(run: Path, asked: Path) -> None:
    rows = asked.read_text()
    asked.with_name("some.jsonl").write_text(rows + json.dumps({"question": "", "answer": "Nothing."}) + "\n")
    words = [f"data.test={asked.with_name('some.jsonl')}", "data.on_bad_row=skip"]
    contest: Any = {"score": ["{kind: regex, pattern: It}"], "max_new_tokens": 1}
    assert win_rate(run, run, words, **contest)["rows_skipped"] == 1
    assert "rows_skipped" not in win_rate(run, run, [f"data.test={asked}"], **contest)


def test_a_missing_column_is_told_before_anything_is_answered(
    run: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match=r"asked.jsonl, row 1: no column `right`"):
        win_rate(run, run, [f"data.test={asked}"], score=["{kind: number, answer: right}"])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A reward model that likes long answers. Read only."""
    folder = tmp_path_factory.mktemp("judge")
    rows = [{"prompt": f"After {n}?", "chosen": " It is so." * 8, "rejected": " It is so." * 2} for n in range(30)]
    write_lines(folder / "pairs.jsonl", rows)
    model = f"{{id: {short_stories}, weights: float32, compute: float32}}"
    words = [f"model={model}", f"data.train={folder / 'pairs.jsonl'}", "data.on_bad_row=skip", "data.overlap=drop"]
    words += ["train.epochs=null", "train.steps=12", "train.learning_rate=1e-2", "data.held_out=0.2", "batch.size=8"]
    return workbench.run("reward/quickstart", [*words, "evaluate.every=null"], out=folder / "run", quiet=True)


def test_a_reward_model_judges_and_its_verdict_is_kept(
    run: Path, asked: Path, judge: Path, trained: Path, tmp_path: Path
) -> None:
    """It is asked of both runs' answers, as `rewards` reads them alone; the page and a card of the run tell of it."""
    other = shutil.copytree(trained, tmp_path / "other")
    adapter = other / "adapter" / "adapter_model.safetensors"
    save_file({name: -each for name, each in load_file(adapter).items()}, adapter)
    out = tmp_path / "answers.jsonl"
    found = win_rate(run, other, [f"data.test={asked}"], score=[str(judge)], max_new_tokens=12, out=out)
    rows = read_lines(tmp_path / "answers.jsonl")
    read = rewards.build([ModelReward(run=judge)])

    def answer(row: dict[str, str], side: str) -> Answer:
        return Answer(row["prompt"], row[side], ({"role": "user", "content": row["prompt"]},))

    own, theirs = (read([answer(row, side) for row in rows]) for side in ("answer", "other"))
    assert [row["win"] for row in rows] == [float(a > b) + float(a == b) / 2 for a, b in zip(own, theirs, strict=True)]
    assert found["reward"] == pytest.approx(sum(own) / len(own), abs=1e-4)
    (kept,) = score_files.read_win_rates(run)
    assert (kept["against"], kept["by"], kept["prompts"], kept["count"]) == (str(other), str(judge), [str(asked)], 4)
    assert {name: kept[name] for name in found} == found
    assert "Win rates" in (run / "report.html").read_text() and not score_files.read_win_rates(other)


def test_a_contest_takes_the_place_of_an_earlier_one_alone(run: Path, asked: Path) -> None:
    words = [f"data.test={asked}"]
    for pattern in ("It", "is", "It"):
        win_rate(run, run, words, score=[f"{{kind: regex, pattern: {pattern}}}"], max_new_tokens=2)
    assert [each["by"] for each in score_files.read_win_rates(run)] == [
        f"{{kind: regex, pattern: {pattern}}}" for pattern in ("is", "It")
    ]
    shown = task_sections.win_rates(run)
    assert shown[0]["wins"] == "50 %" and shown[0]["ties"] == "100 %" and shown[0]["longer"] == units.NOTHING
