"""Distillation on pictures: soft labels of one teacher and of folds, layers that are compared, shorter students."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

import workbench
from tests.recipes.drawings import COLOURS, draw
from tests.run_files import read_losses, read_scores
from tests.stopping import stop_after
from tests.vision_backbones import SIZE, save_vision
from tests.workbench.distillation.matched import WHATS
from workbench.adapters import anatomy
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.errors import ConfigError, Stopped
from workbench.evaluation import classification_scores
from workbench.models import classifier
from workbench.recipes.load import load
from workbench.recipes.tasks.classify import class_run
from workbench.recipes.verbs import check
from workbench.recipes.verbs.generate import predict
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Recipe = Callable[..., tuple[Path, list[str]]]
NAMES = sorted(COLOURS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings, and tiny backbones that read them."""
    folder = tmp_path_factory.mktemp("picture_distillation")
    draw(folder / "drawings", 60)
    for name in ("ViT", "Dinov2", "CLIP", "ResNet", "Siglip"):
        save_vision(folder / name, name)
        ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def recipe(home: Path) -> Recipe:
    """A recipe, and the words that name its backbone and its teacher."""

    def make(of: str, *words: str, backbone: str = "ViT", teacher: Path | None = None) -> tuple[Path, list[str]]:
        path = home / f"{of}.yaml"
        path.write_text(
            f"recipe: {of}\nmodel: {{weights: float32}}\ndata: {{format: image, train: {home}/drawings"
            f"{'' if of == 'crossval' else ', held_out: 0.2'}}}\nadapter: {{method: lora, rank: 4}}\n"
            "train: {epochs: 5, learning_rate: 5.0e-3}\nbatch: {size: 16}\nevaluate: {every: null}\n"
            f"save: {{every: null}}\n{'of: classify' if of == 'distill' else ''}\n"
        )
        named = backbone if backbone == "teacher" else str(home / backbone)
        taught = [] if teacher is None else [f"distill.teacher.id={teacher}"]
        return path, [f"model.id={named}", *taught, *words]

    return make


@pytest.fixture(scope="module")
def train(home: Path, recipe: Recipe) -> Callable[..., Path]:
    def run(name: str, of: str, *words: str, **named: Any) -> Path:
        path, every = recipe(of, *words, **named)
        workbench.run(path, every, out=home / name, quiet=True)
        return home / name

    return run


@pytest.fixture(scope="module")
def taught(train: Callable[..., Path]) -> Path:
    return train("taught", "classify")


@pytest.fixture(scope="module")
def folds(train: Callable[..., Path]) -> Path:
    return train("folds", "crossval", "folds.k=3")


def said(run: Path) -> dict[str, Floats]:
    """What the teacher said of the rows of each set."""
    return load_file(run / "teacher.safetensors")


def read(run: Path) -> tuple[classifier.Classifier, LabelledSet]:
    """What a run of recipe classify trained, and its training rows."""
    config = run_directory.shipped_config(run)
    model = classifier.load(run, config)
    _, data, _ = class_run.prepare(config)
    return model, data.train


def test_one_teacher_says_what_it_predicts(train: Callable[..., Path], taught: Path) -> None:
    run = train("student", "distill", "distill.alpha=1", "distill.temperature=2", teacher=taught)
    teacher, rows = read(taught)
    np.testing.assert_allclose(
        said(run)["train"],
        classification_scores.predict_outputs(teacher.model, teacher.outputs, rows),
        rtol=1e-4,
        atol=1e-4,
    )
    found = read_scores(run)
    assert found["teacher"]["accuracy"] == pytest.approx(read_scores(taught)["after"]["accuracy"])
    assert found["after"]["accuracy"] > 0.7 > found["before"]["accuracy"]
    plain = train("hard", "distill", "distill.alpha=0", teacher=taught)
    assert read_losses(plain)[0] != read_losses(run)[0]
    np.testing.assert_array_equal(read_losses(plain), read_losses(train("plain", "classify")))


@pytest.mark.slow
@pytest.mark.parametrize("prepare", ["", "image.prepare={standardise: data}"])
def test_rows_of_folds_are_known_by_their_pictures_in_another_folder(
    train: Callable[..., Path], recipe: Recipe, home: Path, tmp_path: Path, prepare: str
) -> None:
    words = [prepare] if prepare else []
    teacher = train(f"moved{bool(prepare)}", "crossval", "folds.k=3", "train.steps=1", *words)
    shutil.copytree(home / "drawings", tmp_path / "elsewhere")
    asked = [*words, "distill.teacher.out_of_fold=true", f"data.train={tmp_path}/elsewhere"]
    path, every = recipe("distill", *asked, teacher=teacher)
    assert check.check(load(path, every)) is not None
    for picture in (tmp_path / "elsewhere").rglob("*.png"):
        Image.open(picture).transpose(Image.Transpose.ROTATE_90).save(picture)
    with pytest.raises(ConfigError, match="only 0 of the"):
        check.check(load(path, every))
    assert check.check(load(path, [*every, "distill.alpha=0"])) is not None


@pytest.mark.nightly
def test_the_adapters_of_folds_teach_together(train: Callable[..., Path], folds: Path, home: Path) -> None:
    together = train("ensemble", "distill", "distill.alpha=1", teacher=folds)
    apart = train("out_of_fold", "distill", "distill.alpha=1", "distill.teacher.out_of_fold=true", teacher=folds)
    model, rows = read(together)
    names = [model.reader.describe(record) for record in rows.records]
    known = pd.read_parquet(folds / "out_of_fold.parquet").groupby("image")[[f"p_{name}" for name in NAMES]].mean()
    wanted_NC = known.loc[names].to_numpy()
    np.testing.assert_allclose(model.labels.values(said(apart)["train"]), wanted_NC, atol=1e-6)
    assert np.abs(model.labels.values(said(together)["train"]) - wanted_NC).max() > 1e-3
    # Rows that no fold has seen are said by the mean of all adapters, in both runs: as `predict` says it.
    predict(folds, str(home / "drawings"), out=home / "p.parquet", max_new_tokens=1)
    asked = pd.read_parquet(home / "p.parquet").set_index("image")[[f"p_{name}" for name in NAMES]]
    whole_NC = asked.loc[names].to_numpy()
    np.testing.assert_allclose(model.labels.values(said(together)["train"]), whole_NC, atol=1e-5)
    assert read_scores(together)["teacher"]["accuracy"] > 0.7
    loss = classification_scores.loss(model.labels, said(together)["train"], rows.targets_NC)
    assert loss < classification_scores.loss(model.labels, said(apart)["train"], rows.targets_NC)


@pytest.mark.nightly(but=["hidden_mse-ViT"])
@pytest.mark.parametrize(
    ("what", "backbone"),
    [
        *((what, "ViT") for what in WHATS),
        *(pytest.param(what, "Dinov2", marks=() if what == "attention" else pytest.mark.nightly) for what in WHATS),
    ],
)
def test_layers_are_learnt_in_any_micro_batches(
    what: str, backbone: str, train: Callable[..., Path], recipe: Recipe, taught: Path, home: Path
) -> None:
    words = ["train.epochs=1", f"distill.match=[{{what: {what}, layers: uniform}}]"]
    check.check(load(*recipe("distill", *words, backbone=backbone, teacher=taught)))
    runs = [
        train(f"{what}-{backbone}-{tokens}", "distill", *words, f"batch.tokens_per_device={tokens}", **named)
        for tokens in (16, 1000)
        if (named := {"backbone": backbone, "teacher": taught})
    ]
    np.testing.assert_allclose(read_losses(runs[0]), read_losses(runs[1]), rtol=1e-4)
    plain = home / f"{backbone}-plain"  # the same whatever is learnt of layers
    if not plain.exists():
        train(plain.name, "distill", "train.epochs=1", backbone=backbone, teacher=taught)
    assert read_losses(runs[0])[0] > read_losses(plain)[0]


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(
    train: Callable[..., Path], recipe: Recipe, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With projections between the widths of feature maps, and pictures that grow over the run."""
    wide = save_vision(home / "wide", "ResNet", hidden_sizes=[24, 40])
    ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(wide)
    teacher = train("taught-wide", "classify", "train.epochs=1", backbone="wide")
    words = ["train.epochs=2", "distill.match=[{what: hidden_mse, layers: uniform}]"]
    words += ["image.augment.curriculum.resolution.start=0.5", "distill.control=true"]
    named: dict[str, Any] = {"backbone": "ResNet", "teacher": teacher}
    straight = train("straight", "distill", *words, **named)
    path, every = recipe("distill", *words, **named)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            workbench.run(path, every, out=home / "broken", quiet=True)
    broken = workbench.run(path, every, out=home / "broken", resume=True, quiet=True)
    assert read_losses(broken) == read_losses(straight)
    one, other = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (straight, broken))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_layers_that_do_not_fit_are_refused_by_check(recipe: Recipe, taught: Path) -> None:
    for backbone, what, message in (
        ("ResNet", "hidden_mse", r"student, ResNet\w+, has 16 positions .* 17\. No layers"),
        ("Siglip", "attention", r"student, Siglip\w+, has 16 positions .* 17\."),
    ):
        words = [f"distill.match=[{{what: {what}}}]"]
        with pytest.raises(ConfigError, match=message):
            check.check(load(*recipe("distill", *words, backbone=backbone, teacher=taught)))
    with pytest.raises(ConfigError, match=r"pictures of another size.*write its image.size"):
        words = ["distill.match=[{what: hidden_mse}]", "image.size=40"]
        check.check(load(*recipe("distill", *words, backbone="Dinov2", teacher=taught)))


def test_a_teacher_sees_pictures_in_its_own_colours(train: Callable[..., Path], home: Path) -> None:
    """The same backbone is unlike itself in its layers where its pictures are normalised otherwise, and only there."""
    save_vision(home / "other", "ViT")
    for name, std in (("other", 0.25), ("ViT", 0.5)):
        ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_std=[std] * 3).save_pretrained(home / name)
    for name in ("ViT", "other"):
        config = json.loads((home / name / "config.json").read_text())
        config["id2label"], config["label2id"] = dict(enumerate(NAMES)), {label: n for n, label in enumerate(NAMES)}
        (home / name / "config.json").write_text(json.dumps(config))
    first = {}
    for name in ("ViT", "other"):
        for match in ("", "distill.match=[{what: hidden_mse, layers: {0: 0}}]"):
            words = ["distill.alpha=0", "distill.control=true", "train.epochs=1", *filter(None, [match])]
            words.append("distill.teacher.weights=float32")
            run = train(f"colours-{name}-{bool(match)}", "distill", *words, teacher=home / name)
            first[name, bool(match)] = read_losses(run)[0]
    assert first["ViT", True] == pytest.approx(first["ViT", False], abs=1e-6)
    assert first["other", True] > first["other", False] + 1e-2


@pytest.mark.nightly(but=["Dinov2"])
@pytest.mark.parametrize("family", ["Dinov2", "CLIP"])
def test_a_student_of_its_teachers_first_layer(family: str, train: Callable[..., Path], recipe: Recipe) -> None:
    teacher = train(f"taught-{family}", "classify", backbone=family)
    words = ["distill.student.layers=[0]", "adapter={method: full}", "train.learning_rate=1e-3", "train.epochs=3"]
    check.check(load(*recipe("distill", *words, backbone="teacher", teacher=teacher)))
    run = train(f"first-{family}", "distill", *words, backbone="teacher", teacher=teacher)
    student = AutoModelForImageClassification.from_pretrained(run / "adapter")
    assert [len(stack) for stack in anatomy.blocks(student)] == [1]
    assert read_scores(run)["after"]["loss"] < read_scores(run)["before"]["loss"]
    assert torch.isfinite(student(pixel_values=torch.zeros(1, 3, SIZE, SIZE)).logits).all()
