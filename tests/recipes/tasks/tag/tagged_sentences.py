"""Tagged sentences, and recipes that learn them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import workbench
from tests.conftest import MINILM, save_tiny
from workbench.config import RunConfig

NAMES, PLACES = ("Ada", "Bob", "Cleo", "Dan"), ("Rome", "Oslo", "New York", "Lima")


def sentences(count: int, start: int = 0) -> str:
    """Columns of short sentences, in which names and places have their own words."""
    blocks = []
    for n in range(start, start + count):
        name, place = NAMES[n % 4], PLACES[n // 4 % 4].split()
        tags = ["B-LOC", "I-LOC"][: len(place)]
        lines = [f"{name} B-PER", "went O", "to O", *map(" ".join, zip(place, tags, strict=True)), f"{n} O", ". O"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def sections(home: Path, **changed: Any) -> dict[str, Any]:
    """A recipe as plain values."""
    return {
        "recipe": "tag",
        "model": {"id": str(home / "bert"), "weights": "float32"},
        "adapter": {"method": "lora", "rank": 8, "alpha": 16},
        "data": {"train": str(home / "train.conll"), "held_out": str(home / "held_out.conll")},
        "batch": {"size": 8},
        "train": {"epochs": 8, "learning_rate": 1e-2},
        "evaluate": {"every": 0.5},
        **changed,
    }


def make_home(folder: Path) -> Path:
    """Write rows to train on and to hold out, and a tiny BERT."""
    (folder / "train.conll").write_text(sentences(64))
    (folder / "held_out.conll").write_text(sentences(16, start=100))
    save_tiny(folder / "bert", "Bert", "TokenClassification", MINILM)
    return folder


def train(values: dict[str, Any], out: Path) -> Path:
    """Carry out a recipe; returns its run directory."""
    return workbench.run(RunConfig.model_validate(values), out=out, quiet=True)
