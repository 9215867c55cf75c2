"""A chat model that reads raw text is told so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.workbench.data.reading import write
from workbench.data import starter

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "columns", "told"),
    [
        ("sft", ("prompt", "completion"), True),
        ("sft", ("question", "answer"), False),
        ("prefer", ("prompt", "chosen", "rejected"), True),
        ("prefer", ("question", "chosen", "rejected"), False),
        ("reward", ("prompt", "chosen", "rejected"), False),  # which writes nothing
    ],
)
def test_raw_text_for_a_chat_model_is_told(tmp_path: Path, recipe: str, columns: tuple[str, ...], told: bool) -> None:
    rows: list[Any] = [{name: f"{name} {number}" for name in columns} for number in range(30)]
    model = tmp_path / "chat"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(starter.__file__).with_name(name), model / name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    words = [f"data.train={write(tmp_path, rows)}", "data.held_out=0.2"]
    for own, expected in (([f"model.id={model}"], told), ([], False)):
        notes = workbench.check(f"{recipe}/quickstart", [*words, *own]).notes
        assert any("raw text" in note for note in notes) is expected
