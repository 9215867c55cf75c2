"""Mistakes with pictures that stand beside text end in status 2 and a message with place and cure."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.mistakes.cases import RowsCase, assert_rows_refused
from tests.mistakes.picture_folders import encoded, picture
from workbench.data import starter

RECIPE = """
recipe: sft
model: {id: starter/vision-language}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.25}
train: {steps: 1}
evaluate: {every: null, answers: 0}
"""
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
ROW = {"question": "Which colour?", "answer": "red"}


def _uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _animated() -> bytes:
    buffer, frames = io.BytesIO(), [Image.new("RGB", (8, 8), shade) for shade in ("red", "blue")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def _noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _of(data: bytes, kind: str = "png") -> list[dict[str, Any]]:
    return [{**ROW, "image": _uri(data, kind)}]


def _asked(*parts: Any) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "red"}]
    return [{"messages": turns}]


TEXT = {"type": "text", "text": "Which colour?"}
RED = _uri(picture(0))
CASES = {
    "missing file": RowsCase("rows.jsonl, row 1", "none.png does not exist", rows=[{**ROW, "image": "none.png"}]),
    "a folder": RowsCase("row 1", ". is a folder", rows=[{**ROW, "image": "."}]),
    "nothing": RowsCase("row 1", "entry 1 is empty", rows=[{**ROW, "images": [""]}]),
    "an address": RowsCase("row 1", "data.fetch=true", rows=[{**ROW, "image": "http://127.0.0.1:9/a.png"}]),
    "a number": RowsCase("row 1", "must be a path or the bytes", rows=[{**ROW, "image": 7}]),
    "no base64": RowsCase("row 1", "without whole base64", rows=[{**ROW, "image": "data:image/png;base64,?"}]),
    "no bytes": RowsCase("row 1", "the file is empty (0 bytes)", rows=_of(b"")),
    "more marks": RowsCase(
        "row 1", "Write a mark for each picture", rows=[{**ROW, "question": "<image> <image>?", "image": RED}]
    ),
    "fewer marks": RowsCase(
        "row 1", "Write a mark for each picture", rows=[{**ROW, "question": "<image>?", "images": [RED] * 2}]
    ),
    "a mark without pictures": RowsCase("row 1", "Write a mark", rows=[{**ROW, "question": "<image>?", "images": []}]),
    "a part without its picture": RowsCase("row 1", "Write a mark", rows=_asked({"type": "image"}, TEXT)),
    "a part with two": RowsCase(
        "message 1", "Leave all but one out", rows=_asked({"type": "image", "path": "a.png", "url": RED}, TEXT)
    ),
    "a part with nothing": RowsCase("message 1", "has an empty `path`", rows=_asked({"type": "image", "path": ""})),
    "an unknown part": RowsCase(
        "message 1", "a content part must be", rows=_asked({"type": "video", "video": "a.mp4"})
    ),
    "the sign of a picture": RowsCase("message 1", "Take it out", rows=_asked({**TEXT, "text": "\ufffc?"})),
    "an animation": RowsCase("row 1", "Save the one that", rows=_of(_animated(), "gif")),
    "an SVG": RowsCase("row 1", "Export it as PNG", rows=_of(SVG, "svg+xml")),
    "a PDF": RowsCase("row 1", "Export the page as PNG", rows=_of(b"%PDF-1.7 and more of it")),
    "a HEIC": RowsCase("row 1", "Export it as JPEG", rows=_of(b"\0\0\0\x18ftypheic" + bytes(64), "heic")),
    "a web page": RowsCase("row 1", "Download it again", rows=_of(b"<!doctype html><title>404</title>")),
    "text": RowsCase("row 1", "give the picture", rows=_of(b"not found, said the server, and that was all")),
    "a cut file": RowsCase("row 1", "the file was cut off", rows=_of(encoded(_noise(60, 60), "JPEG")[:-900], "jpeg")),
    "a cut header": RowsCase("row 1", "Copy or download it again", rows=_of(picture(0)[:20])),
    "a huge picture": RowsCase(
        "row 1", "raise image.max_pixels", "image.max_pixels=1000", rows=_of(encoded(_noise(40, 40), "PNG"))
    ),
    "a picture that is cut": RowsCase("row 1", "data.max_tokens=", "data.max_tokens=16", rows=_of(picture(0))),
    "a text model": RowsCase(
        "row 1", "data.ignore='[images, image, audios, audio]'", "model.id=starter", rows=_of(picture(0))
    ),
    "rewards of a blind model": RowsCase(
        "LlavaConfig has no classification head",
        "Take one that",
        "recipe=reward 'evaluate={every: null}'",
        rows=[{"question": "Which?", "chosen": "red", "rejected": "blue", "image": RED}],
    ),
    "no folder": RowsCase(
        "image.folder: nowhere", "Write the folder", "image.folder=nowhere", rows=[{**ROW, "image": "a"}]
    ),
    "classes": RowsCase("image.size", "Leave it out", "image.size=64", rows=_of(picture(0))),
    "virtual tokens": RowsCase(
        "adapter.method=p-tuning",
        "Write adapter.method=",
        "'adapter={method: p-tuning}'",
        rows=[{**ROW, "image": _uri(picture(n))} for n in range(8)],
    ),
}


@pytest.mark.nightly(
    but=["missing file", "more marks", "an animation", "a cut file", "a picture that is cut", "a text model"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_rows_refused(case, RECIPE, {}, tmp_path, monkeypatch, capsys, retried=True)


@pytest.mark.parametrize("processor", ["", '{"processor_class": "LlamaTokenizer"}', '{"processor_class": '])
def test_a_processor_that_reads_text_alone_is_told(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without the processor's settings, with those of a tokenizer, and with a file that is cut off."""
    whole = tmp_path / "whole"
    shutil.copytree(starter.FOLDER / "vision-language", whole)
    (whole / "processor_config.json").unlink()
    if processor:
        (whole / "processor_config.json").write_text(processor)
    cure = "Fetch processor_config.json or preprocessor_config.json too"
    case = RowsCase("by which it reads pictures, cannot be loaded", cure, "model.id=whole", rows=_of(picture(0)))
    assert_rows_refused(case, RECIPE, {}, tmp_path, monkeypatch, capsys)
