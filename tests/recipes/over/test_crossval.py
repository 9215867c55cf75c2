"""Cross-validation from the command's side: nobody judges a row that taught it, nothing stays that does not help."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.weather import OTHERS, WORDS, weather, write
from workbench.crossval import ensembles
from workbench.data.labelled import fold_data
from workbench.errors import ConfigError
from workbench.evaluation import classification_scores
from workbench.models import classifier
from workbench.recipes.load import load
from workbench.recipes.over import crossval_verbs
from workbench.recipes.over.crossval_verbs import CrossvalInspection
from workbench.recipes.tasks.classify.task import Gap
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with the vocabulary of a real one, and rows with, for a test, and without labels."""
    folder = tmp_path_factory.mktemp("crossval")
    save_tiny(folder, "Bert", "SequenceClassification", MINILM, vocabulary=None)
    write(folder / "train.jsonl", weather(60, seed=0, wrong=0.1))
    write(folder / "test.jsonl", weather(30, seed=1, wrong=0.1))
    write(folder / "more.jsonl", [{"text": row["text"]} for row in weather(45, seed=2)])
    return folder


@pytest.fixture(scope="module")
def words(home: Path) -> list[str]:
    """A short cross-validation of three folds."""
    known = [f"data.train={home / 'train.jsonl'}", f"data.test={home / 'test.jsonl'}", f"model.id={home}"]
    known += ["model.weights=float32", "data.limit=null", "folds.k=3", "train.learning_rate=1e-2", "train.steps=30"]
    return [*known, "batch.size=8", "adapter.rank=8", "save.every=10"]


@pytest.fixture(scope="module")
def train(home: Path, words: list[str]) -> Run:
    def run(name: str, *more: str, recipe: str = "crossval/quickstart", resume: bool = False) -> Path:
        return workbench.run(recipe, [*words, *more], out=home / name, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module")
def plain(train: Run) -> Path:
    """A finished run. Read only."""
    return train("plain", "folds.seeds=2", "folds.refit=true")


@pytest.mark.nightly
def test_rows_of_several_sources_are_folded_as_those_of_one_file(
    home: Path, plain: Path, train: Run, words: list[str]
) -> None:
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    write(home / "first.jsonl", [{"said": row["text"], "label": row["label"]} for row in rows[:40]])
    write(home / "second.jsonl", rows[40:])
    more = ["data.train=null", f"data.sources.second.path={home / 'second.jsonl'}", "folds.seeds=2", "folds.refit=true"]
    first = "{first: {path: %s, columns: {text: said}}}" % (home / "first.jsonl")
    notes = check(load("crossval/quickstart", [*words, f"data.sources={first}", *more])).notes
    assert "Rows of first 40, second 20: one set, dealt into folds." in notes
    run = train("sources", f"data.sources={first}", *more)
    tables = [pd.read_parquet(each / "out_of_fold.parquet").drop(columns=["row", "id"]) for each in (run, plain)]
    pd.testing.assert_frame_equal(*tables)
    mine, theirs = (json.loads((each / "scores.json").read_text()) for each in (run, plain))
    assert {name: each for name, each in mine["after"].items() if "[" not in name} == theirs["after"]
    share = {name: mine["after"][f"accuracy[{name}]"] * size / 60 for name, size in (("first", 40), ("second", 20))}
    assert mine["after"]["accuracy"] == pytest.approx(sum(share.values()), abs=1e-5)
    assert mine["refit"] == theirs["refit"]
    data = json.loads((run / "manifest.json").read_text())["data"]
    assert data["train"]["sources"] == {"first": 40, "second": 20}


@pytest.fixture(scope="module")
def everything(home: Path) -> list[str]:
    """Every stage: calibration, pseudo-labels, an ensemble, views, corrections, and one adapter on all rows."""
    return [
        f"pseudo_label={{unlabelled: {home / 'more.jsonl'}, threshold: 0.3, rounds: 2}}",
        *("tta={views: [typos, drop_words], merge: mean}", "correction={neighbours: [3, 6], strength: 0.2}"),
        *("ensemble={merge: auto, consensus: true}", "folds.refit=true", "train.steps=12", "save.every=4"),
    ]


def stages(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "stages.json").read_text())["stages"])


def result(run: Path) -> dict[str, Any]:
    """All that a run found out, without the time that it took, and its place."""
    told = json.loads((run / "stages.json").read_text().replace(str(run), "RUN"))
    for stage in told["stages"]:
        del stage["seconds"]
    return {
        **told,
        "scores": json.loads((run / "scores.json").read_text()),
        "rows": pd.read_parquet(run / "out_of_fold.parquet").to_dict(),
    }


@pytest.mark.slow
def test_a_decision_rule_chooses_labels_of_rows_and_of_new_ones(home: Path, train: Run) -> None:
    run = train("decided", "evaluate.metric=macro_f1", "folds.keep=[decision]")
    labels, stage = classifier.read_labels(run), stages(run)[-1]
    assert stage["name"] == "decision" and stage["accepted"] and stage["facts"]["rule"] in stage["why"]
    assert list(labels.shift) == pytest.approx(list(stage["facts"]["shift"].values()))
    assert stage["gain"]["difference"] == stage["gain"]["high"] == 0
    assert stage["oof"]["loss"] == [each for each in stages(run) if each["accepted"]][-2]["oof"]["loss"]
    scores, table = json.loads((run / "scores.json").read_text()), pd.read_parquet(run / "out_of_fold.parquet")
    assert scores["after"]["accuracy"] == pytest.approx((table["predicted"] == table["label"]).mean(), abs=1e-6)
    assert scores["after"]["macro_f1"] == stage["oof"]["macro_f1"]
    # Whatever the rule says, later rows follow it: here that all are of the second class.
    second = replace(labels, shift=(0.0, 50.0, *([0.0] * (len(labels.names) - 2))))
    (run / "classes.json").write_text(json.dumps(second.facts))
    found = workbench.predict(run, str(home / "test.jsonl")).table
    assert set(found["predicted"]) == {labels.names[1]} and found[f"p_{labels.names[1]}"].max() < 1
    scored = workbench.evaluate(run)
    true = pd.read_json(home / "test.jsonl", lines=True)["label"].astype(str)
    assert scored["accuracy"] == pytest.approx((true == labels.names[1]).mean(), abs=1e-6)
    assert scored["loss"] == pytest.approx(scores["test"]["loss"], abs=1e-5)


def test_every_row_is_judged_once_by_adapters_that_did_not_train_on_it(plain: Path, words: list[str]) -> None:
    config = run_directory.read_config(plain)
    table = pd.read_parquet(plain / "out_of_fold.parquet")
    decided = json.loads((plain / "decision.json").read_text())
    assert len(table) == 60 and table["row"].is_unique and set(table["fold"]) == {"0", "1", "2"}
    np.testing.assert_allclose(table.filter(like="p_").sum(axis=1), 1)
    member = plain / "members" / "round-0"
    first = classifier.load(member / "repeat-0-fold-1-seed-0", config)
    second = classifier.load(member / "repeat-0-fold-1-seed-1", config)
    data = fold_data.load(config, first.reader)
    validated_N = (table["fold"] == "1").to_numpy()
    assert validated_N.tolist() == (data.folds.fold_RN[0] == 1).tolist()
    of_rows = [
        classification_scores.predict_outputs(each.model, each.outputs, data.rows.subset(validated_N))
        for each in (first, second)
    ]
    # The temperature of the two differs a little between parts of the rows; that of all six is another one.
    kept = stages(plain)[1]
    heat = kept["facts"]["temperature"] if kept["accepted"] else 1.0
    assert decided["temperature"] == (kept["facts"]["temperature of all adapters"] if kept["accepted"] else 1.0)
    assert kept["facts"]["fitted on"] == "30 test rows, not their labels"
    mean = np.mean([data.labels.values(each) for each in of_rows], axis=0)
    values = ensembles.tempered(data.labels, mean, heat)
    np.testing.assert_allclose(values, table.filter(like="p_")[validated_N], atol=0.1)
    assert values.argmax(1).tolist() == table.filter(like="p_")[validated_N].to_numpy().argmax(1).tolist()


def test_each_adapter_has_its_own_lines_and_the_pages_stacker_reads_them(plain: Path) -> None:
    together = pd.read_parquet(plain / "out_of_fold.parquet")
    members = pd.read_parquet(plain / "out_of_fold_members.parquet")
    assert together["id"].tolist() == together["row"].tolist(), "no column is named"
    assert len(members) == 120 and set(members["member"]) == set(os.listdir(plain / "members" / "round-0")) - {
        *("manifest.json", "outputs.safetensors")
    }
    same = ["label", "repeat", "fold"]
    for _, own in members.groupby("seed"):
        pd.testing.assert_frame_equal(own.set_index("id")[same].loc[together["id"]], together.set_index("id")[same])
    page = (Path(__file__).parents[3] / "recipes" / "over" / "folds.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace("runs/first", str(plain)).replace("runs/second", str(plain)), found)
    labels = pd.read_parquet(plain / "predictions.parquet").set_index("id")["label"]
    assert len(found["answers"]) == 30 and (found["answers"] == labels).mean() > 0.5


def test_the_ensemble_learns_and_scores_stand_beside_a_baseline(plain: Path) -> None:
    scores = json.loads((plain / "scores.json").read_text())
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert {"accuracy", "accuracy_low", "accuracy_high"} <= set(scores["test"]) and "loss" in scores["refit"]
    table = pd.read_parquet(plain / "predictions.parquet")
    right = float((table["label"] == table["predicted"]).mean())
    assert right == pytest.approx(scores["test"]["accuracy"], abs=1e-6)
    told = json.loads((plain / "stages.json").read_text())
    assert [stage["name"] for stage in told["stages"]][:2] == ["supervised", "calibration"]
    assert len(told["folds"]) == 6 and told["summary"]["accuracy"]["low"] <= told["summary"]["accuracy"]["mean"]
    assert "out of fold" in (plain / "report.html").read_text().lower()


def test_predict_and_evaluate_say_what_the_run_said(plain: Path, home: Path, tmp_path: Path) -> None:
    assert predict(plain, str(home / "test.jsonl"), out=tmp_path / "said.parquet", max_new_tokens=1).rows == 30
    said, known = pd.read_parquet(tmp_path / "said.parquet"), pd.read_parquet(plain / "predictions.parquet")
    np.testing.assert_allclose(said.filter(like="p_"), known.filter(like="p_"), atol=1e-5)
    scores = json.loads((plain / "scores.json").read_text())["test"]
    assert evaluate(plain, [])["loss"] == pytest.approx(scores["loss"], abs=1e-4)


def test_the_adapter_on_all_rows_is_one_that_can_be_merged(plain: Path, tmp_path: Path) -> None:
    gap = merge(plain, out=tmp_path / "merged", weights="float32").agreement
    assert isinstance(gap, Gap) and gap.same == 1.0 and gap.kl is not None and gap.kl < 1e-6


@pytest.mark.nightly
def test_adapters_trained_one_after_another_are_those_of_the_bank(train: Run, plain: Path) -> None:
    apart = train("apart", "folds.seeds=2", "folds.together=false")
    found, known = (pd.read_parquet(run / "out_of_fold.parquet").filter(like="p_") for run in (apart, plain))
    np.testing.assert_allclose(found, known, atol=2e-3)
    one, other = (pd.read_parquet(run / "dynamics.parquet").set_index("row") for run in (apart, plain))
    assert len(one) == 60 and set(one["adapters"]) == {4} and set(one.index) == set(other.index)
    scored = pd.read_parquet(plain / "out_of_fold.parquet").set_index("row")
    right = scored.eval("label == predicted").groupby("row").mean()
    assert other["right_out_of_fold"].to_dict() == right.to_dict()
    columns = ["first_loss", "confidence", "variability"]
    np.testing.assert_allclose(one[columns], other.loc[one.index, columns], atol=5e-3)


@pytest.mark.nightly(but=["ia3"])
@pytest.mark.parametrize("method", ["ia3", "houlsby", "last-layers"])
def test_methods_beside_lora_train_in_a_bank_or_one_after_another(train: Run, method: str) -> None:
    words = (f"adapter={{method: {method}}}", "train.steps=2")
    runs = train(method, *words), train(f"{method}-apart", *words, "folds.together=false")
    found, apart = (pd.read_parquet(each / "out_of_fold.parquet").filter(like="p_") for each in runs)
    assert len(found) == 60
    np.testing.assert_allclose(found, apart, atol=2e-3)


def _several(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "label": [row["label"], "wet"] if row["label"] != "sun" else ["sun"]}


def _number(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "label": {"sun": 2.5, "rain": 0.5, "snow": -1.5}[row["label"]] + len(row["text"]) / 100}


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": "weather", "response_a": row["text"], "response_b": row["text"][::-1]}
    return {**texts, "winner": {"sun": "a", "rain": "b", "snow": "tie"}[row["label"]]}


@pytest.mark.nightly(but=["number-_number-tta={views: [drop_words]}"])
@pytest.mark.parametrize(
    ("kind", "made", "more"),
    [
        ("several", _several, "tta={views: [drop_words], merge: max}"),
        ("number", _number, "tta={views: [drop_words]}"),
        ("pair", _pair, "tta={views: [swap]}"),
    ],
)
def test_every_kind_of_label(
    kind: str, made: Callable[[dict[str, Any]], dict[str, Any]], more: str, train: Run, home: Path
) -> None:
    for name, seed, rows in (("train", 0, 45), ("test", 1, 15)):
        write(home / f"{kind}-{name}.jsonl", [made(row) for row in weather(rows, seed=seed)])
    files = [f"data.{name}={home / f'{kind}-{name}.jsonl'}" for name in ("train", "test")]
    words = [*files, f"classes.kind={kind}", "duplicates.on_duplicate=ignore", "train.steps=4", "folds.repeats=2", more]
    run = train(kind, *words)
    names = [stage["name"] for stage in stages(run)]
    assert names[0] == "supervised" and names[-1] == "tta" and ("calibration" in names) == (kind != "number")
    table = pd.read_parquet(run / "out_of_fold.parquet")
    assert (
        len(table) == 90 and set(table["repeat"]) == {0, 1} and len(pd.read_parquet(run / "predictions.parquet")) == 15
    )
    assert all(np.isfinite(value) for value in json.loads((run / "scores.json").read_text())["test"].values())


@pytest.mark.nightly(but=["number-_number"])
@pytest.mark.parametrize(("kind", "made"), [("one", dict), ("several", _several), ("number", _number)])
def test_neighbours_correct_what_the_run_says_and_what_it_predicts(
    kind: str, made: Callable[[dict[str, Any]], dict[str, Any]], train: Run, home: Path, tmp_path: Path
) -> None:
    for name, seed, rows in (("train", 0, 45), ("test", 1, 15)):
        write(home / f"near-{kind}-{name}.jsonl", [made(row) for row in weather(rows, seed=seed)])
    files = [f"data.{name}={home / f'near-{kind}-{name}.jsonl'}" for name in ("train", "test")]
    words = [*files, f"classes.kind={kind}", "duplicates.on_duplicate=ignore", "train.steps=4", "save.every=null"]
    run = train(f"near-{kind}", *words, "correction={neighbours: [2, 5], strength: 0.5}")
    stage = stages(run)[-1]
    assert stage["name"] == "correction" and stage["accepted"] and stage["facts"]["neighbours"] in (2, 5)
    assert (stage["facts"]["changed"] is None) == (kind == "number") and 0 < stage["facts"]["similarity"] < 1
    assert stage["oof"] == json.loads((run / "scores.json").read_text())["after"]
    known = pd.read_parquet(run / "predictions.parquet")
    columns = ["predicted"] if kind == "number" else [name for name in known if name.startswith("p_")]
    predict(run, files[1].partition("=")[2], out=tmp_path / "all.parquet", max_new_tokens=1)
    said = pd.read_parquet(tmp_path / "all.parquet")
    np.testing.assert_allclose(said[columns], known[columns], atol=1e-5)
    one = write(tmp_path / "one.jsonl", [json.loads((home / f"near-{kind}-test.jsonl").read_text().splitlines()[7])])
    predict(run, str(one), out=tmp_path / "one.parquet", max_new_tokens=1)
    alone = pd.read_parquet(tmp_path / "one.parquet")
    np.testing.assert_allclose(alone[columns], said[columns][7:8], atol=1e-5), "whatever is asked beside it"


def test_stages_that_will_run_are_listed_and_those_that_lack_a_file(words: list[str], everything: list[str]) -> None:
    own = [each for each in words if not each.startswith("data.test")]
    found = crossval_verbs.inspect(load("crossval/combo", [*own, "correction.neighbours=[5,200]"])).notes
    (stages,) = [each for each in found if each.startswith("Stages: ")]
    assert "calibration, test-time views, correction by similarity" in stages and "pseudo-labels" not in stages
    (missing,) = [each for each in found if each.startswith("No file is named for: ")]
    assert "pseudo_label.unlabelled=FILE" in missing and "data.test=FILE" in missing
    (left_out,) = [each for each in found if each.startswith("correction.neighbours: ")]
    assert "200 left out, and 5 tried" in left_out
    found = crossval_verbs.inspect(load("crossval/combo", [*words, *everything])).notes
    assert any("pseudo-labels (2 rounds), test-time views" in each and "scores on test rows." in each for each in found)
    assert not any(each.startswith("No file is named") for each in found)


def test_neighbours_that_do_not_fit_are_not_tried(train: Run) -> None:
    run = train("few-rows", "correction={neighbours: [3, 50], strength: 0.5}", "train.steps=4", "save.every=null")
    assert stages(run)[-1]["name"] == "correction" and stages(run)[-1]["facts"]["neighbours"] == 3


def test_a_temperature_that_gains_nothing_is_refused_with_the_reason(train: Run) -> None:
    run = train("cold", "train.steps=1", "train.learning_rate=1e-6", "save.every=null")
    (stage,) = [each for each in stages(run) if each["name"] == "calibration"]
    assert not stage["accepted"] and "Refused: the loss does not fall" in stage["why"]
    assert json.loads((run / "decision.json").read_text())["temperature"] == 1


def test_neighbours_of_a_backbone_without_weights_are_not_credited(train: Run) -> None:
    """Features of random weights say nothing; predictions stay as they were, and `predict` asks no neighbour."""
    run = train("unrelated", "correction.neighbours=[2,5]", "train.steps=4", "save.every=null")
    known = {stage["name"]: stage for stage in stages(run)}
    assert not known["correction"]["accepted"] and "Refused" in known["correction"]["why"]
    stays = [stage["oof"] for stage in stages(run) if stage["accepted"]][-1]
    assert json.loads((run / "scores.json").read_text())["after"] == stays
    assert json.loads((run / "decision.json").read_text())["correction"] is None
    assert not (run / "neighbours.safetensors").exists()


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture(scope="module")
def whole(train: Run, everything: list[str]) -> Path:
    """Every stage, never interrupted. Read only."""
    return train("whole", *everything, recipe="crossval/combo")


STAGES = (
    *(r"round-0/.*/checkpoints/step-", r"round-0/.*/adapter$", r"round-0/outputs"),
    *(r"round-1/.*/checkpoints/step-", r"round-1/outputs", "views", "features"),
    *("refit/checkpoints/step-", "refit/adapter$", r"decision\.json", r"scores\.json"),
)
"""What appears in a run directory, stage after stage."""


@pytest.mark.slow
@pytest.mark.nightly(but=["every second"])
@pytest.mark.parametrize("deadly", [STAGES[::2], STAGES], ids=["every second", "every one"])
def test_a_combination_killed_in_its_stages_ends_with_the_same_result(
    train: Run,
    everything: list[str],
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    deadly: Sequence[str],
) -> None:
    """Killed in each stage before one of its files appears, a random one of several; resumed after each death."""
    chance, deaths = np.random.default_rng(5), 0
    left = [int(chance.integers(1, 4)) if "step-" in stage else 1 for stage in deadly]
    replace = os.replace

    def replaced(source: Any, target: Any) -> None:
        if deaths < len(deadly) and re.search(deadly[deaths], str(target)):
            left[deaths] -= 1
            if not left[deaths]:
                raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    for deaths in range(len(deadly)):
        with pytest.raises(Killed):
            train(f"killed-{len(deadly)}-times", *everything, recipe="crossval/combo", resume=deaths > 0)
    deaths = len(deadly)
    request.getfixturevalue("drawn")  # the last report alone
    resumed = train(f"killed-{len(deadly)}-times", *everything, recipe="crossval/combo", resume=True)
    assert result(resumed) == result(whole)
    assert "<path" in (resumed / "report.html").read_text()


@pytest.mark.slow
def test_a_naive_pseudo_label_setting_is_caught_by_out_of_fold_rows(train: Run, home: Path) -> None:
    """Rows of no class at all, labelled however unsure anybody is, and weighed more than true labels."""
    chance = np.random.default_rng(9)
    noise = [{"text": " ".join(map(str, chance.choice(OTHERS, size=6)))} for _ in range(120)]
    path = write(home / "noise.jsonl", noise)
    naive = f"{{unlabelled: {path}, threshold: 0.0, cap: null, weight: 20, labels: hard}}"
    run = train("naive", f"pseudo_label={naive}", "duplicates.on_duplicate=ignore")
    known = {stage["name"]: stage for stage in stages(run)}
    trap = known["pseudo_label 1"]
    assert not trap["accepted"] and trap["gain"]["loss_after"] > trap["gain"]["loss_before"], trap["why"]
    scores = json.loads((run / "scores.json").read_text())
    stays = [stage["oof"] for stage in stages(run) if stage["accepted"]][-1]
    assert scores["after"] == stays, "what was there before stays"


@pytest.mark.slow
def test_a_refused_stage_is_kept_without_training_it_again(train: Run, home: Path) -> None:
    """A finished run that takes it ends as one that took it from the beginning, its adapter of all rows too."""
    more = [f"pseudo_label={{unlabelled: {home / 'more.jsonl'}, threshold: 0.0}}", "tta.views=[drop_words]"]
    more += ["train.steps=4", "save.every=null", "folds.refit=true"]
    run, keep = train("refused", *more), "folds.keep=[pseudo_label 1, tta]"
    told = {stage["name"]: stage for stage in stages(run)}
    names = ("pseudo_label 1", "tta")
    assert not any(told[name]["accepted"] for name in names)
    command = f"{run}/config.yaml --out {run} --resume 'folds.keep=[tta]'`, which trains none of it again."
    assert command in told["tta"]["why"]
    trained = sorted((run / "members").glob("round-*/*/adapter/*.safetensors"))
    before = [each.stat().st_mtime_ns for each in trained]
    assert train("refused", *more, keep, resume=True) == run
    assert [each.stat().st_mtime_ns for each in trained] == before
    kept = {stage["name"]: stage for stage in stages(run)}
    assert all(kept[name]["accepted"] and kept[name]["why"].count("Kept, as the") for name in names)
    fresh = train("kept", *more, keep)
    assert result(run) == result(fresh)
    files = [each / "adapter" / "adapter_model.safetensors" for each in (run, fresh)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run_directory.read_config(run).folds.keep == ["pseudo_label 1", "tta"]


@pytest.mark.slow
def test_suspected_labels_are_dropped_where_that_helps_and_pseudo_labels_follow(
    train: Run, home: Path, tmp_path: Path
) -> None:
    """Planted wrong labels are named, no validated row is lost, and a refused stage changes nothing."""
    rows = weather(150, seed=3)
    wrong = list(range(0, 150, 12))
    for row in wrong:
        rows[row]["label"] = list(WORDS)[(row + 1) % 3]
    path, more = write(home / "planted.jsonl", rows), home / "more.jsonl"
    common = [f"data.train={path}", "data.drop_suspects=true", "train.steps=60", "folds.refit=true"]
    common += ["duplicates.on_duplicate=ignore", f"pseudo_label={{unlabelled: {more}, threshold: 0.5, sure: 0}}"]
    run = train("suspects", *common)
    known = {stage["name"]: stage for stage in stages(run)}
    assert list(known)[:3] == ["supervised", "calibration", "drop_suspects"]
    stage = known["drop_suspects"]
    named = pd.read_parquet(run / "suspects.parquet")
    planted = {rows[row]["text"] for row in wrong}
    assert named["text"][:10].isin(planted).mean() > 0.5, "the most suspect first, of which a tenth would be chance"
    assert named["score"].is_monotonic_increasing and (named["score"] < 0.5).all()
    assert (named["label"] != named["suggested"]).all()
    assert len(pd.read_parquet(run / "out_of_fold.parquet")) == 150, "rows that are dropped are still judged"
    assert stage["facts"]["rows"] >= 5 and 0 <= stage["facts"]["dropped rows predicted as labelled"] < 0.8
    folds = json.loads((run / "stages.json").read_text())["folds"]
    assert all((fold["train_rows"] < 100) == stage["accepted"] for fold in folds)
    kept = 3 if known["pseudo_label 1"]["accepted"] else 2 if stage["accepted"] else 0
    assert json.loads((run / "decision.json").read_text())["round"] == kept
    assert (run / "adapter").is_dir()
    predict(run, str(more), out=tmp_path / "said.csv", max_new_tokens=1)


def test_check_tells_of_folds_and_duplicates(home: Path, words: list[str]) -> None:
    rows = weather(60, seed=0)
    write(home / "twice.jsonl", [*rows, *({**row, "text": row["text"].upper() + "!"} for row in rows[:12])])
    found = check(load("crossval/quickstart", [*words, f"data.train={home / 'twice.jsonl'}", "data.test=null"]))
    assert isinstance(found, CrossvalInspection) and found.members == 3 and found.data.leak > 0
    assert found.data.duplicates is not None and found.data.duplicates.exact == 12
    assert (found.data.folds.fold_RN[0][:12] == found.data.folds.fold_RN[0][60:]).all(), "a row and its copy"


def test_an_ensemble_is_not_one_model(train: Run, tmp_path: Path) -> None:
    run = train("unmerged", "train.steps=1")
    with pytest.raises(ConfigError, match=r"folds\.refit=true"):
        merge(run, out=tmp_path / "merged", weights="float32")


@pytest.mark.nightly
@pytest.mark.slow
def test_columns_stand_in_the_prompt_and_a_story_in_one_fold(tmp_path: Path) -> None:
    words = ["data.limit=200", "train.steps=2"]
    run = workbench.run("crossval/tabular-text", words, out=tmp_path / "run", quiet=True)
    told = pd.read_parquet(run / "out_of_fold.parquet")
    rows = pd.read_csv(Path(workbench.__file__).parent / "data/starter/stories_train.csv").head(200)
    first = rows.iloc[0]
    assert told["text"][0].startswith(f"{first['type']}, {first['scope']}. Section {first['section']}, ")
    assert f"Found: {first['found']}.\n{first['question']}\n{first['answer']}" in told["text"][0]
    assert (told["fold"].groupby(rows["story"]).nunique() == 1).all()
    answers = run.parent / "answers.csv"
    predict(run, "starter/stories_test.csv", out=answers)
    assert len(pd.read_csv(answers)) == 500
    assert json.loads((run / "manifest.json").read_text())["simple_baseline"]["features"].endswith("numbers of columns")
