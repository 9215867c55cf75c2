"""Sample answers while a run trains: to the same prompts, what the model would say, and the training is as without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import workbench
from tests.conftest import trains
from workbench import evaluation
from workbench.errors import Stopped
from workbench.evaluation.answer_samples import AnswerSamples
from workbench.recipes.run import run as run_config
from workbench.recipes.text import sft
from workbench.runs import evaluation_request, run_directory
from workbench.training.callbacks import Silent

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.2}}
batch: {{size: 4}}
train: {{steps: 6, learning_rate: 1.0e-2}}
evaluate: {{every: 2, answers: 9, max_new_tokens: 6, samples: 2}}
save: {{every: 2, keep: 9, ship: best}}
"""
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "schedule-free": (
        "optimizer.name=schedule_free",
        "schedule={name: constant}",
    ),
    "averaged": ("average={method: ema, decay: 0.5}",),
    "frozen prefix": ("freeze={policy: static, layers: 1, cache: memory}", "adapter.dropout=0"),
    "prompt": ("adapter={method: prompt, virtual_tokens: 4}",),
}
CELLS = ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "plain")]


@pytest.fixture
def run(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def _lines(path: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().split("\n")[:-1]]


def _losses(path: Path) -> list[tuple[float, float | None]]:
    return [(line["loss"], line.get("held_out_loss")) for line in _lines(path, "metrics.jsonl")]


def _require_same_adapter(one: Path, other: Path) -> None:
    tensors = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])


@pytest.mark.few("plain", "averaged")
@pytest.mark.parametrize("name", CELLS)
def test_the_training_is_bit_identical_without_them(name: str, run: Callable[..., Path]) -> None:
    with_, without = run(*VARIANTS[name]), run(*VARIANTS[name], "evaluate.samples=0", name="without")
    assert _losses(with_) == _losses(without) and not (without / "samples.jsonl").exists()
    _require_same_adapter(with_, without)
    lines = _lines(with_)
    assert [line["step"] for line in lines] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len({line["row"] for line in lines}) == 2
    for line in lines:  # one prompt and one reference for each row
        assert {"prompt", "reference"} <= line.keys()
        same = [other for other in lines if other["row"] == line["row"]]
        assert {(other["prompt"], other["reference"]) for other in same} == {(line["prompt"], line["reference"])}


def test_they_are_what_the_saved_adapter_says_of_these_rows(run: Callable[..., Path]) -> None:
    path = run("save.ship=last", "evaluate.answers=99")
    config = run_directory.read_config(path)
    scores = sft.TextRun(config, _opened(path), Silent(), *sft.prepare(config, _opened(path)))
    last = {line["row"]: line["answer"] for line in _lines(path) if line["step"] == 6}
    answers = scores.sampled(scores.load())
    assert {each.place: each.answer for each in answers} == last


def test_those_of_step_0_are_what_the_backbone_says_by_itself(run: Callable[..., Path]) -> None:
    """They come after training, in front of all others, once; a prompt that trains has no part in them."""
    path = run("train.steps=2", "adapter={method: prompt, virtual_tokens: 4}")
    config = run_directory.read_config(path)
    text = sft.TextRun(config, _opened(path), Silent(), *sft.prepare(config, _opened(path)))
    start = text.untrained(text.backbone())
    assert start is not None
    wanted = {each.place: each.answer for each in text.sampled(start)}
    lines = _lines(path)
    assert [line["step"] for line in lines] == [0, 0, 2, 2]
    assert {line["row"]: line["answer"] for line in lines[:2]} == wanted
    whole = (path / "samples.jsonl").read_bytes()
    samples = AnswerSamples(_opened(path), text.sampled)
    samples.take_untrained(start)
    assert (path / "samples.jsonl").read_bytes() == whole
    later = b"".join(whole.splitlines(keepends=True)[2:])
    (path / "samples.jsonl").write_bytes(later)
    samples.take_untrained(start)
    assert (path / "samples.jsonl").read_bytes() == whole


def _opened(path: Path) -> run_directory.Run:
    return run_directory.Run(path, None, resumed=True)


def test_rows_are_drawn_by_the_seed_and_more_rows_begin_with_the_fewer(run: Callable[..., Path]) -> None:
    path = run("train.steps=1")
    _, _, data = sft.prepare(run_directory.read_config(path), _opened(path))
    drawn = [evaluation.drawn_prompts(data.held_out, count, seed=0) for count in (0, 2, 5, 99)]
    assert drawn[0] == [] and drawn[1] == drawn[2][:2] and drawn[2] == drawn[3][:5]
    assert sorted(drawn[3]) == list(range(len(data.held_out)))
    assert len({tuple(evaluation.drawn_prompts(data.held_out, 5, seed=seed)) for seed in range(4)}) == 4
    rows = [line["row"] for line in _lines(path) if line["step"] == 0]
    assert rows == [data.held_out.place(row) for row in drawn[1]]


def test_a_resumed_run_has_no_step_twice(run: Callable[..., Path]) -> None:
    straight = run()
    whole = (straight / "samples.jsonl").read_bytes()
    for name in ("checkpoints/step-00000006", "checkpoints/step-00000004", "adapter"):
        shutil.rmtree(straight / name)
    (straight / "samples.jsonl").write_bytes(whole + b'{"step": 8, "row": "\xe2\x80')
    assert (run(resume=True) / "samples.jsonl").read_bytes() == whole


class Asking(Silent):
    """After some steps asks for an evaluation, or for an end."""

    def __init__(self, path: Path, after: set[int], *, stop: int | None = None) -> None:
        self._path, self._after, self._stop, self._now = path, after, stop, 0

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self._now = record["step"]
        if self._now in self._after:
            evaluation_request.ask(self._path, {"recipe": "sft"})

    def stop_requested(self) -> bool:
        return self._stop is not None and self._now >= self._stop


@pytest.mark.few("plain", "frozen prefix")
@pytest.mark.parametrize("name", CELLS)
def test_an_evaluation_that_is_asked_for_changes_nothing_else(name: str, run: Callable[..., Path]) -> None:
    plateau = () if name == "schedule-free" else ("schedule={name: plateau, patience: 1}",)
    more = (*VARIANTS[name], "evaluate.patience=3", *plateau)
    usual = run(*more)
    path = usual.parent / "asked"
    run_config(run_directory.read_config(usual), out=path, resume=False, callback=Asking(path, {2, 3, 4}))
    found, expected = _lines(path, "metrics.jsonl"), _lines(usual, "metrics.jsonl")
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    assert [line["learning_rate"] for line in found] == [line["learning_rate"] for line in expected]
    assert [line["step"] for line in found if "asked" in line] == [3, 5]  # at 4 it was due
    assert all(("held_out_loss" in line) == (line["step"] % 2 == 0 or line["step"] in (3, 5)) for line in found)
    assert {line["step"] for line in _lines(path)} == {0, 2, 3, 4, 5, 6}
    _require_same_adapter(usual, path)
    states = [json.loads((each / "checkpoints/step-00000006/state.json").read_text()) for each in (usual, path)]
    for state in states:
        del state["progress"]["elapsed_s"]
    assert states[0] == states[1]  # neither the best step nor the patience heard of it
    assert not evaluation_request.is_open(path)


RECIPES: dict[str, tuple[str, ...]] = {
    "prefer/quickstart": ("evaluate.answers=2",),
    "reinforce/quickstart": (
        "evaluate={every: 1, answers: 2, samples: 2}",
        "reinforce={max_new_tokens: 4, answers: 2, beta: 0}",
    ),
    "distill/quickstart": ("evaluate.answers=2", "distill.teacher.id=starter"),
}


@pytest.mark.few("reinforce/quickstart")
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_other_recipes_answer_too(name: str, tmp_path: Path) -> None:
    words = ["train.epochs=null", "train.steps=2", "batch.size=4", "data.limit=24", "evaluate.every=1"]
    words += ["evaluate.max_new_tokens=4", "evaluate.samples=2", "save.every=null", "data.max_tokens=128"]
    words += ["data.on_bad_row=skip", *RECIPES[name]]
    lines = _lines(workbench.run(name, words, out=tmp_path / "run", quiet=True))
    assert [line["step"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert all(line["prompt"] and line["row"] for line in lines)
    assert all(bool(line["reference"]) == (name != "reinforce/quickstart") for line in lines)


def test_a_request_of_a_process_that_ended_is_forgotten(run: Callable[..., Path]) -> None:
    path = run()
    config = run_directory.read_config(path)
    other = path.parent / "other"
    with pytest.raises(Stopped):
        run_config(config, out=other, resume=False, callback=Asking(other, {3}, stop=3))
    assert not evaluation_request.is_open(other), "it was heard with the stop, and the run ends"
    evaluation_request.ask(other, {"recipe": "sft"})  # of nobody that lives
    run_config(config, out=other, resume=True, callback=Silent())
    assert _losses(other) == _losses(path)
