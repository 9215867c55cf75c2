"""`evaluate.metric` from the command's side: what follows it, and what is refused before anything trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.conftest import MINILM, save_tiny
from tests.recipes.tasks.classify.test_class_run import weather
from tests.run_files import read_metrics, read_scores, trains_rows
from workbench.errors import ConfigError, DataError
from workbench.recipes.load import load
from workbench.recipes.verbs.evaluate import evaluate
from workbench.runs import run_directory
from workbench.runs.trust import Trust

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
Train = Callable[..., Path]
WORSE = """
calls = 0

def worse(labels, predicted):
    global calls
    calls += 1
    return -calls
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    bert = save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "SequenceClassification", MINILM)
    known = [f"model.id={bert}", "model.weights=float32", "data.held_out=0.3", "adapter={method: full}"]
    known += ["train.learning_rate=3e-3", "train.steps=24", "batch.size=12", "evaluate.every=3", "save.every=null"]
    return trains_rows(tmp_path_factory.mktemp("runs"), "classify/quickstart", *known)


@pytest.mark.slow
def test_stopping_and_the_best_checkpoint_follow_the_metric(train: Train, tmp_path: Path) -> None:
    """One that is worse at each look, while the loss falls."""
    (tmp_path / "mine.py").write_text(WORSE)
    metric = f"evaluate.metric={tmp_path / 'mine.py'}:worse"
    run = train("worse", weather(60), metric, "evaluate.patience=2", "save.ship=best")
    looks = [line for line in read_metrics(run) if "held_out_loss" in line]
    assert [line["step"] for line in looks] == [3, 6, 9]
    assert looks[2]["held_out_loss"] < looks[0]["held_out_loss"]
    assert looks[0]["held_out_metric"] > looks[1]["held_out_metric"] > looks[2]["held_out_metric"]
    assert read_scores(run)["after"]["loss"] == pytest.approx(looks[0]["held_out_loss"], rel=1e-4)
    lowest = train("lower", weather(60), metric, "evaluate.better=lower", "evaluate.patience=2", "save.ship=best")
    assert len(read_metrics(lowest)) == 24
    kept = run_directory.shipped_config(lowest, Trust()).evaluate
    assert (kept.patience, kept.metric, kept.better) == (2, None, None), "the function alone is left out"


@pytest.mark.slow
def test_scores_and_page_lead_with_the_metric(train: Train, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weather(90)[60:]))
    run = train("mcc", weather(60), "evaluate.metric=mcc", f"data.test={tmp_path / 'test.jsonl'}")
    known, test = (pd.read_parquet(run / f"{name}.parquet") for name in ("predictions", "test_predictions"))
    assert list(test) == list(known) and len(test) == 30
    right = float((test["label"] == test["predicted"]).mean())
    assert read_scores(run)["test"]["accuracy"] == pytest.approx(right, abs=1e-6)
    after = read_scores(run)["after"]
    assert after["mcc_low"] <= after["mcc"] <= after["mcc_high"]
    assert f"Matthews correlation {after['mcc']:.3f}"[:24] in (run / "report.html").read_text()
    assert evaluate(run, [])["mcc"] == after["mcc"]


@pytest.mark.slow
def test_a_search_ships_the_best_by_the_metric_and_says_so(train: Train) -> None:
    words = ["recipe=search", "search.trials=3", "search.rungs=2", "search.eta=2", "evaluate.metric=macro_f1"]
    run = train("searched", weather(60), *words, "search.space={train.learning_rate: [0.00001, 0.003, 0.01]}")
    table = json.loads((run / "search.json").read_text())
    ended = {row["member"]: row["losses"][-1] for row in table["members"] if row["losses"][-1] is not None}
    assert table["by"] == "-macro_f1" and table["best"] == min(ended, key=ended.__getitem__)
    assert read_scores(run)["after"]["macro_f1"] == pytest.approx(-ended[table["best"]], abs=1e-6)
    assert "-macro_f1 after" in (run / "report.html").read_text()


@pytest.mark.slow
def test_folds_and_stages_have_the_metric(train: Train, tmp_path: Path) -> None:
    words = ["recipe=crossval", "folds.k=3", "folds.seeds=1", "evaluate.metric=map@2", "train.steps=6"]
    draws = np.random.default_rng(0).integers(10**6, size=(60, 6))
    rows = [{"text": f"{'sun' if n % 2 else 'rain'} {' '.join(map(str, draws[n]))}", "label": n % 2} for n in range(60)]
    run = train("folds", rows, *words, "data.held_out=0.05")
    stages = json.loads((run / "stages.json").read_text())
    assert all("map@2" in each["scores"] for each in stages["folds"])
    assert all("map@2" in each["oof"] for each in stages["stages"])
    assert {"map@2", "map@2_low"} <= set(read_scores(run)["after"])


@pytest.mark.slow
def test_a_class_that_test_rows_lack_is_named_before_training(train: Train, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weather(90)[60::3]))
    with pytest.raises(DataError, match=r"evaluate.metric=roc_auc on the test rows: no row has the class `rain`"):
        train("absent", weather(60), "evaluate.metric=roc_auc", f"data.test={tmp_path / 'test.jsonl'}")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["evaluate.metric=auc"], r"evaluate.metric: `auc` is no metric. Did you mean `roc_auc`\?"),
        (["evaluate.metric=rmse"], r"does not apply to classes.kind=one. Write one of accuracy, .*map@3"),
        (["evaluate.metric=mcc", "classes.kind=several"], "does not apply to classes.kind=several"),
        (["evaluate.metric=qwk", "evaluate.better=lower"], "other metrics have a direction. Leave it out"),
        (["evaluate.better=lower"], "better is for evaluate.metric=FILE.py:FUNCTION"),
        (["recipe=sft", "evaluate.metric=accuracy"], "recipe=sft has none. It is judged by loss"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_by_the_configuration(words: list[str], why: str) -> None:
    shipped = "sft/quickstart" if "recipe=sft" in words else "classify/quickstart"
    with pytest.raises(ConfigError, match=why):
        load(shipped, words)
