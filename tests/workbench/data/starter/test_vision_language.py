"""The shipped vision-language backbone is small and stock, and it answers by its pictures; its questions are split by
picture."""

from __future__ import annotations

import io
import json
import zipfile

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from workbench.data.starter import FOLDER

OWN = FOLDER / "vision-language"
KINDS = ("colour", "shape", "yes_no")


def rows(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / f"easy_vqa_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_backbone_is_a_small_stock_llava() -> None:
    model, told = AutoModelForImageTextToText.from_pretrained(OWN, output_loading_info=True)
    assert isinstance(model, LlavaForConditionalGeneration)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert sum(path.stat().st_size for path in OWN.iterdir()) <= 16_000_000


def test_nothing_of_the_backbone_is_read_from_code_or_pickles() -> None:
    assert {path.suffix for path in OWN.iterdir()} == {".json", ".jinja", ".safetensors"}


def test_no_picture_stands_on_two_sides_of_the_split() -> None:
    trained = {row["image"] for row in rows("train")}
    held_out = {row["image"] for kind in KINDS for row in rows(kind)}
    with zipfile.ZipFile(FOLDER / "easy_vqa.zip") as archive:
        assert trained | held_out == set(archive.namelist()) and not trained & held_out
        assert {Image.open(io.BytesIO(archive.read(name))).size for name in archive.namelist()} == {(64, 64)}
    assert sum((FOLDER / path).stat().st_size for path in FOLDER.glob("easy_vqa*")) < 1_500_000


def test_the_licence_names_what_ships() -> None:
    text = (FOLDER / "LICENSE.md").read_text(encoding="utf-8")
    for named in (
        "vision-language/",
        "easy_vqa.zip",
        "easy_vqa_train.jsonl",
        *(f"easy_vqa_{kind}.jsonl" for kind in KINDS),
    ):
        assert f"`{named}`" in text


@pytest.mark.slow
def test_stock_parts_answer_by_the_picture() -> None:
    """Squares of eight colours: the answer is more often right than wrong, which it cannot be without looking."""
    processor = AutoProcessor.from_pretrained(OWN)
    model = AutoModelForImageTextToText.from_pretrained(OWN, dtype=torch.float32).eval()
    parts = [{"type": "image"}, {"type": "text", "text": "which color do you see?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    colours = ("red", "green", "blue", "yellow", "black", "gray", "brown", "teal")
    answers = []
    for colour in colours:
        picture = Image.new("RGB", (64, 64), (235, 235, 245))
        picture.paste(Image.new("RGB", (24, 18), colour), (20, 24))
        inputs = processor(images=[picture], text=[prompt], return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(written, skip_special_tokens=True).strip())
    assert sum(map(str.__eq__, answers, colours)) >= 6, answers
