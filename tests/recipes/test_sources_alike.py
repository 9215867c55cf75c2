"""Sources whose files have one name, such as sums/train.jsonl and tales/train.jsonl: rows are known by their source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests.run_files import write_lines
from workbench.errors import DataError
from workbench.recipes.load import load
from workbench.recipes.verbs import opening
from workbench.recipes.verbs.check import check

NAMES = ("sums", "tales")
Given = Callable[..., list[str]]


@pytest.fixture
def given(tmp_path: Path, short_stories: str) -> Given:
    """Settings of a run over two sources, from the rows of each."""

    def settings(*parts: Sequence[dict[str, Any]], kind: str = "sources") -> list[str]:
        words = ["data.train=null"] if kind == "sources" else []
        for name, rows in zip(NAMES, parts, strict=True):
            path = tmp_path / kind / name / "train.jsonl"
            path.parent.mkdir(parents=True)
            write_lines(path, rows)
            words.append(f"data.{kind}.{name}{'.path' if kind == 'sources' else ''}={path}")
        known = [f"model.id={short_stories}", "model.weights=float32", "train.epochs=null", "train.steps=4"]
        return [*words, *known, "batch.size=8", "evaluate.every=null"]

    return settings


def asked(name: str, count: int) -> list[dict[str, Any]]:
    return [{"question": f"{name} {n}?", "answer": f"{name} says {n * n}."} for n in range(count)]


def labelled(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} number {n} of {n * n + 7}", "label": f"{name}-{n % 2}"} for n in range(count)]


def test_answers_of_two_sets_stand_beside_the_answers_to_the_same_prompts_before_training(
    given: Given, tmp_path: Path
) -> None:
    words = [*given(asked("sums", 12), asked("tales", 12)), "data.held_out=0.5", "evaluate.answers=12"]
    words += ["evaluate.samples=0", "evaluate.max_new_tokens=4", "train.learning_rate=1e-12", "adapter.rank=1"]
    run = workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    table = pd.read_parquet(run / "predictions.parquet")
    assert table["row"].is_unique and set(table["row"].str.partition(": ")[0]) == set(NAMES)
    assert all(row.partition(": ")[0] in prompt for row, prompt in zip(table["row"], table["prompt"], strict=True))
    assert table["before"].tolist() == table["after"].tolist()  # nothing is learnt at such a rate
    assert pd.read_parquet(run / "held_out_losses.parquet")["row"].is_unique


def test_a_cross_validation_follows_each_row_by_itself(given: Given, tmp_path: Path) -> None:
    words = [*given(labelled("sums", 12), labelled("tales", 12)), "data.test=null", "data.limit=null", "folds.k=2"]
    words += ["evaluate.dynamics=true", "train.steps=6"]
    run = workbench.run("crossval/quickstart", words, out=tmp_path / "run", quiet=True)
    table = pd.read_parquet(run / "out_of_fold.parquet")
    assert table["row"].is_unique and len(table) == 24
    seen = pd.read_parquet(run / "dynamics.parquet")
    assert len(seen) == 24 and (seen["adapters"] == 1).all()
    right_N = (table["predicted"] == table["label"]).astype(float)
    expected = dict(zip(table["row"], right_N, strict=True))
    assert dict(zip(seen["row"], seen["right_out_of_fold"], strict=True)) == expected


@pytest.mark.parametrize("recipe", ["sft/quickstart", "classify/quickstart", "embed/quickstart"])
def test_each_row_that_is_left_out_is_counted_and_listed_with_its_source(
    given: Given, recipe: str, tmp_path: Path
) -> None:
    rows = {name: (asked if recipe.startswith("sft") else labelled)(name, 8) for name in NAMES}
    kept = {name: [*own[:4], *own[:2]] for name, own in rows.items()}  # two of them twice
    words = [*given(*kept.values()), "data.clean=[exact_duplicate]", "data.overlap=drop"]
    words += given(*(rows[name][6:] for name in NAMES), kind="held_out")
    run = workbench.run(recipe, [*words, "train.steps=1", "evaluate.answers=8"], out=tmp_path / "run", quiet=True)
    facts = json.loads((run / "manifest.json").read_text())["data"]["train"]["cleaning"]
    assert facts["left_out"] == 4
    assert Counter(flag["row"].partition(":")[0] for flag in facts["flags"]) == dict.fromkeys(NAMES, 2)
    rows_of_sets = pd.read_parquet(run / "predictions.parquet")["row"]
    assert Counter(rows_of_sets.str.partition(": ")[0]) == dict.fromkeys(NAMES, 2)
    assert rows_of_sets.is_unique


@pytest.mark.parametrize("recipe", ["sft/quickstart", "classify/quickstart", "embed/quickstart"])
def test_a_row_that_is_refused_is_named_with_its_source(given: Given, recipe: str) -> None:
    rows, text = (asked, "answer") if recipe.startswith("sft") else (labelled, "text")
    broken = [{**rows("tales", 1)[0], text: ""}]
    with pytest.raises(DataError, match=r"^tales: (.|\n)*train\.jsonl, row 1"):
        check(load(recipe, [*given(rows("sums", 9), broken), "data.held_out=0.2"]))


def test_sources_are_told_before_anything_is_read(given: Given) -> None:
    assert "rows of sums, tales" in " ".join(opening.sentences("sft/quickstart", given([], [])))
