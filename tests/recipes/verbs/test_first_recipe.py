"""The verb init: a recipe that loads, checks and fits, or a mistake that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.run_files import write_lines
from tests.workbench.evaluation.picture_sets import write_pictures
from workbench.cli.verbs import app
from workbench.errors import ConfigError
from workbench.recipes import editor_line
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.first_recipe import GOALS, Wishes, commented, suggested, write


def lines(file: Path, *rows: dict[str, Any]) -> str:
    write_lines(file, rows)
    return str(file)


@pytest.mark.parametrize(
    "row,goal",
    [
        ({"question": "How many?", "answer": "Three."}, "answers"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "answers"),
        ({"text": "Where is my card?", "label": "card"}, "classes"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "judged"),
        ({"prompt": "a", "completion": "b", "label": True}, "judged"),
        ({"anchor": "a", "positive": "b"}, "embeddings"),
    ],
)
def test_columns_suggest_what_is_to_be_learnt(tmp_path: Path, row: dict[str, Any], goal: str) -> None:
    assert suggested(lines(tmp_path / "rows.jsonl", row)) == goal


def test_a_folder_of_pictures_is_known(tmp_path: Path) -> None:
    assert suggested(str(write_pictures(tmp_path / "plants", rows=4))) == "pictures"


def test_every_goal_begins_with_a_recipe_that_is_shipped() -> None:
    for goal in GOALS.values():
        assert load(goal.base).recipe


@pytest.mark.slow
def test_a_recipe_of_own_rows_checks_and_reads_almost_all_of_them_whole(tmp_path: Path, stories: str) -> None:
    rows = [{"question": f"How many is {n}?", "answer": "It is " + "very " * (n % 40) + "many."} for n in range(120)]
    file, out = lines(tmp_path / "rows.jsonl", *rows), tmp_path / "mine.yaml"
    words = ["init", str(out), "--rows", file, "--model", stories, "--time", "10m"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"Next: workbench check {out}" in done.output
    config = load(str(out))
    assert config.recipe == "sft" and config.budget.time == 600 and config.model.weights != "auto"
    longest = max(check(config).data.train.lengths)  # type: ignore[union-attr]
    assert longest <= config.data.max_tokens < longest + 64
    assert editor_line() in out.read_text()
    assert "# `workbench lr" in out.read_text() and "the fastest that fits" in out.read_text()


@pytest.mark.slow
def test_a_card_need_not_be_here(tmp_path: Path, stories: str) -> None:
    file = lines(tmp_path / "rows.jsonl", *({"question": f"How many is {n}?", "answer": "Many."} for n in range(40)))
    words = ["init", str(tmp_path / "mine.yaml"), "--rows", file, "--model", stories, "--device", "4090"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "of 24.5 GB" in done.output or "of 25.1 GB" in done.output
    text = (tmp_path / "mine.yaml").read_text()
    assert "weights: bfloat16" in text and "fits a 4090: " in text  # a CPU's plan would say float32


@pytest.mark.nightly
def test_what_does_not_fit_is_told_and_nothing_is_written(tmp_path: Path, stories: str) -> None:
    file = lines(tmp_path / "rows.jsonl", *({"question": f"{n}?", "answer": "Yes."} for n in range(40)))
    with pytest.raises(ConfigError, match="does not fit"):
        write(Wishes(file, "answers", stories, memory=30_000), tmp_path / "mine.yaml")
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    "words,reason",
    [
        (["my.txt", "--rows", "{rows}"], "a recipe's name ends in .yaml"),
        (["{rows}.yaml"], "--rows: which rows"),
        (["mine.yaml", "--rows", "{rows}", "--goal", "fame"], "--goal fame: expected answers, classes"),
        (["mine.yaml", "--rows", "{rows}", "--memory", "much"], "expected a size such as 24GB"),
        (["mine.yaml", "--rows", "{rows}", "--time", "soon"], "is no time"),
        (["mine.yaml", "--rows", "{rows}", "--device", "4091"], "there is no card '4091'"),
        (["mine.yaml", "--rows", "none.jsonl"], "none.jsonl"),
        (["taken.yaml", "--rows", "{rows}"], "exists already"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.yaml").write_text("mine")
    file = lines(tmp_path / "rows.jsonl", {"question": "a", "answer": "b"})
    done = CliRunner().invoke(app, ["init", *(word.format(rows=file) for word in words)])
    assert done.exit_code == 1 and reason in str(done.exception)  # main() makes 2 of it
    assert not (tmp_path / "mine.yaml").exists() and (tmp_path / "taken.yaml").read_text() == "mine"


def test_comments_stand_behind_their_own_keys() -> None:
    text = "a:\n  b: 1\n  c:\n    b: 2\nb: 3\n"
    assert [line.split() for line in commented(text, {"a.c.b": "deep"}).splitlines()][3] == ["b:", "2", "#", "deep"]
    assert commented(text, {"b": "top"}).count("#") == 1


def test_who_says_how_long_it_trains_is_heard(tmp_path: Path, stories: str) -> None:
    file = lines(
        tmp_path / "rows.jsonl", *({"question": f"How many is {n}?", "answer": f"It is {n}."} for n in range(5))
    )
    write(Wishes(file, "answers", stories, overrides=["train.epochs=2"]), tmp_path / "mine.yaml")
    assert load(str(tmp_path / "mine.yaml")).train.epochs == 2


@pytest.mark.parametrize("time", [None, "10m"])
def test_a_recipe_of_five_rows_trains_long_enough_to_learn_them(tmp_path: Path, stories: str, time: str | None) -> None:
    file = lines(
        tmp_path / "rows.jsonl", *({"question": f"How many is {n}?", "answer": f"It is {n}."} for n in range(5))
    )
    write(Wishes(file, "answers", stories, time=time), tmp_path / "mine.yaml")
    found = check(load(str(tmp_path / "mine.yaml")))
    steps = found.steps  # type: ignore[union-attr]
    assert steps >= 100 and not found.config.schedule.about_short(steps)
