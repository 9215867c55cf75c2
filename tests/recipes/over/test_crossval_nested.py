"""Nested cross-validation: nothing sees an outer fold's rows before they are scored, and what is shipped stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.weather import OTHERS, weather, write
from workbench.evaluation import classification_scores
from workbench.models import classifier
from workbench.recipes.verbs.generate import predict

pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"), pytest.mark.slow]

Train = Callable[..., Path]
NESTED = ("folds.nested=3", "evaluate.metric=macro_f1", "folds.keep=[decision]")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, rows of which two are near-duplicates of others, and rows whose labels are drawn."""
    folder = tmp_path_factory.mktemp("nested")
    save_tiny(folder, "Bert", "SequenceClassification", MINILM, vocabulary=None)
    rows = weather(60, seed=0, wrong=0.1)
    rows += [{**row, "text": f"{row['text']}!"} for row in rows[:2]]
    write(folder / "rows.jsonl", [{**row, "name": f"n{number}"} for number, row in enumerate(rows)])
    draw = np.random.default_rng(3)
    texts = [" ".join(draw.choice(OTHERS, 6)) for _ in range(48)]
    write(folder / "drawn.jsonl", [{"text": text, "label": str(draw.choice(["a", "b"]))} for text in texts])
    return folder


@pytest.fixture(scope="module")
def train(home: Path) -> Train:
    def run(name: str, *more: str, rows: str = "rows", resume: bool = False) -> Path:
        words = [f"data.train={home / rows}.jsonl", f"model.id={home}", "model.weights=float32", "data.limit=null"]
        words += ["data.test=null", "folds.k=2", "train.learning_rate=1e-2", "train.steps=12", "batch.size=8"]
        words += ["adapter.rank=8", "save.every=6"]
        return workbench.run("crossval/quickstart", [*words, *more], out=home / name, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module")
def nested(train: Train) -> Path:
    """A finished run. Read only."""
    return train("nested", *NESTED, "data.columns={id: name}")


def result(run: Path) -> dict[str, Any]:
    """All that a run found out, without the time that it took."""
    told = json.loads((run / "stages.json").read_text().replace(str(run), "RUN"))
    for stage in told["stages"]:
        del stage["seconds"]
    tables = {name: pd.read_parquet(run / name).to_dict() for name in ("nested.parquet", "out_of_fold.parquet")}
    return {**told, **tables, "scores": json.loads((run / "scores.json").read_text())}


def test_each_row_is_scored_once_by_a_flow_that_did_not_see_it(nested: Path, home: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(nested / "nested.parquet").set_index("id")
    assert len(table) == 62 and table.index.is_unique and set(table["fold"]) == {"0", "1", "2"}
    assert table.loc["n60", "fold"] == table.loc["n0", "fold"] and table.loc["n61", "fold"] == table.loc["n1", "fold"]
    rows = {row["name"]: row for row in map(json.loads, (home / "rows.jsonl").read_text().splitlines())}
    values, moved = [], []
    for number in range(3):
        flow, own = nested / "nested" / f"fold-{number}", table[table["fold"] == str(number)]
        assert set(pd.read_parquet(flow / "out_of_fold.parquet")["id"]) == set(table.index) - set(own.index)
        # What is scored is what was saved: the verb reads it again.
        write(tmp_path / "outer.jsonl", [{"text": rows[name]["text"]} for name in own.index])
        predict(flow, str(tmp_path / "outer.jsonl"), out=tmp_path / f"{number}.parquet", max_new_tokens=1)
        said = pd.read_parquet(tmp_path / f"{number}.parquet")
        assert said["predicted"].tolist() == own["predicted"].tolist()
        np.testing.assert_allclose(said.filter(like="p_"), own.filter(like="p_"), atol=1e-5)
        values.append(own.filter(like="p_").to_numpy())
        moved.append(own["predicted"])
    scores, labels = json.loads((nested / "scores.json").read_text())["nested"], classifier.read_labels(nested)
    right = (pd.concat(moved) == table["label"]).mean()
    assert scores["accuracy"] == pytest.approx(right, abs=1e-6), "classes are those of each flow's rule"
    true_NC = labels.targets(table["label"].tolist())
    outputs_NC = classification_scores.outputs_of_values(labels, np.concatenate(values))
    assert scores["loss"] == pytest.approx(classification_scores.loss(labels, outputs_NC, true_NC), abs=1e-5)
    assert "Nested, the whole flow" in (nested / "report.html").read_text()


def test_what_is_shipped_is_what_it_is_without(nested: Path, train: Train) -> None:
    plain = train("plain", *NESTED[1:], "data.columns={id: name}")
    tables = [pd.read_parquet(each / "out_of_fold.parquet") for each in (nested, plain)]
    pd.testing.assert_frame_equal(*tables)
    assert (nested / "decision.json").read_text() == (plain / "decision.json").read_text()
    mine, theirs = (json.loads((each / "scores.json").read_text()) for each in (nested, plain))
    assert mine == {**theirs, "nested": mine["nested"]}


class Killed(BaseException):
    """As by a signal that nothing catches."""


@pytest.mark.nightly
def test_killed_runs_end_with_the_same_result(nested: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = ["nested/fold-0/.*step-", "fold-1/outer.parquet", "killed/members/round-0/.*step-", "nested.parquet"]
    replace, left = os.replace, list(deadly)

    def replaced(source: Any, target: Any) -> None:
        if left and re.search(left[0], str(target)):
            left.pop(0)
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    for death in range(len(deadly)):
        with pytest.raises(Killed):
            train("killed", *NESTED, "data.columns={id: name}", resume=death > 0)
    run = train("killed", *NESTED, "data.columns={id: name}", resume=True)
    assert not left and result(run) == result(nested)


def test_another_choice_of_stages_is_decided_again_in_each_fold_without_training(train: Train) -> None:
    run = train("chosen", "folds.nested=2", "tta.views=[drop_words]")
    files = {path: path.stat().st_mtime_ns for path in run.rglob("adapter/*.safetensors")}
    train("chosen", "folds.nested=2", "tta.views=[drop_words]", "folds.keep=[tta]", resume=True)
    assert files == {path: path.stat().st_mtime_ns for path in run.rglob("adapter/*.safetensors")}
    for number in range(2):
        decided = json.loads((run / "nested" / f"fold-{number}" / "decision.json").read_text())
        assert decided["tta"] is not None, "the flow that is scored is the one that is shipped"


@pytest.mark.nightly
def test_labels_that_are_drawn_flatter_the_best_of_many_settings_and_not_the_nested_score(train: Train) -> None:
    over = "sweep.over={seed: [0, 1, 2, 3, 4, 5, 6, 7]}"
    run = train("drawn", "folds.nested=2", over, "train.steps=30", "train.learning_rate=3e-2", rows="drawn")
    alone = [part["alone"]["accuracy"] for part in json.loads((run / "stages.json").read_text())["parts"]]
    every = json.loads((run / "scores.json").read_text())
    scores = every["nested"]
    assert max(alone) > 0.55 and every["after"]["accuracy"] > 0.55 > scores["accuracy"]
    assert scores["accuracy_low"] < 0.5 < scores["accuracy_high"]
    assert len(pd.read_parquet(run / "nested.parquet")) == 48
