"""Recipes whose rows are recordings: families that hear, the same curve however it is computed, folds by speaker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification

import workbench
from tests.run_files import read_losses, read_scores
from tests.sound_backbones import FAMILIES, record, save_sound
from workbench.config import RunConfig
from workbench.errors import ConfigError, DataError, Stopped, WorkbenchError
from workbench.models import classifier
from workbench.recipes.load import load
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
CHANGES = ["audio.augment={speed: 0.1, shift: 0.05, time_masks: 1, frequency_masks: 1}"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("tones"), 48)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> str:
        path = folder / family
        return str(path) if path.exists() else save_sound(path, family)

    return model


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], str], rows: Path) -> Train:
    folder = tmp_path_factory.mktemp("runs")

    def run(
        name: str, *words: str, family: str = "whisper", recipe: str = "classify", resume: bool = False, to: Any = None
    ) -> Path:
        path = folder / f"{name}.yaml"
        held_out = "" if recipe == "crossval" else ", held_out: 0.25"
        path.write_text(
            f"recipe: {recipe}\nmodel: {{id: {models(family)}, weights: float32}}\n"
            f"data: {{format: audio, train: {rows}{held_out}, ignore: [speaker]}}\n"
            "adapter: {method: lora, rank: 4}\ntrain: {epochs: 3, learning_rate: 1.0e-2}\n"
            "batch: {size: 12}\nevaluate: {every: null}\nsave: {every: null}\n"
        )
        workbench.run(path, list(words), out=folder / name, resume=resume, quiet=True)
        return folder / name

    return run


@pytest.fixture(scope="module")
def learnt(train: Train) -> Path:
    return train("learnt", "train.epochs=25")


def test_sound_is_learnt_scored_and_predicted(learnt: Path, rows: Path, tmp_path: Path) -> None:
    scores = read_scores(learnt)
    assert scores["after"]["accuracy"] > 0.9 > 0.6 >= scores["before"]["accuracy"]
    assert evaluate(learnt, [])["accuracy"] == scores["after"]["accuracy"]
    drawn = pd.read_parquet(learnt / "pictures.parquet")
    assert {"row", "trained"} <= set(drawn["kind"]) and drawn["jpeg"].str.len().gt(300).all()
    page = (learnt / "report.html").read_text()
    assert "data:image/jpeg" in page and "recordings" in page
    heard = drawn["sound"].str.len() > 300
    assert heard[drawn["kind"] == "row"].all() and page.count("<audio") >= 6

    fresh = record(tmp_path / "fresh", 10, seed=100)
    assert predict(learnt, str(fresh), out=tmp_path / "p.csv", max_new_tokens=1).rows == 10
    found = pd.read_csv(tmp_path / "p.csv")
    assert (found["predicted"] == pd.read_csv(fresh)["label"]).mean() > 0.8
    one = predict(learnt, str(fresh.parent / "3.wav"), out=tmp_path / "one.csv", max_new_tokens=1)
    assert one.rows == 1
    np.testing.assert_allclose(pd.read_csv(tmp_path / "one.csv")["p_low"][0], found["p_low"][3], atol=1e-5)


def test_a_merged_model_is_a_stock_model(learnt: Path, rows: Path, tmp_path: Path) -> None:
    merge(learnt, out=tmp_path / "whole", weights="float32")
    stock = AutoModelForAudioClassification.from_pretrained(tmp_path / "whole").float().eval()
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "whole")
    live = classifier.load(learnt, load(learnt / "config.yaml"))
    source = live.reader.read(str(rows))
    inputs = live.reader.inputs(source).batch(np.arange(4), epoch=None).inputs
    assert extractor.chunk_length == 1
    with torch.no_grad():
        torch.testing.assert_close(stock(**inputs).logits, live.model(**inputs).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.nightly(but=["wav2vec2"])
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "whisper"])
def test_every_family_gives_a_row_the_same_outputs_whatever_is_beside_it(train: Train, family: str) -> None:
    whole = train(f"{family}-whole", *CHANGES, family=family)
    parts = train(f"{family}-parts", *CHANGES, "batch.tokens_per_device=128", family=family)
    np.testing.assert_allclose(read_losses(parts), read_losses(whole), rtol=1e-5, atol=1e-6)
    assert read_scores(parts)["after"] == pytest.approx(read_scores(whole)["after"], abs=1e-5)


def test_a_stopped_run_goes_on_bit_by_bit(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.cli.console import Terminal

    straight = train("straight", *CHANGES)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: True)
        with pytest.raises(Stopped, match="after step 1 of"):
            train("stopped", *CHANGES)
    assert read_losses(train("stopped", *CHANGES, resume=True)) == read_losses(straight)


@pytest.mark.slow
def test_folds_by_speaker_with_views_in_a_bank(train: Train, rows: Path) -> None:
    words = ["data.ignore=[]", "folds={k: 4, group: speaker}", "tta={views: [delays, speeds]}"]
    run = train("folds", *words, recipe="crossval")
    table, speakers = pd.read_parquet(run / "out_of_fold.parquet"), pd.read_csv(rows)["speaker"]
    assert (
        table.groupby(table["audio"].map(dict(zip(pd.read_csv(rows)["audio"], speakers, strict=True))))["fold"]
        .nunique()
        .eq(1)
        .all()
    )
    assert read_scores(run)["after"]["accuracy"] > 0.8
    apart = pd.read_parquet(train("apart", *words, "folds.together=false", recipe="crossval") / "out_of_fold.parquet")
    np.testing.assert_allclose(apart.filter(like="p_"), table.filter(like="p_"), atol=1e-4)


REFUSED = [
    (["audio.channels=left"], "mix"),
    (["audio.max_seconds=0"], "greater than 0"),
    (["audio.augment.time_mask=0.3"], "time_mask does nothing without time_masks"),
    (["audio.augment.speed=0.7"], "less than 0.5"),
    (["image.size=32"], "image is for rows that are pictures"),
    (["data.format=text", "audio.on_long=cut"], "audio is for rows that are recordings"),
    (["classes.kind=pair"], "classes.kind=pair compares two texts"),
    (["data.max_tokens=64"], "leave data.max_tokens out"),
    (["duplicates.threshold=0.5"], "of recordings only equal ones"),
    (["batch.packing=true"], "have no padding"),
    (["data.streaming.shards=2"], "data.streaming"),
    (["data.augment.operators=[typos]"], "Write audio.augment instead"),
    (["tta.views=[flip]"], "views of pictures (flip), and rows are sound"),
    (["tta.views=[delays]", "tta.delays=[0]"], "the row itself"),
    (["freeze={policy: static, layers: 1, cache: memory}", *CHANGES], "audio.augment shows other recordings"),
    (["regularise.neftune=5"], "these rows have none"),
    (["recipe=tag"], "data.format=audio is for recipe=classify"),
    (["model.id=starter"], "reads text, and data.format=audio gives it sound"),
    (["model.id=starter/vision"], "reads pictures, and data.format=audio gives it sound"),
    (["data.format=image"], "reads sound, and data.format=image gives it pictures"),
    (["data.format=auto"], "reads sound. Write data.format=audio"),
    (["audio.column=sound"], "has no column `sound` that holds recordings"),
    (["audio.folder=nowhere"], "audio.folder: nowhere is neither in"),
    (["audio.timestamps=true"], "audio.timestamps says how transcripts are written, and classes have none"),
    (["audio.max_seconds=9"], "audio.max_seconds=9 is more than its 1 seconds"),
    (["audio.max_seconds=0.3"], "more than the 0.3 s that are read"),
    (["adapter={method: prompt}"], "adapter.method=lora"),
    (["adapter={method: p-tuning-v2}"], "adapter.method=lora"),
    (["adapter={method: trainable-tokens, tokens: [3]}"], "have no tokens of a vocabulary"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[" ".join(words)[:40] for words, _ in REFUSED])
def test_mistakes_are_refused_with_their_cure(
    words: list[str], sentence: str, rows: Path, models: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        f"recipe: classify\nmodel: {{id: {models('whisper')}}}\n"
        f"data: {{format: audio, train: {rows}, held_out: 0.25, ignore: [speaker]}}\n"
    )
    with pytest.raises(WorkbenchError) as caught:
        check(load(path, words))
    assert sentence in str(caught.value)


def test_recordings_that_cannot_be_read_are_refused_or_left_out(learnt: Path, tmp_path: Path) -> None:
    fresh = record(tmp_path / "fresh", 6, seed=7)
    (fresh.parent / "2.wav").write_bytes(b"no sound at all")
    with pytest.raises(DataError, match=r"1 recording of 6 cannot be read(.|\n)*data\.on_bad_row=skip"):
        predict(learnt, str(fresh), out=tmp_path / "p.csv", max_new_tokens=1)
    found = predict(learnt, str(fresh), ["data.on_bad_row=skip"], out=tmp_path / "p.csv", max_new_tokens=1)
    assert found.rows == 5 and "text, not a recording" in found.left_out[0]
    with pytest.raises(ConfigError, match=r"predict cannot change audio\.channels"):
        predict(learnt, str(fresh), ["audio.channels=refuse"], out=tmp_path / "q.csv", max_new_tokens=1)


def test_check_says_how_long_a_recording_is(train: Train, rows: Path, learnt: Path) -> None:
    found = check(load(learnt / "config.yaml", []))
    assert isinstance(found, ClassInspection)
    assert "s of 1 s at 16,000 hertz, features 8 x 100" in found.examples[0][1]


def test_equal_recordings_are_found(rows: Path, learnt: Path) -> None:
    config: RunConfig = load(learnt / "config.yaml")
    reader = classifier.reader_of_run(learnt, config)
    source = reader.read(str(rows))
    clusters = reader.duplicates([source, source])
    assert (clusters.cluster_N[:48] == clusters.cluster_N[48:]).all() and len(set(clusters.cluster_N)) == 48
