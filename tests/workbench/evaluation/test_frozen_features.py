"""Features are what the head reads, whatever the batch, and tell labels that can be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.conftest import MINILM, STORIES, write_animals
from tests.run_files import write_lines
from tests.vision_backbones import SIZE, save_vision
from workbench.config import ModelConfig, RunConfig
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet, load
from workbench.data.labelled.records import RowReader
from workbench.errors import ConfigError, FileError
from workbench.evaluation import frozen_features
from workbench.evaluation.frozen_features import (
    PARTS,
    STRENGTH,
    UNKNOWN,
    backbone_features,
    cached_features,
    probe,
    probe_losses,
)
from workbench.models import backbones, classifier
from workbench.recipes.verbs import features


def config(model: str, train: str, **data: object) -> RunConfig:
    values = {"recipe": "classify", "model": {"id": model, "weights": "float32"}, "data": {"train": train, **data}}
    return RunConfig.model_validate(values)


def read(config: RunConfig, rows: int) -> tuple[classifier.Classifier, labelled_data.LabelledSet]:
    reader = classifier.reader_of_backbone(config)
    data = labelled_data.load(config, reader)
    backbone = backbones.load(config.model, reader.tokenizer, task=classifier.task(data.labels, seed=0)).model
    return classifier.classification_model(backbone, backbone, reader, data.labels), data.train.subset(np.arange(rows))


@pytest.mark.parametrize("name", ["encoder", "causal", "ViT", "ResNet"])
def test_features_are_what_the_head_reads(name: str, tmp_path: Path) -> None:
    if name in ("ViT", "ResNet"):
        train = "starter/sign_digits.zip/test"
        asked = config(save_vision(tmp_path, name), train, format="image", held_out=0.3)
        asked = asked.model_copy(update={"image": asked.image.model_copy(update={"size": SIZE})})
    else:
        asked = config(MINILM if name == "encoder" else "starter", "starter/banking77_train.csv", limit=400)
    model, rows = read(asked, 12)
    found = backbone_features(model, rows.inputs)
    head = model.backbone.get_submodule({"causal": "score"}.get(name, "classifier"))
    with torch.no_grad():
        said = head(torch.from_numpy(found)[:, :, None, None] if name == "ResNet" else torch.from_numpy(found))
        expected = model.outputs(rows.batch(np.arange(12)))
    torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-4)
    alone = np.concatenate([backbone_features(model, rows.inputs.take(np.asarray([number]))) for number in range(12)])
    np.testing.assert_allclose(alone, found, rtol=1e-3, atol=1e-4)


def clouds(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of three classes with noise, and the classes."""
    rng = np.random.default_rng(0)
    class_N = np.arange(rows) % 3
    return (rng.normal(size=(3, 20))[class_N] + 0.3 * rng.normal(size=(rows, 20))).astype(np.float32), class_N


def test_losses_are_those_of_probes_that_never_saw_the_row() -> None:
    """Written out by scikit-learn's own cross-validation over the same parts."""
    features_ND, class_N = clouds(60)
    part_N = np.random.default_rng([7, 12]).permutation(60) % PARTS
    said_NC = cross_val_predict(
        make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH)),
        *(features_ND, class_N),
        cv=PredefinedSplit(part_N),
        method="predict_proba",
    )
    found = probe_losses(features_ND, class_N, seed=7)
    np.testing.assert_allclose(found, -np.log(said_NC[np.arange(60), class_N]), atol=6e-4)


def test_wrong_labels_and_a_class_of_one_row_are_the_hardest() -> None:
    features_ND, class_N = clouds(90)
    class_N[[4, 40]] = (class_N[[4, 40]] + 1) % 3
    class_N[50] = 3
    found = probe_losses(features_ND, class_N, seed=0)
    assert {*np.argsort(-found)[:3].tolist()} == {4, 40, 50}
    assert found[50] == pytest.approx(-np.log(UNKNOWN), abs=1e-3) and (found >= 0).all()


def test_what_can_be_told_is_told_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    labels = [str(number % 3) for number in range(120)]
    centres = rng.normal(size=(3, 20))
    clear = (np.stack([centres[int(label)] for label in labels]) + 0.1 * rng.normal(size=(120, 20))).astype(np.float32)
    assert probe(clear[:90], labels[:90], clear[90:], labels[90:]) == (1, 1)
    noise = rng.normal(size=(120, 20)).astype(np.float32)
    assert max(probe(noise[:90], labels[:90], noise[90:], labels[90:])) < 0.65


def test_the_verb_writes_features_with_rows_and_labels(tmp_path: Path) -> None:
    asked = config("starter", "starter/banking77_train.csv", limit=240, held_out=0.25)
    asked = asked.model_copy(update={"classes": asked.classes.model_copy(update={"every_class": False})})
    found = features.features(asked, out=tmp_path / "f.parquet")
    table = pd.read_parquet(tmp_path / "f.parquet")
    assert table["split"].value_counts().to_dict() == found.rows == {"train": 180, "held_out": 60}
    assert len(table["features"][0]) == found.width and list(table.columns[:2]) == ["row", "text"]
    assert found.known is not None and found.known.probe.linear > found.known.likeliest
    assert "linear probe" in found.sentence
    with pytest.raises(ConfigError, match="Name a recipe of classify or crossval"):
        features.features(asked.model_copy(update={"recipe": "sft"}))


def test_the_verb_writes_features_of_folds_test_and_unlabelled_rows(tmp_path: Path, stories: str) -> None:
    write_animals(tmp_path / "train.jsonl", range(60))
    write_animals(tmp_path / "test.jsonl", range(100, 109))
    rows = [{"text": f"An owl has {number} eggs."} for number in range(5)]
    write_lines(tmp_path / "more.jsonl", rows)
    data = {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl")}
    sections = {"model": {"id": stories}, "data": data, "pseudo_label": {"unlabelled": str(tmp_path / "more.jsonl")}}
    sections["duplicates"] = {"on_duplicate": "ignore"}
    found = features.features(RunConfig.model_validate({"recipe": "crossval", **sections}), out=tmp_path / "f.parquet")
    table = pd.read_parquet(tmp_path / "f.parquet")
    assert table["split"].value_counts().to_dict() == found.rows
    assert set(found.rows) == {"train", "test", "unlabelled"} and found.rows["unlabelled"] == 5
    assert found.known is not None and found.known.classes == 3
    assert table["label"][table["split"] == "unlabelled"].isna().all()


@pytest.mark.parametrize("kind", ["several", "number"])
def test_labels_that_are_not_one_class_have_their_own_score(kind: str, tmp_path: Path, stories: str) -> None:
    labels = (lambda n: ["odd"] * (n % 2) + ["high"] * (n > 9)) if kind == "several" else (lambda n: n / 2)
    rows = [{"text": f"It is {number}.", "label": labels(number)} for number in range(20)]
    write_lines(tmp_path / "rows.jsonl", rows)
    sections = {"model": {"id": stories}, "data": {"train": str(tmp_path / "rows.jsonl"), "held_out": 0.25}}
    asked = RunConfig.model_validate({"recipe": "classify", **sections, "classes": {"kind": kind}})
    found = features.features(asked, out=tmp_path / "f.parquet")
    score = found.known.baseline.score
    assert found.known.probe is None and score.name == ("micro_f1" if kind == "several" else "rmse")
    assert f"the linear probe {score.first:.3f}, the same answer for every row" in found.sentence
    assert pd.read_parquet(tmp_path / "f.parquet")["label"].notna().all()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def texts() -> tuple[ModelConfig, RowReader, LabelledSet]:
    model = {"id": str(STORIES), "weights": "float32"}
    values = {"recipe": "classify", "model": model, "data": {"train": "starter/banking77_train.csv"}}
    config = RunConfig.model_validate(values)
    reader = classifier.reader_of_backbone(config)
    return config.model, reader, load(config, reader).train.subset(np.arange(24))


def kept(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.rglob("*.bin")}


def test_they_are_those_of_the_backbone_in_the_order_of_the_rows(cache: Path) -> None:
    model, reader, rows = texts()
    first, second = rows.inputs.take(np.arange(9, -1, -1)), rows.inputs.take(np.arange(5, 24))
    found = cached_features(model, reader, [first, second])
    labels = classifier.Labels("one", ("x", "y", "z"))
    backbone = backbones.load(model, reader.tokenizer, task=classifier.task(labels, seed=3)).model
    loaded = classifier.classification_model(backbone, backbone, reader, labels)
    for inputs, each in zip((first, second), found, strict=True):
        np.testing.assert_allclose(each, backbone_features(loaded, inputs), rtol=1e-3, atol=1e-4)
    assert found[0][0].tobytes() == found[1][4].tobytes(), "row 9 stands in both"


def test_known_rows_need_no_backbone_and_new_ones_are_added(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reader, rows = texts()
    (some,) = cached_features(model, reader, [rows.inputs.take(np.arange(8))])
    before = kept(cache)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with monkeypatch.context() as without:
        without.delattr(frozen_features.backbones, "load")
        (again,) = cached_features(model, reader, [rows.inputs.take(np.asarray([7, 0, 0]))])
    assert again.tobytes() == some[[7, 0, 0]].tobytes() and kept(cache) == before
    (more,) = cached_features(model, reader, [rows.inputs])
    assert more[:8].tobytes() == some.tobytes()
    assert torch.equal(state, torch.get_rng_state()), "no random number is drawn"


@pytest.mark.nightly(but=["changed"])
@pytest.mark.parametrize("damage", ["cut", "changed", "index gone"])
def test_what_is_damaged_is_computed_again(cache: Path, damage: str) -> None:
    model, reader, rows = texts()
    (sound,) = cached_features(model, reader, [rows.inputs])
    (states,), (index,) = cache.rglob("states.bin"), cache.rglob("index.bin")
    content = states.read_bytes()
    if damage == "cut":
        states.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        states.write_bytes(b"\xff" * 64 + content[64:])
    else:
        index.unlink()
    (found,) = cached_features(model, reader, [rows.inputs])
    np.testing.assert_allclose(found, sound, rtol=1e-3, atol=1e-4)


def test_other_weights_precision_or_preparation_are_kept_apart(cache: Path, tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "ViT")

    def name(weights: str = "float32", size: int = SIZE) -> str:
        config = RunConfig.model_validate(
            {
                "recipe": "classify",
                "model": {"id": folder, "weights": weights},
                "data": {"train": "starter/sign_digits.zip/test", "format": "image"},
                "image": {"size": size},
            }
        )
        return frozen_features._store(config.model, classifier.reader_of_backbone(config)).folder.name

    names = [name(), name(weights="bfloat16"), name(size=2 * SIZE)]
    assert name() == names[0]
    tensors = load_file(Path(folder, "model.safetensors"))
    save_file(
        {key: tensor + 0.1 for key, tensor in tensors.items()}, Path(folder, "model.safetensors"), {"format": "pt"}
    )
    assert len({*names, name()}) == 4


def test_a_cache_that_cannot_be_written_is_a_mistake_with_a_cure(cache: Path) -> None:
    model, reader, rows = texts()
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(FileError, match=r"evaluate\.probe=0"):
        cached_features(model, reader, [rows.inputs.take(np.arange(2))])


@pytest.fixture(autouse=True)
def cache_frozen_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def config_frozen_probe(**evaluate: object) -> RunConfig:
    values = {
        "recipe": "classify",
        "model": {"id": str(STORIES), "weights": "float32"},
        "data": {"train": "starter/banking77_train.csv", "held_out": "starter/banking77_held_out.csv"},
        "evaluate": evaluate,
    }
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def rows() -> tuple[RowReader, LabelledSet, LabelledSet]:
    reader = classifier.reader_of_backbone(config_frozen_probe())
    data = load(config_frozen_probe(), reader)
    return reader, data.train.subset(np.arange(0, 1600, 20)), data.held_out.subset(np.arange(0, 400, 10))


def brute_force(train_ND: np.ndarray, other_D: np.ndarray, allowed_N: np.ndarray) -> list[int]:
    centred_ND, centred_D = train_ND - train_ND.mean(0), other_D - train_ND.mean(0)
    cosine = centred_ND @ centred_D / np.linalg.norm(centred_ND, axis=1) / np.linalg.norm(centred_D)
    order = np.argsort(-np.where(allowed_N, cosine, -2), kind="stable")
    return [int(row) for row in order[: frozen_features.NEIGHBOURS] if allowed_N[row]]


def test_neighbours_are_the_nearest_training_rows(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    reader, train, held_out = rows
    found = frozen_features.of_splits(config_frozen_probe(), reader, train, held_out, most=4000)
    train_ND, held_out_ND = cached_features(config_frozen_probe().model, reader, [train.inputs, held_out.inputs])
    for row in (0, 7, 39):
        near = [nearest for _, nearest, _ in found.neighbours([row])]
        assert near == brute_force(train_ND, held_out_ND[row], np.ones(len(train), dtype=bool))
    facts = found.facts
    assert (facts["train"], facts["others"], facts["compared"], facts["rows"]) == (80, 40, 80, 80)
    assert 0 < facts["linear"] <= 1 and "linear probe 0." in frozen_features.sentence(facts, after=0.9)
    best = max(facts["linear"], facts["neighbours"])
    assert frozen_features.is_enough(facts, best) and not frozen_features.is_enough(facts, best + 0.01)


def test_rows_of_a_fold_are_compared_with_those_of_others(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    reader, train, _ = rows
    fold_N = np.arange(80) % 4
    found = frozen_features.of_folds(config_frozen_probe(), reader, train, fold_N, most=4000)
    (train_ND,) = cached_features(config_frozen_probe().model, reader, [train.inputs])
    for row in (0, 1, 79):
        near = [nearest for _, nearest, _ in found.neighbours([row])]
        assert near == brute_force(train_ND, train_ND[row], fold_N != fold_N[row])
    assert (found.facts["train"], found.facts["others"]) == (60, 20)


def test_a_mistake_that_was_not_looked_at_has_neighbours_too(
    rows: tuple[RowReader, LabelledSet, LabelledSet], tmp_path: Path
) -> None:
    reader, train, held_out = rows
    found = frozen_features.of_splits(config_frozen_probe(), reader, train, held_out, most=30)
    assert len(found.train_T) == len(found.others_M) == 15
    names = sorted({str(label) for label in (*train.labels, *held_out.labels)})
    p_NC = np.random.default_rng(0).dirichlet(np.ones(len(names)), len(held_out))
    said = [names[number] for number in p_NC.argmax(1)]
    places = [record.place for record in held_out.records]
    table = pd.DataFrame({"row": places, "text": places, "label": held_out.labels, "predicted": said})
    table = pd.concat([table, pd.DataFrame(p_NC, columns=[f"p_{name}" for name in names])], axis=1)
    near = found.write_neighbours(tmp_path, table)
    written = pd.read_parquet(tmp_path / frozen_features.NEIGHBOURS_FILE)
    assert set(written["row"]) <= set(places) and written["row"].nunique() == frozen_features.EXPLAINED
    assert set(written["neighbour"]) == {record.place for record in near.records}
    assert {train.place(row) for row in found.train_T} >= set(written["neighbour"])
    assert written.groupby("row")["similarity"].apply(lambda each: each.is_monotonic_decreasing).all()


def test_as_many_rows_are_looked_at_as_cost_little(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    task = classifier.task(classifier.Labels("one", ("a", "b")), seed=0)

    def count(visits: int | None, **evaluate: object) -> int:
        return frozen_features.rows_before_run(config_frozen_probe(**evaluate), task, visits=visits)

    assert count(100) == count(None) == count(10**5, probe=0) == 0
    assert count(10_000) == 10_000 * frozen_features.SHARE and count(10**8) == frozen_features.MOST
    assert count(None, probe=7) == 7
    assert frozen_features.rows_in_check(config_frozen_probe(), task, rows[1].lengths) == frozen_features.MOST
    assert frozen_features.rows_in_check(config_frozen_probe(), task, rows[1].lengths * 10**6) == 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_few_rows_and_labels_without_classes_have_neighbours_at_least(
    rows: tuple[RowReader, LabelledSet, LabelledSet], most: int
) -> None:
    reader, train, held_out = rows
    few = frozen_features.of_splits(config_frozen_probe(), reader, train, held_out, most=most)
    assert few.facts["train"] >= 1 and len(few.neighbours([3])) == min(3, len(few.train_T))
    fold = frozen_features.of_folds(config_frozen_probe(), reader, train, np.arange(80) // 40, most=most)
    assert {fold.fold_N[near] for _, near, _ in fold.neighbours([0])} <= {1} and "compared" in fold.facts
    numbers = replace(train, records=tuple(each._replace(label=1.5) for each in train.records))
    found = frozen_features.of_splits(config_frozen_probe(), reader, numbers, held_out, most=60)
    assert found.scores() is None and frozen_features.sentence(found.facts) == "" and len(found.neighbours([0, 1])) == 6


def test_all_rows_are_looked_at_where_their_features_are_known(
    rows: tuple[RowReader, LabelledSet, LabelledSet],
) -> None:
    reader, train, held_out = rows
    assert len(frozen_features.of_splits(config_frozen_probe(), reader, train, held_out, most=20).train_T) == 10
    cached_features(config_frozen_probe().model, reader, [train.inputs, held_out.inputs])
    found = frozen_features.of_splits(config_frozen_probe(), reader, train, held_out, most=20)
    assert (len(found.train_T), len(found.others_M)) == (80, 40)
