"""Pictures in rows of text: every form becomes the same messages, and what does not fit is refused by its place."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from workbench.config import DataConfig
from workbench.data.text import formats, media
from workbench.data.text.formats import Example
from workbench.data.text.media import MARK
from workbench.errors import DataError

ANSWER = {"role": "assistant", "content": "A fox."}


def _bytes() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def _read(folder: Path, row: dict[str, Any], **settings: Any) -> Example:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return next(formats.read(str(path), DataConfig(train=str(path), **settings), skipped=[]))


def _asked(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


TEXT = {"type": "text", "text": "Who is it?"}
URI = "data:image/png;base64," + base64.b64encode(_bytes()).decode()
ROWS: dict[str, dict[str, Any]] = {
    "part with a path": _asked({"type": "image", "path": "a.png"}, TEXT),
    "part named image": _asked({"type": "image", "image": "a.png"}, TEXT),
    "part of OpenAI": _asked({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
    "part of OpenAI's responses": _asked({"type": "input_image", "image_url": "a.png"}, TEXT),
    "marks of LLaMA-Factory": {
        "messages": [{"role": "user", "content": "<image>Who is it?"}, ANSWER],
        "images": ["a.png"],
    },
    "parts of TRL": {**_asked({"type": "image"}, TEXT), "images": ["a.png"]},
    "images of TRL without marks": {
        "messages": [{"role": "user", "content": "Who is it?"}, ANSWER],
        "images": ["a.png"],
    },
    "sharegpt of LLaVA": {
        "conversations": [{"from": "human", "value": "<image>Who is it?"}, {"from": "gpt", "value": "A fox."}],
        "image": "a.png",
    },
    "images of a message": {
        "messages": [{"role": "user", "content": "Who is it?", "images": ["a.png"]}, ANSWER],
    },
    "a question and an answer": {"question": "Who is it?", "answer": "A fox.", "image": "a.png"},
    "a mark in a question": {"question": "<image>Who is it?", "answer": "A fox.", "image": "a.png"},
}


@pytest.mark.parametrize("form", ROWS)
def test_every_form_becomes_the_same_messages(form: str, tmp_path: Path) -> None:
    question, answer = _read(tmp_path, ROWS[form]).messages
    assert question["content"] == f"{MARK}Who is it?"
    (picture,) = media.of_messages([question, answer])
    assert (picture.kind, picture.value, picture.folder) == ("image", "a.png", str(tmp_path))


def test_bytes_and_data_uris_stay_what_they_are(tmp_path: Path) -> None:
    (one, _), (two, _) = (
        _read(tmp_path, row).messages
        for row in (
            _asked({"type": "image_url", "image_url": {"url": URI}}, TEXT),
            {
                "question": "?",
                "answer": "A fox.",
                "image": {"bytes": base64.b64encode(_bytes()).decode(), "path": None},
            },
        )
    )
    assert one[media.KEY][0].value == URI
    assert set(two[media.KEY][0].value) == {"bytes", "path"}


def test_pictures_stand_at_their_marks_in_any_turn(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "First <image>, then <image>."},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "And <image>?"},
            {"role": "assistant", "content": "Three."},
        ],
        "images": ["a.png", "b.png", "c.png"],
    }
    messages = _read(tmp_path, row).messages
    assert [message["content"] for message in messages][::2] == [f"First {MARK}, then {MARK}.", f"And {MARK}?"]
    assert [each.value for each in media.of_messages(messages)] == ["a.png", "b.png", "c.png"]
    assert [len(message.get(media.KEY, ())) for message in messages] == [2, 0, 1, 0]


def test_a_word_that_looks_like_a_mark_is_text_in_rows_without_pictures(tmp_path: Path) -> None:
    question = _read(tmp_path, {"question": "What is <image> in XML?", "answer": "An element."}).messages[0]
    assert question["content"] == "What is <image> in XML?" and media.KEY not in question


def test_ignored_pictures_leave_the_text(tmp_path: Path) -> None:
    row = {"question": "Who?", "answer": "A fox.", "images": ["a.png"]}
    assert _read(tmp_path, row, ignore=("images",)).messages[0]["content"] == "Who?"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "more marks than pictures": (
        {"messages": [{"role": "user", "content": "<image><image>?"}, ANSWER], "images": ["a.png"]},
        "2 marks <image> .* and 1 picture in `images`",
    ),
    "fewer marks than pictures": (
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": ["a.png", "b.png"]},
        "1 mark <image> .* and 2 pictures",
    ),
    "marks beside an empty column": (
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": []},
        "1 mark <image> .* and 0 pictures",
    ),
    "a part without a picture": (_asked({"type": "image"}, TEXT), "parts of type image"),
    "a part with two": (_asked({"type": "image", "path": "a.png", "url": "b.png"}, TEXT), "path and url"),
    "a part with an empty path": (_asked({"type": "image", "path": ""}, TEXT), "empty `path`"),
    "an entry that is null": ({"question": "?", "answer": "!", "images": ["a.png", None]}, "entry 2 is empty"),
    "a video": ({**_asked(TEXT), "videos": ["a.mp4"]}, "`videos` is not read"),
    "a part that is a video": (_asked({"type": "video", "path": "a.mp4"}, TEXT), "content part must be"),
    "raw text": ({"prompt": "Who?", "completion": "A fox.", "images": ["a.png"]}, "raw text has no place for `images`"),
    "plain text": ({"text": "A fox.", "image": "a.png"}, "`image` is not read"),
    "the sign of a picture in a text": (
        _asked({"type": "text", "text": f"Is {MARK} it?"}, {"type": "image", "path": "a.png"}),
        r"U\+FFFC",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused_by_its_place(mistake: str, tmp_path: Path) -> None:
    row, reason = MISTAKES[mistake]
    with pytest.raises(DataError, match=reason) as refused:
        _read(tmp_path, row)
    assert "rows.jsonl, row 1" in str(refused.value)
