"""Recipes whose rows are pictures: the same curve however it is computed, and what a stock loop computes too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, pipeline

import workbench
from tests.recipes.drawings import draw
from tests.recipes.tasks.classify.test_augmented_pictures import load_config
from tests.run_files import read_losses, read_metrics, read_scores
from workbench.data.images import augmentation
from workbench.data.labelled import labelled_data
from workbench.errors import ConfigError, DataError, Stopped
from workbench.models import classifier
from workbench.recipes.load import load
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
ALL_CHANGES = [
    f"image.augment.{word}"
    for word in (
        *("crop_scale=[0.6,1]", "horizontal_flip=0.5", "vertical_flip=0.5", "rotation=15", "translate=0.1"),
        *("shear=5", "trivialaugment=true", "brightness=0.3", "contrast=0.3", "gamma=0.3", "saturation=0.3"),
        *("hue=0.05", "blur=1", "erasing=0.5", "mixup=0.2", "cutmix=1", "curriculum.strength.start=0.5"),
        "curriculum.resolution.start=0.5",
    )
]
"""But RandAugment, which draws from the same operations as TrivialAugment and excludes it."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, vit: str, drawings: Path) -> Train:
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *words: str, recipe: str = "classify", resume: bool = False) -> Path:
        path = folder / f"{recipe}.yaml"
        held_out = "" if recipe == "crossval" else ", held_out: 0.2"
        path.write_text(
            f"recipe: {recipe}\nmodel: {{id: {vit}, weights: float32}}\n"
            f"data: {{format: image, train: {drawings}{held_out}}}\n"
            "adapter: {method: lora, rank: 4}\ntrain: {epochs: 2, learning_rate: 5.0e-3}\n"
            "batch: {size: 16}\nevaluate: {every: null}\nsave: {every: null}\n"
        )
        workbench.run(path, list(words), out=folder / name, resume=resume, quiet=True)
        return folder / name

    return run


@pytest.fixture(scope="module")
def learnt(train: Train) -> Path:
    return train("learnt", "train.epochs=6")


def test_pictures_are_learnt_scored_and_predicted(learnt: Path, drawings: Path, tmp_path: Path) -> None:
    run = learnt
    scores = read_scores(run)
    assert scores["after"]["accuracy"] > 0.9 > 0.5 > scores["before"]["accuracy"]
    assert evaluate(run, [])["accuracy"] == scores["after"]["accuracy"]
    assert (run / "report.html").exists()

    fresh = draw(tmp_path / "fresh", 12, seed=1)
    assert predict(run, str(fresh), out=tmp_path / "p.csv", max_new_tokens=1).rows == 12
    found = pd.read_csv(tmp_path / "p.csv")
    assert (found["predicted"] == [Path(name).parent.name for name in found["image"]]).mean() > 0.8


def _ttach(name: str, x_B3HW: torch.Tensor) -> list[torch.Tensor]:
    """What ttach 0.0.3 shows a model: `d4_transform`, which has the picture itself, or it and `FiveCrops` of 28."""
    if name == "eight":
        return [torch.rot90(x, k, (2, 3)) for x in (x_B3HW, x_B3HW.flip(3)) for k in range(4)]
    (height, width), c = x_B3HW.shape[2:], 28
    top, left = height // 2 - c // 2, width // 2 - c // 2
    starts = [(0, 0), (0, width - c), (height - c, 0), (height - c, width - c), (top, left)]
    return [x_B3HW, *(x_B3HW[:, :, y : y + c, x : x + c] for y, x in starts)]


@pytest.mark.slow
@pytest.mark.parametrize("views", ["eight", "five_crops"])
def test_views_of_a_run_give_the_probabilities_of_ttach(train: Train, tmp_path: Path, views: str) -> None:
    run = train(views, f"tta={{views: [{views}], keep: true}}")
    predict(run, str(draw(tmp_path / "fresh", 12, seed=1)), out=tmp_path / "p.csv", max_new_tokens=1)
    model = classifier.load(run, load(run / "config.yaml"))
    rows = labelled_data.encode(model.reader.read(str(tmp_path / "fresh"), labelled=False), model.reader, model.labels)

    def seen(number: int, picture_HW3: Any, row: int) -> Any:
        x_13HW = _ttach(views, torch.from_numpy(picture_HW3.copy()).permute(2, 0, 1)[None])[number]
        return augmentation.resized_to(x_13HW[0].permute(1, 2, 0).contiguous().numpy(), picture_HW3.shape[:2])

    count = len(_ttach(views, torch.zeros(1, 3, 32, 32)))
    shown = [replace(rows, inputs=rows.inputs.seen(partial(seen, number))) for number in range(count)]
    with torch.no_grad():
        logits_V = [model.outputs(each.batch(np.arange(len(rows)))).double() for each in shown]
    wanted_NC = torch.stack(logits_V).softmax(2).mean(0).numpy()
    np.testing.assert_allclose(pd.read_csv(tmp_path / "p.csv").filter(like="p_"), wanted_NC, atol=1e-6)
    assert np.abs(logits_V[0].softmax(1).numpy() - wanted_NC).max() > 1e-3


@pytest.mark.nightly(but=["onnx"])
@pytest.mark.slow
@pytest.mark.parametrize("to", ["peft", "onnx"])
def test_an_exported_model_names_the_same_classes(learnt: Path, to: str, tmp_path: Path) -> None:
    found = export(learnt, to=to, out=tmp_path / "out")
    assert "same class 100.00%" in found.error and float(found.error.split("divergence ")[1].split(" ")[0]) < 1e-6
    assert "pipeline_tag: image-classification" in (tmp_path / "out" / "README.md").read_text()


def test_a_single_picture_is_predicted_as_in_its_folder(learnt: Path, tmp_path: Path) -> None:
    asked = draw(tmp_path / "asked", 3, seed=4)
    predict(learnt, str(asked), out=tmp_path / "all.csv", max_new_tokens=1)
    rows = pd.read_csv(tmp_path / "all.csv").set_index("image")
    assert predict(learnt, str(asked / "bar" / "0002.png"), out=tmp_path / "one.csv", max_new_tokens=1).rows == 1
    one = pd.read_csv(tmp_path / "one.csv").set_index("image")
    np.testing.assert_allclose(one["p_bar"], rows.loc[one.index, "p_bar"], atol=1e-5)


def test_deep_pictures_are_scored_and_predicted_by_the_range_of_their_run(train: Train, tmp_path: Path) -> None:
    """A class of dim pictures and one of bright ones, that only a common range tells apart."""
    for number in range(24):
        folder = tmp_path / "scans" / ("dim" if number % 2 else "bright")
        folder.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 240 if number % 2 else 4000, (40, 40)).astype(np.uint16)
        Image.fromarray(values).save(folder / f"{number:02}.png")
    run = train("scans", f"data.train={tmp_path}/scans", "train.epochs=4")
    scores = read_scores(run)
    assert json.loads((run / "adapter" / "picture_format.json").read_text())["ranges"] == [[0, 4095], None]
    assert scores["after"]["accuracy"] == 1 == evaluate(run, [])["accuracy"]
    predict(run, f"{tmp_path}/scans/dim", out=tmp_path / "p.csv", max_new_tokens=1)
    assert set(pd.read_csv(tmp_path / "p.csv")["predicted"]) == {"dim"}
    found = check(load(run / "config.yaml", []))
    assert isinstance(found, ClassInspection) and found.pictures is not None
    assert dict(found.pictures.facts)["Depth"].startswith("12 bits, 0 to 4,095 become 0 to 255")


def test_pictures_that_cannot_be_read_are_refused_or_left_out_of_predictions(learnt: Path, tmp_path: Path) -> None:
    asked = draw(tmp_path / "asked", 6, seed=2)
    next(asked.rglob("*.png")).write_bytes(b"no picture")
    answer = partial(predict, learnt, str(asked), out=tmp_path / "p.csv", max_new_tokens=1)
    with pytest.raises(DataError, match=r"1 picture of 6 cannot be read(.|\n)*data\.on_bad_row=skip"):
        answer()
    found = answer(overrides=["data.on_bad_row=skip"])
    assert found.rows == len(pd.read_csv(tmp_path / "p.csv")) == 5
    assert len(found.left_out) == 1 and "text, not a picture" in found.left_out[0]
    with pytest.raises(ConfigError, match=r"predict cannot change image\.size"):
        predict(learnt, str(asked), ["image.size=8"], out=tmp_path / "q.csv", max_new_tokens=1)


@pytest.fixture(scope="module")
def augmented(train: Train) -> Path:
    return train("augmented", *ALL_CHANGES)


@pytest.mark.nightly(but=["words0"])
@pytest.mark.parametrize("words", [["batch.tokens_per_device=64"], ["batch.tokens_per_device=160", "image.workers=2"]])
def test_the_curve_is_the_same_for_any_micro_batch_and_number_of_workers(
    train: Train, augmented: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))  # no stored pictures
    again = train(words[0], *ALL_CHANGES, *words)
    np.testing.assert_allclose(read_losses(again), read_losses(augmented), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_randaugment_draws_the_same_for_any_micro_batch(train: Train) -> None:
    words = [*(word for word in ALL_CHANGES if "trivialaugment" not in word), "image.augment.randaugment=2"]
    whole, parts = train("whole", *words), train("parts", *words, "batch.tokens_per_device=64")
    np.testing.assert_allclose(read_losses(parts), read_losses(whole), rtol=1e-5, atol=1e-6)


def test_copies_of_pictures_are_left_out_of_training(vit: str, tmp_path: Path) -> None:
    drawn = draw(tmp_path / "drawn", 12)
    first, other, *_ = sorted(drawn.rglob("*.png"))
    new = draw(tmp_path / "new", 3, seed=1)
    with Image.open(first) as picture:
        picture.save(new / first.parent.name / "9000.bmp")  # the same pixels
    with Image.open(other) as picture:
        picture.save(new / other.parent.name / "9001.jpg", quality=90)
    held = draw(tmp_path / "held", 3, seed=2)
    path = tmp_path / "my.yaml"
    path.write_text(
        f"recipe: classify\nmodel: {{id: {vit}}}\nadapter: {{method: lora}}\ntrain: {{steps: 1}}\n"
        f"data: {{format: image, sources: {{old: {{path: {drawn}}}, new: {{path: {new}}}}}, held_out: {held}}}\n"
    )
    for rules, left_out in (
        ("exact_duplicate", ["9000.bmp"]),
        ("near_duplicate,exact_duplicate", ["9000.bmp", "9001.jpg"]),
    ):
        inspected = check(load(str(path), [f"data.clean=[{rules}]"]))
        assert isinstance(inspected, ClassInspection)
        train = inspected.data.train
        assert train.cleaning is not None
        assert sorted(Path(place).name for place in train.cleaning.places) == left_out
        assert len(train) == 12 + 5 - len(left_out)
        assert any(
            note.startswith(f"data.clean left {len(left_out)} of 17 training rows out") for note in inspected.notes
        )


def test_a_stopped_run_goes_on_bit_by_bit(train: Train, augmented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.cli.console import Terminal

    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: True)
        with pytest.raises(Stopped, match="after step 1 of"):
            train("stopped", *ALL_CHANGES)
    assert read_losses(train("stopped", *ALL_CHANGES, resume=True)) == read_losses(augmented)


def test_pictures_grow_within_the_only_epoch(train: Train) -> None:
    run = train("growing", "train.epochs=1", "image.augment.curriculum.resolution={start: 0.25, steps: null}")
    lines = read_metrics(run)
    patches = [round(line["tokens"] / line["supervised_tokens"]) for line in lines]
    assert len(patches) == 5 and patches == sorted(patches) and len(set(patches)) > 2
    assert (patches[0], patches[-1]) == (1, 16)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings of which the squares are few."""
    folder = draw(tmp_path_factory.mktemp("unequal"), 75)
    for extra in sorted((folder / "square").iterdir())[4:]:
        extra.unlink()
    return folder


@pytest.mark.nightly
def test_draws_of_a_rare_class_are_the_same_in_any_micro_batch_and_after_a_stop(
    train: Train, unequal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.cli.console import Terminal

    words = [f"data.train={unequal}", "evaluate.dynamics=true", *ALL_CHANGES]
    whole = train("unequal", *words)
    small = train("unequal-small", *words, "batch.tokens_per_device=64", "image.workers=2")
    np.testing.assert_allclose(read_losses(small), read_losses(whole), rtol=1e-5, atol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: True)
        with pytest.raises(Stopped, match="after step 1 of"):
            train("unequal-stopped", *words)
    assert read_losses(train("unequal-stopped", *words, resume=True)) == read_losses(whole)
    visits = pd.read_parquet(whole / "dynamics.parquet").set_index("row")["visits"]
    rare = visits[[name for name in visits.index if "/square/" in name]]
    assert visits.index.is_unique and (rare > 4).all(), "drawn again in each of two epochs"


def test_steps_equal_those_of_peft_with_a_plain_loop(train: Train, vit: str, tmp_path: Path) -> None:
    """AdamW, linear warm-up of no step, LoRA of PEFT: the losses of a loop that knows nothing of this package."""
    from peft import PeftModel

    run = train("ours", "train.steps=4", "schedule.name=constant", "schedule.warmup=0")
    config = run_directory.read_config(run)
    reader = classifier.reader_of_backbone(config)
    data = labelled_data.load(config, reader)

    from workbench import adapters
    from workbench.data.batching import global_batch
    from workbench.models import backbones

    fresh = backbones.load(config.model, None, task=classifier.task(data.labels, seed=config.seed)).model
    ours = adapters.attach(fresh, config.adapter, seed=config.seed)
    adapters.save(ours, tmp_path / "start")
    head = {name: value.clone() for name, value in fresh.state_dict().items() if "classifier" in name}
    stock = AutoModelForImageClassification.from_pretrained(vit, num_labels=3, ignore_mismatched_sizes=True)
    model = PeftModel.from_pretrained(stock, str(tmp_path / "start"), is_trainable=True)
    assert head
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.train.learning_rate, weight_decay=0.0)
    expected = []
    model.train()
    for step in range(4):
        batch = data.train.batch(global_batch(step, rows=len(data.train), size=16, seed=config.seed))
        logits = model(pixel_values=batch.inputs["pixel_values"]).logits
        loss = F.cross_entropy(logits, batch.labels_N[:, 1:].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm)
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(read_losses(run), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_folds_views_and_pseudo_labels_read_pictures(train: Train, drawings: Path, tmp_path: Path) -> None:
    more = draw(tmp_path / "more", 30, seed=2)
    words = ["folds.k=3", "tta.views=[flip,shifts]", f"pseudo_label.unlabelled={more}", "train.epochs=5"]
    words += ["correction={neighbours: 5, strength: 0.3}", f"data.test={draw(tmp_path / 'test', 12, seed=3)}"]
    run = train("folds", *words, *ALL_CHANGES[:5], recipe="crossval")
    scores = read_scores(run)
    assert scores["after"]["accuracy"] > 0.9
    assert predict(run, str(more), out=tmp_path / "p.parquet", max_new_tokens=1).rows == 30
    found = pd.read_parquet(tmp_path / "p.parquet")
    assert (found["predicted"] == [Path(name).parent.name for name in found["image"]]).mean() > 0.8
    assert predict(run, str(tmp_path / "test"), out=tmp_path / "t.parquet", max_new_tokens=1).rows == 12
    said, known = pd.read_parquet(tmp_path / "t.parquet"), pd.read_parquet(run / "predictions.parquet")
    np.testing.assert_allclose(said.filter(like="p_"), known.filter(like="p_"), atol=1e-5)


@pytest.mark.nightly
def test_a_bank_of_folds_computes_what_each_fold_computes_alone(train: Train) -> None:
    words = ["folds.k=2", "adapter.targets=all-layers", *ALL_CHANGES]
    together = train("together", *words, recipe="crossval")
    apart = train("apart", "folds.together=false", *words, recipe="crossval")
    for fold in (0, 1):
        name = f"members/round-0/repeat-0-fold-{fold}-seed-0"
        np.testing.assert_allclose(read_losses(together / name), read_losses(apart / name), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_members_whose_pictures_have_grown_differently_train_in_one_bank(train: Train, tmp_path: Path) -> None:
    """Folds of 22 and of 23 rows: two and three steps in an epoch."""
    grows = "image.augment.curriculum.resolution={start: 0.25, steps: null}"
    words = [f"data.train={draw(tmp_path / 'few', 34)}", "folds.k=3", "batch.size=11", "train.epochs=1", grows]
    together = train("unlike", *words, recipe="crossval")
    apart = train("unlike-apart", "folds.together=false", *words, recipe="crossval")
    steps = set()
    for fold in range(3):
        name = f"members/round-0/repeat-0-fold-{fold}-seed-0"
        np.testing.assert_allclose(read_losses(together / name), read_losses(apart / name), rtol=1e-4, atol=1e-5)
        steps.add(len(read_losses(together / name)))
    assert steps == {2, 3}


def test_a_student_takes_blocks_of_its_teacher_and_reads_its_pictures(learnt: Path, drawings: Path) -> None:
    teacher = learnt
    path = teacher.parent / "distill.yaml"
    path.write_text(
        "recipe: distill\nof: classify\nmodel: {id: teacher, weights: float32}\n"
        f"data: {{format: image, train: {drawings}, held_out: 0.2}}\n"
        f"distill: {{teacher: {{id: {teacher}}}, student: {{layers: [0]}}}}\n"
        "adapter: {method: full}\ntrain: {epochs: 4, learning_rate: 2.0e-3}\n"
        "batch: {size: 16}\nevaluate: {every: null}\nsave: {every: null}\n"
    )
    found = check(load(path))
    assert isinstance(found, ClassInspection) and found.pictures is not None and "Teacher" in found.notes[0]
    workbench.run(path, ["image.augment.rotation=10"], out=teacher.parent / "student", quiet=True)
    scores = read_scores(teacher.parent / "student")
    assert scores["after"]["accuracy"] > 0.8 and scores["teacher"]["accuracy"] > 0.9


def test_a_merged_model_is_one_that_transformers_runs(learnt: Path, tmp_path: Path) -> None:
    merge(learnt, out=tmp_path / "merged", weights="float32")
    ask = pipeline("image-classification", model=str(tmp_path / "merged"))
    held_out = pd.read_parquet(learnt / "predictions.parquet")
    stock = [ask(Image.open(name))[0]["label"] for name in held_out["image"]]
    assert (held_out["predicted"] == stock).all()


def test_colours_of_the_training_data_are_kept_with_the_run(train: Train, drawings: Path, tmp_path: Path) -> None:
    run = train("standard", "image.prepare.standardise=data", "image.prepare.median=3", "train.steps=2")
    known = json.loads((run / "adapter" / "picture_format.json").read_text())["statistics"]
    assert len(known) == 2 and all(0 < value < 255 for values in known for value in values)
    predict(run, str(drawings), out=tmp_path / "all.csv", max_new_tokens=1)
    held_out = pd.read_parquet(run / "predictions.parquet").set_index("image")
    asked = pd.read_csv(tmp_path / "all.csv").set_index("image").loc[held_out.index]
    np.testing.assert_allclose(asked.filter(like="p_"), held_out.filter(like="p_"), rtol=1e-6)


@pytest.fixture(scope="module")
def shaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 plain pictures, each of another grey: of which rows the mean is, is easily told."""
    folder = tmp_path_factory.mktemp("shaded")
    for number in range(40):
        place = folder / "ab"[number % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 6 * number, dtype=np.uint8)).save(place / f"{number}.png")
    return folder


def shades(rows: Any) -> list[float]:
    return [6.0 * int(Path(record.row.columns["image"].name).stem) for record in rows.records]


@pytest.mark.parametrize("limit", [None, 24])
def test_colours_are_measured_of_the_rows_that_train(vit: str, shaded: Path, limit: int | None) -> None:
    words = ["image.prepare.standardise=data", f"data.limit={limit or 'null'}"]
    config = load_config(vit, shaded, words)
    plain = load_config(vit, shaded, words[1:])
    reader = classifier.reader_of_backbone(config)
    split = labelled_data.load(config, reader)
    as_before = labelled_data.load(plain, classifier.reader_of_backbone(plain))
    assert list(split.train.places()) == list(as_before.train.places()), "what is held out stays"
    _, standardised = list(reader.states(split.train.records[0]))[:2]
    mean, std = np.mean(shades(split.train)), np.std(shades(split.train))
    wanted = np.rint(127.5 + 42.5 * (shades(split.train)[0] - mean) / std)
    assert standardised[0] == "standardise" and np.abs(standardised[1] - wanted).max() <= 1
    assert len(split.train) + len(split.held_out) == (limit or 40)
    every = [*shades(split.train), *shades(split.held_out)]
    assert abs(mean - np.mean(every)) > 1, "all rows have another mean"


def test_colours_of_folds_are_measured_without_test_rows(train: Train, shaded: Path, tmp_path: Path) -> None:
    test = tmp_path / "test"
    for name in ("a/0", "b/1", "a/2", "b/3", "a/4", "b/5"):
        (test / name).parent.mkdir(parents=True, exist_ok=True)
        (test / f"{name}.png").write_bytes((shaded / f"{name}.png").read_bytes())
    words = ["image.prepare.standardise=data", "duplicates.threshold=1", "folds.k=2"]
    words += [f"data={{format: image, train: {shaded}, test: {test}, limit: 30, overlap: drop}}", "train.epochs=1"]
    run = train("shades", *words, recipe="crossval")
    out_of_fold = pd.read_parquet(run / "out_of_fold.parquet")
    kept = [6.0 * int(Path(name).stem) for name in out_of_fold["row"]]
    assert len(kept) < 30, "the others stand in the test"
    (member, *_) = run.glob("members/*/*/adapter/picture_format.json")
    mean, _ = json.loads(member.read_text())["statistics"]
    np.testing.assert_allclose(mean, np.mean(kept))
