"""Every task whose blocks can be cut or dealt to devices has the losses of one process in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import MINILM, cells, save_tiny, write_animals, write_questions
from tests.recipes.tasks.tag.test_tag_run import sentences
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import save_model
from workbench.config import task_facts
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

TASKS: dict[str, list[str]] = {
    "sft": ["data.train={}/questions.jsonl"],
    "mlm": [
        "model.id={}/{way} encoder",
        "data.train={}/animals.jsonl",
        "data.format=text",
        "data.columns={text: text}",
    ],
    "prefer": ["data.train={}/pairs.jsonl", "prefer.loss=kto"],
    "reward": ["data.train={}/pairs.jsonl"],
    "classify": ["data.train={}/animals.jsonl"],
    "embed": ["data.train={}/texts.jsonl"],
    "rerank": ["data.train={}/texts.jsonl"],
    "tag": ["data.train={}/words.conll"],
}
"""What each learns from."""
WAYS = {"tensor": "distributed.tensor=2", "pipeline": "distributed.pipeline=2"}
GROUPS = ("prefer", "embed")
"""Tasks in which groups of processes exchange more than gradients: kto's reference point, outputs that are compared."""


def able(way: str) -> list[str]:
    """Tasks that the facts allow."""
    return [name for name in TASKS if getattr(task_facts.TASKS[name], way) is None]


def pair(n: int) -> dict[str, Any]:
    chosen, rejected = f" It is {n + 1}." + " Yes." * (n % 4), " No idea." + " Who knows?" * (n % 5)
    return {"prompt": f"What comes after {n}?", "chosen": chosen, "rejected": rejected}


def text(n: int) -> dict[str, Any]:
    return {"anchor": f"Who saw number {n}?", "positive": f"The {n} was here" + " and there" * (n % 4) + "."}


def write_rows(folder: Path) -> None:
    write_questions(folder / "questions.jsonl", [f"It is {n + 1}." for n in range(40)])
    write_animals(folder / "animals.jsonl", range(40))
    for name, row in (("pairs", pair), ("texts", text)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40)))
    (folder / "words.conll").write_text(sentences(40))


def words_of(folder: Path, name: str, way: str) -> list[str]:
    return [f"recipe={name}", *(each.replace("{}", str(folder)).replace("{way}", way) for each in TASKS[name])]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """Runs of one process and of two that are asked for."""
    folder = tmp_path_factory.mktemp("tasks")
    save_model(folder / "model", stories, "qwen3", num_key_value_heads=2, head_dim=8)
    save_tiny(folder / "tensor encoder", "EuroBert", "MaskedLM", MINILM, mask_token_id=103)
    save_tiny(folder / "pipeline encoder", "Bert", "MaskedLM", MINILM)
    save_tiny(folder / "pooled encoder", "Bert", "PreTraining", MINILM)
    write_rows(folder)
    recipe = {
        "recipe": "sft",
        "model": {"id": str(folder / "model"), "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": "rows.jsonl", "held_out": 0.2},
        "batch": {"size": 5, "tokens_per_device": 140},
        "train": {"steps": 3, "learning_rate": 2e-3, "max_grad_norm": 0.1},
        "evaluate": {"every": 2, "answers": 0},
        "save": {"every": None},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    asked = {(cell["task"], cell["way"]) for cell in cells(request, "test_two_processes_have_the_losses_of_one")}
    asked |= {(cell["task"], "tensor") for cell in cells(request, "test_groups_have_the_losses_of_one_process")}
    jobs: list[tuple[str, list[str], str | None]] = []
    for name, way in sorted(asked):
        engine = way if way in WAYS else "pipeline"
        own = words_of(folder, name, engine)
        # Its head reads the first token of each packed row.
        own += [f"model.id={folder / 'pooled encoder'}"] if way == "pooled" else []
        workbench.run(str(folder / "recipe.yaml"), own, out=folder / f"{name} {way} alone", quiet=True)
        jobs.append((f"{name} {way}", [*own, WAYS[engine]], None))
    layouts.in_processes(folder, jobs)
    return folder


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, runs: Path) -> Path:
    """Runs of two groups of two processes."""
    asked = [cell["task"] for cell in cells(request, "test_groups_have_the_losses_of_one_process")]
    jobs = [(f"{name} in groups", [*words_of(runs, name, "tensor"), WAYS["tensor"]], None) for name in asked]
    layouts.in_processes(runs, jobs, processes=4)
    return runs


def told(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def lines(run: Path, name: str) -> list[float]:
    return [line[name] for line in told(run) if line.get(name) is not None]


def require_same(run: Path, alone: Path) -> None:
    found = lines(run, "loss")
    assert found == pytest.approx(lines(alone, "loss"), rel=1e-5) and found[-1] != found[0]
    for name in {name for line in told(alone) for name in line if name.startswith("held_out")}:
        assert lines(run, name) == pytest.approx(lines(alone, name), rel=1e-5), name
    scores, wanted = (json.loads((each / "scores.json").read_text()) for each in (run, alone))
    for when in ("before", "after"):
        assert scores[when] == {name: pytest.approx(value, abs=1e-4, rel=1e-5) for name, value in wanted[when].items()}


def test_every_task_that_several_devices_train_is_run_or_says_why_not() -> None:
    shipped = [facts for facts in task_facts.TASKS.values() if facts.module.startswith("workbench.")]
    assert {facts.name for facts in shipped if facts.devices and facts.tensor is None} == set(able("tensor"))
    assert {facts.name for facts in shipped if facts.pipeline is None} == set(able("pipeline"))


@pytest.mark.nightly(but=["sft-tensor", "tag-tensor", "prefer-pipeline", "classify-pooled"])
@pytest.mark.parametrize(
    ("task", "way"), [*((task, way) for way in WAYS for task in able(way)), ("classify", "pooled")]
)
def test_two_processes_have_the_losses_of_one(runs: Path, task: str, way: str) -> None:
    require_same(runs / f"{task} {way}", runs / f"{task} {way} alone")


@pytest.mark.nightly(but=["prefer"])
@pytest.mark.parametrize("task", GROUPS)
def test_groups_have_the_losses_of_one_process(four: Path, task: str) -> None:
    require_same(four / f"{task} in groups", four / f"{task} tensor alone")
