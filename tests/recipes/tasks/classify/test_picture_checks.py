"""`check` on pictures: it tells their sizes and colours, warns of changes that exchange labels, and draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.vision_backbones import SIZE, save_vision
from tests.workbench.data.images.pictures import photograph
from workbench.cli.verbs import app
from workbench.data.images.picture_reader import PictureRows
from workbench.errors import BackboneError, ConfigError
from workbench.recipes.inspection import Inspection
from workbench.recipes.load import load
from workbench.recipes.tasks.classify import picture_checks
from workbench.recipes.tasks.classify.picture_checks import PictureFindings
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.verbs import check

Find = Callable[..., PictureFindings]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of three sizes in folders 6 and 9, of which one in four is grey."""
    folder = tmp_path_factory.mktemp("recipe")
    backbone = save_vision(folder / "vit", "ViT")
    for number in range(24):
        pixels = photograph(20 + 20 * (number % 3), 30, seed=number)
        if number % 4 == 0:
            pixels = np.repeat(pixels[..., :1], 3, axis=2)
        path = folder / "signs" / "69"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (folder / "my.yaml").write_text(
        f"recipe: classify\nmodel: {{id: {backbone}, weights: float32}}\nadapter: {{method: lora, rank: 2}}\n"
        f"data: {{format: image, train: {folder}/signs, held_out: 0.2}}\ntrain: {{epochs: 6}}\n"
    )
    return folder / "my.yaml"


@pytest.fixture(scope="module")
def find(recipe: Path) -> Find:
    def found(*words: str) -> PictureFindings:
        config = load(recipe, words)
        inspection = check.check(config)
        assert not isinstance(inspection, Inspection) and inspection.pictures is not None
        return inspection.pictures

    return found


def test_sizes_and_colours_are_those_of_the_files(find: Find) -> None:
    facts = dict(find().facts)
    assert (
        facts["Files"].startswith("smallest 30 x 20 pixels (") and "median 30 x 40, largest 30 x 60" in facts["Files"]
    )
    assert facts["Files"].endswith("100 % are enlarged, which adds no detail")
    assert facts["Colours"].endswith("grey, the others in colour")
    assert facts["The model reads"] == f"{SIZE} x {SIZE} pixels: 16 squares of {SIZE // 4} x {SIZE // 4}"
    assert facts["image.augment"] == "nothing changes"
    examples = find().examples
    assert len(examples) == 3 and {label for _, label in examples[:2]} == {"6", "9"}
    assert all(name.startswith(f"{label}/") for name, label in examples)
    assert dict(find("image.prepare.colour=grey").facts)["Colours"] == "all grey, as the model reads them"


def test_changes_that_exchange_labels_are_warned_of(find: Find, recipe: Path) -> None:
    assert find().notes == []
    (note,) = find("image.augment.vertical_flip=0.5").notes
    assert "`6` may look like `9`" in note and "Write image.augment.vertical_flip=0" in note
    views = ["recipe=crossval", "data.held_out=0.05", "folds.k=3", "tta.views=[eight]"]
    assert "tta.views: eight" in " ".join(_checked(recipe, *views).split())


def test_copies_of_training_pictures_are_told(recipe: Path, tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / "held" / "69"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(90, 90, seed=50 + number)).save(path)
    assert "copies of training rows" not in _checked(recipe, f"data.held_out={tmp_path}/held")
    copy = Image.open(recipe.parent / "signs" / "9" / "5.png").convert("RGB").resize((54, 108))
    copy.save(tmp_path / "held" / "9" / "copy.png")
    told = " ".join(_checked(recipe, f"data.held_out={tmp_path}/held").split())
    assert "1 of 5 held-out rows are copies of training rows (1 saved again)" in told
    assert "9/copy.pngof" in told.replace(" ", ""), "the terminal cuts a long path"


@pytest.mark.parametrize("key", ["layer_drop.rate", "regularise.stochastic_depth"])
def test_blocks_that_change_the_resolution_are_counted_where_steps_leave_out_blocks(
    key: str, recipe: Path, tmp_path: Path
) -> None:
    words = [f"{key}=0.5", "adapter={method: full}"]
    name = key.removesuffix(".rate")
    found = check.check(load(recipe, [f"model.id={save_vision(tmp_path / 'resnet', 'ResNet')}", *words]))
    assert isinstance(found, ClassInspection)
    assert any(note.startswith(f"{name}: 1 of 3 blocks change the resolution") for note in found.notes)
    found = check.check(load(recipe, words))
    assert isinstance(found, ClassInspection)
    (note,) = [note for note in found.notes if note.startswith(name)]
    assert "chance 0.5" in note


def test_blocks_that_nothing_can_be_left_out_of_are_refused_before_weights_are_read(
    recipe: Path, tmp_path: Path
) -> None:
    words = [f"model.id={save_vision(tmp_path / 'swin', 'Swin')}", "token_drop={keep: 0.5}", "adapter={method: full}"]
    with pytest.raises(BackboneError, match="so that token_drop cannot"):
        check.check(load(recipe, words))
    narrow = save_vision(tmp_path / "narrow", "ResNet", hidden_sizes=[32, 48], depths=[1, 1])
    for key in ("layer_drop.rate", "regularise.stochastic_depth"):
        with pytest.raises(BackboneError, match=f"{key.removesuffix('.rate')} could leave none out"):
            check.check(load(recipe, [f"model.id={narrow}", f"{key}=0.5", "adapter={method: full}"]))


def test_labels_that_differ_only_by_case_are_told(recipe: Path, tmp_path: Path) -> None:
    pictures = sorted((recipe.parent / "signs").rglob("*.png"))
    lines = [f"{path},{'Six' if number % 2 else 'six'}" for number, path in enumerate(pictures)]
    (tmp_path / "signs.csv").write_text("\n".join(["image,label", *lines]))
    inspection = check.check(load(recipe, [f"data.train={tmp_path}/signs.csv"]))
    assert isinstance(inspection, ClassInspection)
    assert "Labels `Six` and `six` differ only by case or spaces" in inspection.notes[0]


def test_a_sheet_shows_what_the_model_reads(find: Find) -> None:
    found = find("image.augment.rotation=90", "image.prepare.median=3", "image.augment.mixup=1")
    row = 2
    states = list(found._states(row))
    assert [name.split(",")[0] for name, _ in states[:3]] == ["as it comes", "median", "resize"]
    stored = found.rows.inputs
    assert isinstance(stored, PictureRows) and np.array_equal(states[2][1], stored.picture(row))
    assert len(states) == 3 + picture_checks.EPOCHS
    numbers = [name.split(":")[0] for name, _ in states[3:]]
    assert numbers == ["epoch 1", "epoch 3", "epoch 4", "epoch 6"]
    for (_, picture), epoch in zip(states[3:], (0, 2, 3, 5), strict=True):
        pixels_3HW = stored.batch(np.asarray([row]), epoch=epoch).inputs["pixel_values"][0].numpy()
        np.testing.assert_allclose(pixels_3HW, found.reader.format.normalised(picture[None])[0], atol=1e-6)
    assert found.sheet().width > find().sheet().width


def test_a_sheet_shows_the_views_of_test_time(find: Find) -> None:
    found = find("recipe=crossval", "data.held_out=0.05", "folds.k=3", "tta.views=[flip]")
    (*_, (_, stored), (name, seen)) = found._states(0)
    assert name == "view: flip"
    np.testing.assert_array_equal(seen, stored[:, ::-1])


def test_a_sheet_shows_all_classes_first() -> None:
    labels = ["a"] * 20 + ["b"] * 3 + ["c"]
    assert picture_checks._of_all_classes(labels, most=16) == [0, 20, 23, 1, 21, 2, 22, 3]
    assert picture_checks._of_all_classes(labels, most=3) == [0, 20, 23]


@pytest.mark.parametrize(("classes", "drawn"), [(3, 8), (10, 10), (16, 16), (30, 16)])
def test_a_sheet_shows_each_class_or_says_how_many_it_does_not(classes: int, drawn: int) -> None:
    names = tuple(f"c{number}" for number in range(classes))
    chosen = picture_checks._of_all_classes([names[row % classes] for row in range(90)], most=16)
    shown = [names[row % classes] for row in chosen]
    assert len(chosen) == drawn and len(set(shown)) == min(classes, 16)
    note = picture_checks._not_shown(names, [*shown])
    assert note.startswith("14 of 30 classes are not shown: c16, c17") if classes == 30 else note == ""
    assert picture_checks._not_shown(("a", "b", "c"), [("a", "b"), ()]).startswith("1 of 3")


def _checked(recipe: Path, *words: str) -> str:
    return CliRunner().invoke(app, ["check", str(recipe), *words], catch_exceptions=False).output


@pytest.mark.parametrize("name", ["views.png", "views.jpg"])
def test_check_draws_pictures_and_the_course_of_the_run(name: str, recipe: Path, tmp_path: Path, drawn: None) -> None:
    told = _checked(recipe, "image.augment.preset=light", "--plot", str(tmp_path / name))
    assert told.endswith(f"Plot: {tmp_path / name}\n") and "image.augment" in told
    with Image.open(tmp_path / name) as image:
        assert image.width > 1000 and image.height > image.width


@pytest.mark.parametrize("name", ["views.svg", "views", "views.gif"])
def test_another_kind_of_file_is_refused_first(name: str, recipe: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["check", str(recipe), "--plot", str(tmp_path / name)])
    assert isinstance(told.exception, ConfigError) and "a .png or .jpg or .jpeg file" in str(told.exception)
    assert not list(tmp_path.iterdir())
