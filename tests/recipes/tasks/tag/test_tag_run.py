"""A tagger learns, is scored as it was saved, and comes through every verb and recipe over tasks that takes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient
from torch.nn import functional as F
from typer.testing import CliRunner

import workbench
from tests.recipes.tasks.tag.tagged_sentences import make_home, sections, sentences, train
from tests.workbench.evaluation.serving.conftest import SETTINGS
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.config.sections.distill_config import TeacherConfig
from workbench.data import starter
from workbench.distillation import teacher_sources
from workbench.errors import ConfigError, DataError
from workbench.evaluation.serving.app import Server
from workbench.recipes.over import distill_tags
from workbench.recipes.tasks.tag import task as tagging
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs import metrics_log, run_directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("tags"))


@pytest.fixture(scope="module")
def done(home: Path) -> Path:
    """A finished run. Read only."""
    return train(sections(home), home / "run")


def test_it_learns_and_is_scored_as_it_was_saved(done: Path) -> None:
    scores = json.loads((done / "scores.json").read_text())
    assert scores["before"]["f1"] == 0 and scores["after"]["f1"] > 0.9
    assert evaluate(done, []) == pytest.approx(scores["after"])
    page = (done / "report.html").read_text()
    assert "Traceback" not in page


def test_predictions_are_spans_with_probabilities(done: Path, home: Path) -> None:
    (home / "new.jsonl").write_text(json.dumps({"text": "Bob went to New York 7 ."}) + "\n")
    predict(done, str(home / "new.jsonl"), out=home / "answers.jsonl", max_new_tokens=1)
    (line,) = map(json.loads, (home / "answers.jsonl").read_text().splitlines())
    found = [(each["text"], each["label"]) for each in line["entities"]]
    assert found == [("Bob", "PER"), ("New York", "LOC")]
    assert all(0 < each["probability"] <= 1 for each in line["entities"])


def test_a_server_says_what_predict_says(done: Path, home: Path) -> None:
    texts = ["Bob went to New York 7 .", "Ann went to Oslo 8 ."]
    (home / "asked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    predict(done, str(home / "asked.jsonl"), out=home / "said.jsonl", max_new_tokens=1)
    wanted = [json.loads(line) for line in (home / "said.jsonl").read_text().splitlines()]
    models = serving.load(serving.named([f"tags={done}"], trust=False), SETTINGS)
    client = TestClient(Server(models, SETTINGS.limits).app, base_url="http://127.0.0.1")
    said = client.post("/classify", json={"model": "tags", "input": texts}).json()["data"]
    for own, other in zip(said, wanted, strict=True):
        assert (own["text"], own["predicted"]) == (other["text"], other["predicted"])
        for entity, same in zip(own["entities"], other["entities"], strict=True):
            assert entity == {**same, "probability": pytest.approx(same["probability"], rel=1e-5)}
    (one,) = client.post("/classify", json={"model": "tags", "input": {"text": texts[1]}}).json()["data"]
    assert one["predicted"] == said[1]["predicted"]
    refused = client.post("/classify", json={"model": "tags", "input": {"txt": "a"}})
    assert refused.status_code == 400 and "objects with `text`" in refused.json()["error"]["message"]
    assert client.get("/v1/models").json()["data"][0]["classes"] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_the_loss_is_the_mean_cross_entropy_of_first_sub_words(home: Path, done: Path) -> None:
    tagger = tagging.load(done, RunConfig.model_validate(sections(home)))
    rows = tagging.prepare(RunConfig.model_validate(sections(home)))[1].held_out
    batch = rows.batch(np.arange(len(rows)))
    logits = tagger.model(**batch.inputs).logits.flatten(0, 1)[batch.positions_N]
    wanted = float(F.cross_entropy(logits.double(), batch.labels_N))
    assert json.loads((done / "scores.json").read_text())["after"]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_check_and_plan_read_what_the_run_reads(home: Path) -> None:
    config = RunConfig.model_validate(sections(home))
    inspection = check(config)
    assert "2 types of entities: LOC, PER." in inspection.notes and inspection.steps == 64
    assert plan(config).needed > 0


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_a_merged_and_an_exported_model_say_the_same(done: Path, home: Path) -> None:
    assert "same tag 100.00%" in merge(done, out=home / "merged", weights="float32").agreement.sentence
    assert "same tag 100.00%" in export(done, to="onnx", out=home / "onnx", weights="float32").error


def test_a_sweep_in_one_bank_is_its_members_alone(home: Path) -> None:
    rates = [1e-3, 1e-2]
    swept = sections(home, recipe="sweep", of="tag", sweep={"over": {"train.learning_rate": rates}}, train={"steps": 6})
    together = workbench.run(RunConfig.model_validate(swept), out=home / "sweep", quiet=True)
    alone = sections(home, train={"steps": 6, "learning_rate": 1e-2})
    single = workbench.run(RunConfig.model_validate(alone), out=home / "alone", quiet=True)
    member = together / "members" / "learning_rate=0.01"
    losses = [[line["loss"] for line in metrics_log.read(each)] for each in (member, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    scores = [json.loads((each / "scores.json").read_text()) for each in (member, single)]
    for split, each in scores[0].items():
        assert each == pytest.approx(scores[1][split], rel=1e-3)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_a_member_of_a_sweep_over_seeds_is_a_run_of_its_own(home: Path) -> None:
    """Its file makes it again, and verbs take its directory."""
    data = {"train": str(home / "train.conll"), "held_out": 0.2}
    swept = sections(home, recipe="sweep", of="tag", data=data, sweep={"over": {"seed": [0, 1, 2]}}, train={"steps": 6})
    run = workbench.run(RunConfig.model_validate(swept), out=home / "seeds", quiet=True)
    member = run / "members" / "seed=2"
    scores = json.loads((member / "scores.json").read_text())
    again = workbench.run(member / "config.yaml", out=home / "again", quiet=True)
    assert json.loads((again / "scores.json").read_text())["after"] == pytest.approx(scores["after"], rel=1e-3)
    (home / "new.txt").write_text("Bob went to New York 7 .\n")
    assert evaluate(member, []) == scores["after"]
    for words in (
        ["evaluate", str(member)],
        ["predict", str(member), str(home / "new.txt"), "--out", str(home / "member.jsonl")],
        ["merge", str(member), "--out", str(home / "member merged")],
        ["export", str(member), "--to", "onnx", "--out", str(home / "member.onnx")],
    ):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output


def test_held_out_texts_that_are_trained_on_are_refused(home: Path) -> None:
    leaking = sections(home, data={"train": str(home / "train.conll"), "held_out": str(home / "twice.conll")})
    (home / "twice.conll").write_text(sentences(8))
    with pytest.raises(DataError, match="training rows are also in"):
        check(RunConfig.model_validate(leaking))
    leaking["data"]["overlap"] = "drop"
    assert len(check(RunConfig.model_validate(leaking)).data.train) <= 56


@pytest.mark.slow
def test_the_shipped_start_learns_parts_of_speech(tmp_path: Path) -> None:
    path = workbench.run("tag/quickstart", ["train.steps=16"], out=tmp_path / "run", quiet=True)
    scores = json.loads((path / "scores.json").read_text())
    assert scores["after"]["accuracy"] > scores["before"]["accuracy"] + 0.1
    table = pd.read_parquet(path / "predictions.parquet")
    assert {"label", "predicted", "words"} <= set(table.columns)
    assert (starter.FOLDER / "ewt_train.conll").is_file()


@pytest.mark.slow
def test_views_that_are_kept_are_used_by_every_verb(home: Path) -> None:
    """Here they are kept whatever the words say."""
    own = sections(home)
    own["tta"] = {"views": ["typos"], "copies": 3, "noise": 0.3, "keep": True}
    run = train(own, home / "viewed")
    scores = json.loads((run / "scores.json").read_text())
    assert json.loads((run / "decision.json").read_text()) == {"tta": {"views": ["typos"], "copies": 3}}
    assert evaluate(run, []) == pytest.approx(scores["after"]) and scores["after"]["loss"] != scores["plain"]["loss"]
    config = run_directory.shipped_config(run)
    tagger = tagging.load(run, config)
    rows = tagging.prepare(config)[1].held_out
    views = tagging.in_views(rows, config.tta, config, tagger.tokenizer)
    wanted = tagging.predicted(tagger.tags, rows, tagger.merged([rows, *views]))
    kept = pd.read_parquet(run / "predictions.parquet")
    np.testing.assert_allclose(np.concatenate(kept["p_O"]), np.concatenate(wanted)[:, 0], atol=1e-6)
    with pytest.raises(ConfigError, match="several views of a row"):
        merge(run, out=home / "merged_views")
    source = teacher_sources.find(TeacherConfig(id=str(run)), config.model)
    teachers = distill_tags.find(source, config, tagger.tags)
    (said, *_) = distill_tags.asked(teachers, tagger.tags, {"held_out": rows})["held_out"]
    np.testing.assert_allclose(said.p_WC, wanted[0], atol=1e-6)

    workbench.run(run / "config.yaml", ["tta.keep=false"], out=run, resume=True, quiet=True)
    again = json.loads((run / "scores.json").read_text())
    assert again["after"] == scores["plain"] and "plain" not in again


def test_views_of_a_single_run_that_words_have_not_are_refused(home: Path) -> None:
    for own, told in (
        ({"views": ["drop_words"]}, "tta.views: drop_words: recipe=tag needs views that keep every word"),
        ({"views": ["typos"], "merge": "vote"}, "tta.merge: is for rows with one label each"),
    ):
        with pytest.raises(ValidationError, match=told):
            RunConfig.model_validate(sections(home) | {"tta": own})
    with pytest.raises(DataError, match="view lower changes no row"):
        check(RunConfig.model_validate(sections(home) | {"tta": {"views": ["lower"]}}))
