"""Pictures of rows: read once by the backbone's own processor, and refused by their place where they cannot be."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.utils.import_utils import is_torchvision_available

from tests.vision_families import save
from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.sections.basic_sections import HeldOutFold
from workbench.config.sections.image_config import ImageConfig
from workbench.data.packing import join
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.media import Media
from workbench.data.text.row_encoder import encoder_of_run
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import BackboneError, DataError
from workbench.models import backbones, picture_processor
from workbench.models.picture_processor import PictureProcessor


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(id=save("llava", tmp_path_factory.mktemp("llava"), mixed=True), weights="float32")


def _encoder(section: ModelConfig, **settings: Any) -> ChatEncoder:
    fetch = settings.pop("fetch", False)
    known = type(backbones.hub_config(section))
    processor = PictureProcessor(section, known, ImageConfig(**settings), fetch)
    return ChatEncoder(backbones.tokenizer(section), processor=processor)


def _picture(seed: int = 0, *, size: tuple[int, int] = (30, 20)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _read(section: ModelConfig, beside: Path, rows: list[dict[str, Any]], **settings: Any) -> TokenizedSet:
    data = {name: settings.pop(name) for name in ("max_tokens", "on_bad_row", "truncate") if name in settings}
    path = beside / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = _encoder(section, **settings)
    return tokenized.read(str(path), DataConfig(train=str(path), **data), backbones.tokenizer(section), encoder)


def _row(picture: str = "a.png", answer: str = "A fox.") -> dict[str, Any]:
    return {"question": "Who?", "answer": answer, "image": picture}


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is here")
@pytest.mark.parametrize("name", ["Mistral3", "Llama4"])
def test_a_processor_that_needs_torchvision_says_so(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")
    config().save_pretrained(tmp_path)
    backbones.tokenizer(ModelConfig(id="starter")).save_pretrained(tmp_path)
    own = {"processor_class": {"Mistral3": "PixtralProcessor"}.get(name, f"{name}Processor")}
    own["image_processor_type"] = own["processor_class"].replace("Processor", "ImageProcessor")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    with pytest.raises(
        BackboneError, match=r"needs torchvision, which cannot be imported here. Install the torchvision"
    ):
        PictureProcessor(ModelConfig(id=str(tmp_path)), config, ImageConfig()).kept([], "row 1")


class Unasked:
    """A processor that nobody may ask anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked, and no row has a picture")


def test_a_run_over_text_alone_does_not_ask_its_processor(section: ModelConfig) -> None:
    """What a processor says may need files that are not there, which matters where there are pictures."""
    config = RunConfig.model_validate({"recipe": "sft", "model": section, "data": {"train": "starter/gsm8k"}})
    tokenizer, processor = backbones.tokenizer(section), cast("Any", Unasked())
    found = encoder_of_run(config, backbones.hub_config(section), tokenizer, processor=processor)
    assert isinstance(found, ChatEncoder) and found.processor is processor


def test_a_processor_whose_marks_are_not_the_models_is_refused(section: ModelConfig, tmp_path: Path) -> None:
    _picture(0).save(tmp_path / "a.png")
    shutil.copytree(section.id, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_token_index": 7}))
    with pytest.raises(BackboneError, match=r"LlavaProcessor, does not name the tokens that stand for a picture"):
        _read(ModelConfig(id=str(tmp_path)), tmp_path, [_row()])


def test_a_row_is_read_again_once_its_picture_changed_and_not_before(section: ModelConfig, tmp_path: Path) -> None:
    _picture(0).save(tmp_path / "a.png")
    first = _read(section, tmp_path, [_row()])
    again = _read(section, tmp_path, [_row()])
    assert first[0].pictures == again[0].pictures and first[0].digest == again[0].digest
    _picture(1).save(tmp_path / "a.png")
    changed = _read(section, tmp_path, [_row()])
    assert changed[0].pictures != first[0].pictures and changed[0].digest != first[0].digest
    assert changed[0].input_ids.tolist() == first[0].input_ids.tolist()


def test_a_row_that_was_left_out_is_read_once_its_picture_is_there(section: ModelConfig, tmp_path: Path) -> None:
    rows = [_row(), _row("later.png"), _row("elsewhere")]
    _picture(0).save(tmp_path / "a.png")
    assert len(_read(section, tmp_path, rows, on_bad_row="skip")) == 1
    _picture(1).save(tmp_path / "later.png")
    assert len(_read(section, tmp_path, rows, on_bad_row="skip")) == 2
    (tmp_path / "b").mkdir()
    _picture(2).save(tmp_path / "b" / "elsewhere.png")
    assert len(_read(section, tmp_path, rows, on_bad_row="skip", folder="b")) == 3
    blind = ChatEncoder(backbones.tokenizer(section))
    config = DataConfig(train=str(tmp_path / "rows.jsonl"), on_bad_row="skip")
    with pytest.raises(DataError, match="no usable row"):
        tokenized.read(config.train, config, backbones.tokenizer(section), blind)
    assert len(_read(section, tmp_path, rows, on_bad_row="skip")) == 2, "what a blind model left out is not taken"


def test_rows_that_show_the_same_picture_are_on_one_side_of_a_split(section: ModelConfig, tmp_path: Path) -> None:
    for number in range(6):
        _picture(number).save(tmp_path / f"{number}.png")
    lines = [_row(f"{number % 6}.png", f"The answer {number}.") for number in range(24)]
    rows = _read(section, tmp_path, lines)
    train, held_out = tokenized.hold_out(rows, share=0.3, seed=0)
    assert set(held_out.pictures) and not set(train.pictures) & set(held_out.pictures)
    seen = list[set[str]]()
    for number in range(3):
        config = DataConfig(train=str(tmp_path / "rows.jsonl"), fold=HeldOutFold(of=3, number=number, near=0.7))
        split = tokenized.load(config, backbones.tokenizer(section), _encoder(section), seed=0)
        assert not set(split.train.pictures) & set(split.held_out.pictures)
        seen.append(set(split.held_out.pictures))
    assert sorted(map(len, seen)) == [2, 2, 2] and len(set.union(*seen)) == 6


@pytest.mark.parametrize("first", [0, 1])  # a row of text alone comes first or last
def test_batches_of_several_owners_join_to_what_one_collation_gives(
    section: ModelConfig, tmp_path: Path, first: int
) -> None:
    _picture().save(tmp_path / "a.png")
    lines = [
        _row(),
        {"question": "Who wrote this?", "answer": "Nobody."},
        {**_row(answer="Owls."), "image": ["a.png"] * 2},
    ]
    rows = _read(section, tmp_path, lines)
    order = np.roll(np.arange(3), -first)
    together = join([rows.batch(order[number : number + 1]) for number in range(3)])
    once = rows.batch(order)
    assert together.inputs.keys() == once.inputs.keys()
    assert all(together.inputs[name].equal(once.inputs[name]) for name in once.inputs)
    assert together.positions_N.equal(once.positions_N) and together.labels_N.equal(once.labels_N)


def test_a_picture_that_is_no_longer_kept_is_made_again(section: ModelConfig, tmp_path: Path) -> None:
    _picture().save(tmp_path / "a.png")
    rows = _read(section, tmp_path, [_row()])
    wanted = rows.batch(np.arange(1)).inputs["pixel_values"]
    assert isinstance(rows.processor, PictureProcessor)
    (rows.processor.folder / rows[0].pictures).unlink()
    found = _read(section, tmp_path, [_row()]).batch(np.arange(1)).inputs["pixel_values"]
    assert found.equal(wanted)


def test_what_is_kept_are_the_processors_own_numbers(section: ModelConfig, tmp_path: Path) -> None:
    _picture(size=(61, 33)).save(tmp_path / "a.png")
    rows = _read(section, tmp_path, [_row()])
    assert isinstance(rows.processor, PictureProcessor)
    stock = rows.processor.processor.image_processor([_picture(size=(61, 33))], return_tensors="pt")
    assert rows.batch(np.arange(1)).inputs["pixel_values"].equal(stock["pixel_values"])


def test_pictures_come_from_a_folder_or_an_archive(section: ModelConfig, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    _picture().save(buffer, "PNG")
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        archive.writestr("a.png", buffer.getvalue())
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.png").write_bytes(buffer.getvalue())
    inputs = [
        _read(section, tmp_path, [_row()], folder=folder).batch(np.arange(1)).inputs["pixel_values"]
        for folder in ("pictures.zip", "inside")
    ]
    assert inputs[0].equal(inputs[1])


def test_rows_with_pictures_of_other_rows_differ_in_these_alone(section: ModelConfig, tmp_path: Path) -> None:
    for number in range(3):
        _picture(number).save(tmp_path / f"{number}.png")
    rows = _read(section, tmp_path, [*[_row(f"{number}.png") for number in range(3)], {"question": "Q", "answer": "A"}])
    others = rows.with_other_pictures()
    assert others is not None and len(others) == 3
    for number in range(3):
        own = next(rows[each] for each in range(3) if rows.place(each) == others.place(number))
        assert others[number].input_ids.tolist() == own.input_ids.tolist()
        assert others[number].pictures != own.pictures and others[number].digest != own.digest
    assert _read(section, tmp_path, [{"question": "Q", "answer": "A"}]).with_other_pictures() is None


def _written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return name


def _animation(folder: Path) -> str:
    _picture(0).save(folder / "a.gif", save_all=True, append_images=[_picture(1)])
    return "a.gif"


def _large(folder: Path) -> str:
    _picture(size=(100, 100)).save(folder / "large.png")
    return "large.png"


def _cut(folder: Path) -> str:
    buffer = io.BytesIO()
    _picture(size=(90, 90)).save(buffer, "PNG")
    return _written(folder, "cut.png", buffer.getvalue()[:200])


MISTAKES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "missing file": ("gone.png", "gone.png does not exist", {}),
    "a folder": (".", "is a folder", {}),
    "an empty file": (lambda folder: _written(folder, "e.png", b""), "is empty", {}),
    "a text": (lambda folder: _written(folder, "t.png", b"a text"), "text, not a picture", {}),
    "a web page": (lambda folder: _written(folder, "w.png", b"<html></html>"), "a web page", {}),
    "a PDF": (lambda folder: _written(folder, "p.png", b"%PDF-1.7"), "a PDF document", {}),
    "a drawing": (lambda folder: _written(folder, "s.png", b"<svg></svg>"), "an SVG drawing", {}),
    "a pointer of Git LFS": (lambda folder: _written(folder, "l.png", b"version https://git-lfs"), "Git LFS", {}),
    "a file that was cut off": (_cut, "cut off", {}),
    "an animation": (_animation, "2 pictures", {}),
    "too many pixels": (_large, "more than image.max_pixels=100", {"max_pixels": 100}),
    "an address": ("https://example.org/a.png", "data.fetch=true", {}),
    "no base64": ("data:image/png;base64,%%%", "without whole base64", {}),
    "a number": (3, "must be a path", {}),
    "no such folder": ("a.png", "image.folder: gone", {"folder": "gone"}),
    "a picture that its tokens cut": (_large, "would cut a picture", {"max_tokens": 8}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_picture_that_cannot_be_read_is_told_by_its_place(mistake: str, section: ModelConfig, tmp_path: Path) -> None:
    value, reason, settings = MISTAKES[mistake]
    rows = [_row(value(tmp_path) if callable(value) else value)]
    with pytest.raises(DataError, match=reason) as refused:
        _read(section, tmp_path, rows, **settings)
    assert "rows.jsonl, row 1" in str(refused.value)
    kept = _read(section, tmp_path, [{"question": "Q", "answer": "A"}, *rows], on_bad_row="skip", **settings)
    assert len(kept) == 1 and "row 2" in kept.skipped[0]


def test_a_word_that_a_template_writes_for_pictures_is_refused_in_texts(section: ModelConfig, tmp_path: Path) -> None:
    _picture().save(tmp_path / "a.png")
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "<image>"}]}
        ]
    }
    row["messages"].append({"role": "assistant", "content": "A fox."})
    with pytest.raises(DataError, match=r"row 1: has 1 picture, and .* writes 2 times <image>"):
        _read(section, tmp_path, [row])


def test_a_model_of_text_and_other_recipes_refuse_pictures(section: ModelConfig, tmp_path: Path) -> None:
    text = RunConfig(recipe="sft", model=ModelConfig(id="starter"), data=DataConfig(train="rows.jsonl"))
    why = picture_processor.of(text, backbones.hub_config(text.model))
    assert isinstance(why, str) and "reads text alone" in why
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "a.png"}]},
            {"role": "assistant", "content": "A"},
        ]
    }
    sees, task = ModelConfig(id=save("gemma3", tmp_path / "gemma3")), RunConfig(recipe="prefer", data=text.data)
    found = picture_processor.of(task.model_copy(update={"model": sees}), backbones.hub_config(sees))
    assert isinstance(found, PictureProcessor) and found.types == ("token_type_ids",)
    for processor in (why, None):
        given = {} if processor is None else {"processor": processor}
        encoder = ChatEncoder(backbones.tokenizer(text.model), **given)
        with pytest.raises(DataError, match="row 1: has a picture, and"):
            tokenized.encode([row], backbones.tokenizer(text.model), encoder)


def test_a_backbone_without_a_processor_is_told(section: ModelConfig, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((Path(section.id) / name).read_bytes())
    processor = PictureProcessor(ModelConfig(id=str(bare)), type(backbones.hub_config(section)), ImageConfig())
    with pytest.raises(BackboneError, match="processor"):
        processor.kept([Media("image", _picture())], "row 1")
