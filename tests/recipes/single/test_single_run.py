"""When the backbone is scored: after training, where nothing needs its scores sooner, and with the same outcome."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.conftest import write_questions
from workbench.config import RunConfig
from workbench.recipes.verbs.run import run
from workbench.training.callbacks import Silent


class Notes(Silent):
    """Keeps the first word of all that is said."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, text: str) -> None:
        self.words.append(text.split(maxsplit=1)[0])


def _sft(model: str, folder: Path) -> dict[str, Any]:
    rows = write_questions(folder / "questions.jsonl", [f"It is {n + 1}." for n in range(40)])
    return {
        "recipe": "sft",
        "data": {"train": str(rows), "held_out": 0.4},
        "model": {"id": model, "weights": "float32"},
        "evaluate": {"every": None, "answers": 2, "max_new_tokens": 4},
    }


def _embed(model: str, folder: Path) -> dict[str, Any]:
    rows = [{"anchor": f"Who saw {n}?", "positive": f"Nobody saw {n}."} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "recipe": "embed",
        "data": {"train": str(folder / "pairs.jsonl"), "held_out": 0.4},
        "model": {"id": model, "weights": "float32"},
        "evaluate": {"every": None},
    }


@pytest.mark.parametrize(
    ("of", "method"),
    [(_sft, {"method": "pissa", "rank": 2}), (_sft, {"method": "full"}), (_embed, {"method": "lora", "rank": 2})],
)
def test_scores_are_the_same_whether_the_backbone_is_scored_first_or_last(
    of: Any, method: dict[str, Any], short_stories: str, tmp_path: Path
) -> None:
    """A clock with a limit has to know how long scoring takes, so that it comes first there."""
    values = of(short_stories, tmp_path) | {"adapter": method, "batch": {"size": 8}, "train": {"steps": 2}}
    sections = {"soon": values, "limited": values | {"budget": {"time": "1h"}}}
    order, before = dict[str, bool](), dict[str, str]()
    for name, each in sections.items():
        notes, out = Notes(), tmp_path / name
        run(RunConfig.model_validate(each), out=out, resume=False, callback=notes)
        first = next(word for word in notes.words if word in ("Training:", "Scoring"))
        order[name], before[name] = first == "Training:", (out / "before.json").read_text()
    assert order == {"soon": True, "limited": False}
    assert before["soon"] == before["limited"]
    assert "loss" in json.loads(before["soon"])["scores"]


def _living() -> int:
    return sum(isinstance(each, LlamaForCausalLM) for each in gc.get_objects())


class Living(Silent):
    """Counts the models that live while the backbone is scored."""

    def say(self, text: str) -> None:
        if text.startswith("Scoring the backbone"):
            self.models = _living()


def test_the_model_that_trained_is_gone_while_the_backbone_is_scored(short_stories: str, tmp_path: Path) -> None:
    values = _sft(short_stories, tmp_path) | {"adapter": {"method": "lora", "rank": 2}, "train": {"steps": 1}}
    callback = Living()
    gc.collect()
    before = _living()
    gc.disable()  # it is in reference cycles
    try:
        run(RunConfig.model_validate(values), out=tmp_path / "run", resume=False, callback=callback)
    finally:
        gc.enable()
    assert callback.models - before == 1
