"""Folds of every task: each row is scored once by who did not see it, and a fold is the run it would be alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_metrics, read_scores, write_lines
from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.config.task_facts import TASKS
from workbench.errors import ConfigError
from workbench.evaluation import entity_scores
from workbench.recipes.tasks.tag import task as tagging
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan
from workbench.schema import Mistakes

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

COUNT, FOLDS = 24, 2
NAMES, PLACES = ("Ada", "Bob", "Cleo", "Dan"), ("Rome", "Oslo", "Kyiv", "Lima")


def rows(task: str) -> list[dict[str, Any]]:
    """Rows of a task."""
    of = {
        "sft": lambda n: {"prompt": f"What comes after {n}?", "completion": f" It is {n + 1}."},
        "prefer": lambda n: {"prompt": f"After {n}?", "chosen": f" It is {n + 1}.", "rejected": " No idea."},
        "reward": lambda n: {"prompt": f"After {n}?", "chosen": f" It is {n + 1}.", "rejected": " No idea."},
        "embed": lambda n: {"anchor": f"number {n}", "positive": f"it is {n}"},
        "rerank": lambda n: {"anchor": f"number {n}", "positive": f"it is {n}"},
        "tag": lambda n: {
            "tokens": [NAMES[n % 4], "saw", PLACES[n // 4 % 4], str(n)],
            "tags": ["B-PER", "O", "B-LOC", "O"],
        },
    }[task]
    return [of(n) | {"user": f"u{n // 3}", "day": n} for n in range(COUNT)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    folder = tmp_path_factory.mktemp("folds")
    for task in ("sft", "prefer", "reward", "embed", "rerank", "tag"):
        write_lines(folder / f"{task}.jsonl", rows(task))
    save_tiny(folder / "bert", "Bert", "TokenClassification", MINILM)
    (folder / "stories").symlink_to(short_stories)
    return folder


def sections(home: Path, task: str, **changed: Any) -> dict[str, Any]:
    encoder = task in ("tag", "embed")
    return {
        "recipe": "crossval",
        "of": task,
        "model": {"id": str(home / ("bert" if encoder else "stories")), "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(home / f"{task}.jsonl")},
        "folds": {"k": FOLDS},
        "duplicates": {"on_duplicate": "ignore"},
        "batch": {"size": 4},
        "train": {"steps": 3, "learning_rate": 1e-2},
        "evaluate": {"answers": 2, "max_new_tokens": 2},
        **changed,
    }


def run(values: dict[str, Any], out: Path) -> Path:
    return workbench.run(RunConfig.model_validate(values), out=out, quiet=True)


def member(fold: int, seed: int = 0) -> str:
    return f"members/repeat-0-fold-{fold}-seed-{seed}"


@pytest.mark.parametrize("task", ["tag", "sft", pytest.param("prefer", marks=pytest.mark.slow), "embed", "rerank"])
def test_folds_are_the_runs_they_would_be_alone(home: Path, task: str, tmp_path: Path) -> None:
    found = run(sections(home, task), tmp_path / "run")
    alone = sections(home, task, recipe=task, of=None)
    alone = {name: value for name, value in alone.items() if name not in ("folds", "duplicates")}
    alone["data"] = alone["data"] | {"fold": {"of": FOLDS, "number": 1, "near": None}}
    one = run(alone, tmp_path / "alone")
    losses = [[line["loss"] for line in read_metrics(each)] for each in (found / member(1), one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for when in ("before", "after"):
        own, other = (read_scores(each)[when] for each in (found / member(1), one))
        assert own == pytest.approx(other, rel=1e-3, abs=1e-3)
    # What a fold says stands in a run directory, which the verbs take.
    assert evaluate(found / member(1), [])["loss"] == pytest.approx(read_scores(found / member(1))["after"]["loss"])
    table = pd.read_parquet(found / "out_of_fold.parquet")
    if task != "sft" and task != "prefer":
        assert table["row"].nunique() == COUNT, "each row is held out once"
    folds = json.loads((found / "stages.json").read_text())["folds"]
    assert [fold["rows"] + fold["train_rows"] for fold in folds] == [COUNT, COUNT]
    mean = np.mean([fold["scores"]["loss"] for fold in folds])
    assert read_scores(found)["after"]["loss"] == pytest.approx(mean)
    assert (found / "adapter").exists() == (not TASKS[task].averages(None))


def test_out_of_fold_entities_are_scored_together(home: Path, tmp_path: Path) -> None:
    """F1 of all rows, which is not the mean over folds."""
    values = sections(home, "tag", folds={"k": 3, "seeds": 2}, train={"steps": 12, "learning_rate": 3e-2})
    values["data"]["columns"] = {"id": "day"}
    found = run(values, tmp_path / "run")
    table = pd.read_parquet(found / "out_of_fold.parquet")
    assert len(table) == 2 * COUNT
    assert [row.split()[-1] for row in table["row"]] == [str(int(each) + 1) for each in table["id"]]
    assert {path.name for path in (found / "members").iterdir()} == {*table["member"]}
    p = [name for name in table if name.startswith("p_")]
    words = table.explode(["words", *p])
    assert len(words) == 4 * len(table) and np.allclose(words[p].astype(float).sum(axis=1), 1, atol=1e-5)
    expected = [
        entity_scores.scores(*([tags.split() for tags in own[name]] for name in ("label", "predicted")))
        for _, own in table.groupby("seed")
    ]
    after = read_scores(found)["after"]
    for name in ("f1", "precision", "recall", "accuracy", "f1_low", "f1_high"):
        assert after[name] == pytest.approx(np.mean([each[name] for each in expected]))
    assert "3 folds, 2 seeds" in (found / "report.html").read_text()


def test_folds_answer_together_by_the_mean_of_their_probabilities(home: Path, tmp_path: Path) -> None:
    values = sections(home, "tag", train={"steps": 8, "learning_rate": 3e-2})
    values["data"]["columns"] = {"id": "day"}
    found = run(values, tmp_path / "run")
    config = RunConfig.model_validate(values)
    taggers = [tagging.load(found / member(fold), config) for fold in range(FOLDS)]
    write_lines(tmp_path / "tag.jsonl", ({"tokens": row["tokens"]} for row in rows("tag")))  # without ids
    predict(found, str(tmp_path / "tag.jsonl"), out=tmp_path / "said.parquet", max_new_tokens=1)
    said = pd.read_parquet(tmp_path / "said.parquet")
    part = RunConfig.model_validate(sweep_expansion.trials(config)[0].config.model_dump(mode="json"))
    held = tagging.prepare(part)[1].held_out
    parts = [tagging.predicted(tagger.tags, held, tagger.probabilities(held)) for tagger in taggers]
    row = held.rows[0]
    mean_WC = np.mean([each[0] for each in parts], axis=0)
    expected = [taggers[0].tags.names[at] for at in mean_WC.argmax(1)]
    assert len(said) == COUNT and said.set_index("row").loc[row.place, "predicted"].split() == expected
    with pytest.raises(ConfigError, match=r"data\.test=FILE"):
        evaluate(found, [])
    with pytest.raises(ConfigError, match=r"folds\.refit=true"):
        merge(found, out=tmp_path / "merged", weights="float32")


def test_the_adapter_of_all_rows_trains_on_all_rows(home: Path, tmp_path: Path) -> None:
    test = home / "test.jsonl"
    write_lines(test, [{"prompt": f"What comes after {n}?", "completion": f" It is {n + 1}."} for n in range(100, 104)])
    values = sections(home, "sft")
    found = run(values | {"data": values["data"] | {"test": str(test)}}, tmp_path / "run")
    facts = json.loads((found / "members" / "refit" / "manifest.json").read_text())["data"]
    assert facts["train"]["rows"] == COUNT
    assert read_scores(found)["test"]["loss"] == pytest.approx(evaluate(found, [])["loss"])
    assert "by the adapter of all rows" in (found / "report.html").read_text()


def test_users_and_time_part_the_folds_of_any_task(home: Path) -> None:
    for task in ("sft", "tag", "embed"):
        for settings in ({"group": "user"}, {"time": "day"}):
            config = RunConfig.model_validate(sections(home, task, folds={"k": FOLDS, **settings}))
            found = check(config)
            assert "2 members" in found.notes[0] or any("2 members" in note for note in found.notes)


def test_a_plan_is_of_all_folds(home: Path) -> None:
    two, four = (plan(RunConfig.model_validate(sections(home, "tag", folds={"k": k}))) for k in (2, 4))
    assert four.size.trainable == 2 * two.size.trainable


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"of": "reward", "tta": {"views": ["typos"]}}, "tta.*one label each"),
        ({"of": "sft", "pseudo_label": {"unlabelled": "new.jsonl"}}, "pseudo_label.*one label each"),
        ({"tta": {"views": ["typos", "drop_words"]}}, "drop_words.*keep every word.*lower, upper, typos"),
        ({"tta": {"views": ["typos"], "merge": "vote"}}, "tta.merge.*one label each"),
        ({"pseudo_label": {"rounds": 2}}, "Write pseudo_label.unlabelled=FILE"),
        ({"pseudo_label": {"unlabelled": "new.jsonl", "adaptive": True}}, "pseudo_label.adaptive.*one label each"),
        ({"pseudo_label": {"unlabelled": "new.jsonl"}, "folds": {"k": 2, "time": "day"}}, "look at later rows"),
        ({"correction": {"neighbours": 5}}, "correction.*one label each"),
        ({"duplicates": {"on_duplicate": "weight"}}, "Write together, or ignore"),
        ({"save": {"ship": "best"}}, "Write save.ship=last"),
        ({"budget": {"time": "1m"}}, "Write train.steps"),
        ({"of": "reinforce"}, "not held out in folds. Write of="),
    ],
)
def test_what_folds_of_runs_have_no_use_for_is_refused(home: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises((Mistakes, ConfigError, ValueError), match=said):
        RunConfig.model_validate(sections(home, "tag", **changed))
