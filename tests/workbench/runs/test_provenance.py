"""A run goes on with the files that it began with, or names the one that changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import workbench
from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.errors import ResumeError
from workbench.runs import provenance


def _first_row_less(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def _one_weight_else(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def _longer(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


CHANGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "rows": (
        "rows.jsonl",
        _first_row_less,
        r"rows\.jsonl \(train\): 60 rows then, 59 now; fingerprint .* then, .* now",
    ),
    "held-out rows": ("held_out.jsonl", _longer, r"held_out\.jsonl \(held-out\): other content in as many rows"),
    "backbone": ("model/model.safetensors", _one_weight_else, r"model/model\.safetensors \(backbone\): other content"),
    "tokenizer": ("model/tokenizer.json", _longer, r"model/tokenizer\.json \(backbone\): other content"),
    "chat template": ("chat.jinja", _longer, r"chat\.jinja \(chat template\): other content"),
    "plugin": ("plugin.py", _longer, r"plugin\.py \(your code\): other content"),
    "teacher": ("teacher/adapter/adapter_model.safetensors", _one_weight_else, r"\(teacher\): other content"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, trained: Path, short_stories: str) -> Iterator[tuple[Path, Any]]:
    """A distillation with all its files in one folder."""
    from tests.conftest import CHAT_TEMPLATE, write_questions

    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(short_stories, folder / "model")
    shutil.copytree(trained, folder / "teacher")
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    (folder / "plugin.py").write_text("MINE = 1\n")
    write_questions(folder / "rows.jsonl", [f"It is {n}." for n in range(60)])
    rows = [{"question": f"And before {n}?", "answer": f"{n - 1}"} for n in range(4)]
    write_lines(folder / "held_out.jsonl", rows)
    sections = {
        "recipe": "distill",
        "plugins": [str(folder / "plugin.py")],
        "model": {
            "id": str(folder / "model"),
            "weights": "float32",
            "chat_template": str(folder / "chat.jinja"),
            "new_tokens": ["<|start|>", "<|end|>"],
        },
        "adapter": {"method": "lora", "rank": 2},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": str(folder / "held_out.jsonl")},
        "batch": {"size": 4},
        "train": {"steps": 2},
        "distill": {"teacher": {"id": str(folder / "teacher")}},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": 1},
    }
    config = RunConfig.model_validate(sections)
    workbench.run(config, out=folder / "run", quiet=True)
    yield folder, config


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named_and_the_run_is_left_as_it_was(change: str, begun: tuple[Path, RunConfig]) -> None:
    folder, config = begun
    name, change_it, told = CHANGES[change]
    kept, before = (folder / name).read_bytes(), json.loads((folder / "run/manifest.json").read_text())
    change_it(folder / name)
    try:
        with pytest.raises(ResumeError, match=told) as caught:
            workbench.run(config, out=folder / "run", resume=True, quiet=True)
    finally:
        (folder / name).write_bytes(kept)
    assert "began with other files" in str(caught.value) and "new run with another --out" in str(caught.value)
    after = json.loads((folder / "run/manifest.json").read_text())
    assert {key: after[key] for key in ("status", "data", "inputs")} == {
        key: before[key] for key in ("status", "data", "inputs")
    }


def test_the_same_files_are_gone_on_with(begun: tuple[Path, RunConfig]) -> None:
    folder, config = begun
    workbench.run(config, out=folder / "run", resume=True, quiet=True)


def test_of_a_large_file_its_size_and_a_sample_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "WHOLE", 1 << 20)
    path, size = tmp_path / "weights.safetensors", 5 << 20
    path.write_bytes(bytes(size))
    found = {provenance.digest(path)}
    for place in (0, size // 2, size - 1):
        content = bytearray(size)
        content[place] = 1
        path.write_bytes(content)
        found.add(provenance.digest(path))
    path.write_bytes(bytes(size + 1))
    assert len({*found, provenance.digest(path)}) == 5
