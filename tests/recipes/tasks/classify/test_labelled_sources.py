"""Recipe classify over several sources, texts and pictures: scores of each, and the same bits after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.drawings import draw
from tests.recipes.tasks.classify.test_class_run import weather
from tests.run_files import read_losses, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.errors import Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
Train = Callable[..., Path]
NAMES = ("diary", "radio")
KNOWN = [
    "data.held_out=0.25",
    "train.epochs=null",
    "train.steps=9",
    "batch.size=6",
    "evaluate.every=3",
    "save.every=null",
]
KNOWN += ["model.weights=float32", "data.sources.radio.weight=3", "batch.tokens_per_device=100000"]


def trainer(recipe: Path | str, folder: Path, paths: dict[str, Path], *known: str) -> Train:
    own = [f"data.sources.{name}.path={path}" for name, path in paths.items()]

    def run(out: str, *words: str, resume: bool = False) -> Path:
        return workbench.run(recipe, [*own, *known, *KNOWN, *words], out=folder / out, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module", params=["texts", "pictures"])
def train(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vit: str) -> Train:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = dict(zip(NAMES, (36, 12), strict=True))
    if request.param == "pictures":
        paths = {name: draw(folder / name, size, seed=size) for name, size in sizes.items()}
        recipe = folder / "recipe.yaml"
        augment = "image: {augment: {rotation: 20, brightness: 0.3}}"
        recipe.write_text(f"recipe: classify\nmodel: {{id: {vit}}}\ndata: {{format: image, train: none}}\n{augment}\n")
        return trainer(recipe, folder, paths, "data.train=null", "adapter={method: lora, rank: 4, dropout: 0.1}")
    bert = save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "SequenceClassification", MINILM)
    paths = {name: folder / f"{name}.jsonl" for name in NAMES}
    for rows, path in zip((weather(36), weather(48)[36:]), paths.values(), strict=True):
        write_lines(path, rows)
    known = [f"model.id={bert}", "adapter={method: lora, rank: 4, dropout: 0.1}", "train.learning_rate=1e-2"]
    return trainer("classify/quickstart", folder, paths, *known)


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run. Read only."""
    return train("taught")


@pytest.mark.nightly(but=["texts"])
def test_each_source_has_scores_of_its_own_and_the_whole_is_their_mean_by_rows(taught: Path) -> None:
    data = json.loads((taught / "manifest.json").read_text())["data"]
    assert data["train"]["sources"] == {"diary": 27, "radio": 9}
    assert data["held_out"]["sources"] == {"diary": 9, "radio": 3}
    scores = read_scores(taught)
    for found in scores.values():
        assert {"accuracy[diary]", "macro_f1[radio]"} <= found.keys()
        assert found["loss"] == pytest.approx((3 * found["loss[diary]"] + found["loss[radio]"]) / 4, abs=1e-5)
    evaluated = [line for line in read_metrics(taught) if "held_out_loss" in line]
    assert len(evaluated) == 3
    for line in evaluated:
        each = [line[f"held_out_loss[{name}]"] for name in NAMES]
        assert line["held_out_loss"] == pytest.approx((3 * each[0] + each[1]) / 4, rel=1e-5)
    assert evaluate(taught, []) == pytest.approx(scores["after"], abs=1e-5)
    page = (taught / "report.html").read_text()
    assert "Accuracy, radio" in page and "held-out loss, diary" in page


@pytest.mark.nightly(but=["texts"])
def test_rows_are_drawn_as_the_mixture_says(train: Train) -> None:
    """Two whole passes of 36 draws: the 27 rows of one and 3 times the 9 rows of the other have as many each."""
    visits = pd.read_parquet(train("drawn", "train.steps=12", "evaluate.every=null") / "dynamics.parquet")
    of_radio = visits["row"].str.contains("radio")
    times = [visits["visits"][rows].to_numpy() for rows in (~of_radio, of_radio)]
    assert [int(each.sum()) for each in times] == [36, 36]
    assert all(np.ptp(each) <= 1 for each in times)


@pytest.mark.nightly(but=["texts"])
def test_a_stopped_run_goes_on_to_the_same_bits_and_micro_batches_do_not_matter(
    train: Train, taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            train("broken")
    broken = train("broken", resume=True)
    assert read_losses(broken) == read_losses(taught)
    assert (broken / "scores.json").read_bytes() == (taught / "scores.json").read_bytes()
    plain = "adapter={method: lora, rank: 4}"
    whole, parts = (
        train("whole", plain, "train.steps=4"),
        train("parts", plain, "train.steps=4", "batch.tokens_per_device=64"),
    )
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=1e-4)


@pytest.mark.nightly(but=["texts"])
def test_a_learned_mixture_is_the_same_after_a_stop(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data.mix.by=learned", "data.mix.every=2", "data.sources.radio.passes=4"]
    whole = train("learned", *words)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            train("learned broken", *words)
    wanted = [(line["loss"], line["mix_share[radio]"]) for line in read_metrics(whole)]
    broken = read_metrics(train("learned broken", *words, resume=True))
    assert [(line["loss"], line["mix_share[radio]"]) for line in broken] == wanted
    assert len({share for _, share in wanted}) > 2
    assert np.isfinite(np.asarray(wanted)).all()


@pytest.mark.nightly(but=["pictures"])
def test_a_cross_validation_deals_the_rows_of_all_sources_into_folds(train: Train) -> None:
    words = ["recipe=crossval", "data.sources.radio.weight=1", "data.held_out=0.05", "folds.k=2", "train.steps=2"]
    run = train("folds", *words, "evaluate.every=null", "duplicates.on_duplicate=ignore")
    data = json.loads((run / "manifest.json").read_text())["data"]
    assert data["train"]["sources"] == {"diary": 36, "radio": 12}
    after = read_scores(run)["after"]
    assert after["accuracy"] == pytest.approx((3 * after["accuracy[diary]"] + after["accuracy[radio]"]) / 4, abs=1e-5)
    assert len(pd.read_parquet(run / "out_of_fold.parquet")) == 48


@pytest.mark.nightly
def test_check_tells_draws_and_a_member_of_a_sweep_trains_as_it_would_alone(tmp_path: Path) -> None:
    for name, rows in zip(NAMES, (weather(36), weather(48)[36:]), strict=True):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    bert = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    words = [f"data.sources.{name}.path={tmp_path}/{name}.jsonl" for name in NAMES]
    words += [*KNOWN, f"model.id={bert}", "model.dropout=false", "adapter={method: lora, rank: 4, dropout: 0.0}"]
    notes = "\n".join(check(load("classify/quickstart", words)).notes)
    assert "Sources, 36 rows an epoch:" in notes and "radio: 9 rows" in notes and "50.0% of the draws" in notes
    assert "Held-out rows: diary 9, radio 3." in notes
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe: classify\nmodel: {id: x}\ndata: {train: x}\nadapter: {method: lora}\n")
    alone = workbench.run(path, [*words, "train.learning_rate=1e-2"], out=tmp_path / "alone", quiet=True)
    over = ["recipe=sweep", "of=classify", "sweep.over={train.learning_rate: [1e-3, 1e-2]}"]
    swept = workbench.run(path, [*words, *over], out=tmp_path / "swept", quiet=True)
    members = [read_losses(each.parent) for each in swept.glob("members/**/metrics.jsonl")]
    assert len(members) == 2
    assert min(np.abs(np.subtract(each, read_losses(alone))).max() for each in members) < 1e-4
    assert {"loss[diary]", "accuracy[radio]"} <= read_scores(swept)["after"].keys()
