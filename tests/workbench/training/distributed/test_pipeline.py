"""The same curve where the blocks of a model are dealt to processes, in one pipeline or in several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, require_same, save_model, weights, write_recipe

pytestmark = pytest.mark.slow

STEPS = ["train.steps=3", "save.every=2"]
TWO: dict[str, list[str]] = {
    "lora": [f"adapter={METHODS['lora']}", "adapter.dropout=0.2", "train.checkpointing=true"],
    "full": [f"adapter={METHODS['full']}", "evaluate.every=2"],
    "tied": [f"adapter={METHODS['full']}", "train.max_grad_norm=0.1"],
    "packed": [f"adapter={METHODS['lora']}", "model.weights=nf4", "adapter.dropout=0.2"],
}
"""What trains in two stages: adapters, recomputed; all weights; embeddings that both ends hold; adapters over nf4."""
SCHEDULES = ("interleaved", "zero_bubble")
MORE = {"lora": ["train.checkpointing=false"], "tied": TWO["tied"]}
"""What trains in two stretches of each process."""
FOUR = {
    "in four stages": ("lora", "{pipeline: 4}"),
    "in two pipelines": ("tied", "{pipeline: 2}"),
    "in two pipelines of a V": ("full", "{pipeline: 2, schedule: zero_bubble}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A recipe over a model of five blocks."""
    folder = tmp_path_factory.mktemp("pipeline")
    for name, tied in (("model", False), ("tied model", True)):
        save_model(folder / name, stories, "llama", num_hidden_layers=5, tie_word_embeddings=tied)
    write_recipe(folder, folder / "model")
    return folder


def words(folder: Path, name: str) -> list[str]:
    model = folder / ("tied model" if name == "tied" else "model")
    return [*STEPS, "batch.tokens_per_device=100", f"model.id={model}", *TWO[name]]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Runs of two processes, and those of one."""
    for name in TWO:
        workbench.run(str(folder / "recipe.yaml"), words(folder, name), out=folder / f"{name} alone", quiet=True)
    staged = "distributed.pipeline=2"
    resumed = [cell["name"] for cell in cells(request, "test_a_pipeline_goes_on_bit_for_bit")]
    asked = {"full", *resumed, *(cell["name"] for cell in cells(request, "test_two_stages_change_nothing"))}
    jobs: list[tuple[str, list[str], str | None]] = [(name, [*words(folder, name), staged], None) for name in asked]
    jobs += [(f"{name} resumed", [*words(folder, name), staged], name) for name in resumed]
    again = {cell["schedule"] for cell in cells(request, "test_other_schedules_go_on_bit_for_bit")}
    other = {(cell["name"], cell["schedule"]) for cell in cells(request, "test_other_schedules_change_nothing")}
    for name, schedule in sorted(other | {("tied", schedule) for schedule in again}):
        staged = f"distributed={{pipeline: 2, schedule: {schedule}}}"
        jobs.append((f"{name} {schedule}", [*words(folder, name), *MORE[name], staged], None))
        if name == "tied" and schedule in again:
            jobs.append((f"tied {schedule} resumed", [*words(folder, "tied"), staged], f"tied {schedule}"))
    jobs.append(("from one process", [*words(folder, "full"), staged], "full alone"))
    layouts.in_processes(folder, jobs)
    return folder


@pytest.mark.nightly(but=["lora", "tied"])
@pytest.mark.parametrize("name", TWO)
def test_two_stages_change_nothing(pair: Path, name: str) -> None:
    require_same(pair / name, pair / f"{name} alone")


@pytest.mark.nightly(but=["tied-zero_bubble", "lora-interleaved"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MORE)
def test_other_schedules_change_nothing(pair: Path, name: str, schedule: str) -> None:
    require_same(pair / f"{name} {schedule}", pair / f"{name} alone")


@pytest.mark.nightly(but=["zero_bubble"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_go_on_bit_for_bit(pair: Path, schedule: str) -> None:
    assert torch.equal(weights(pair / f"tied {schedule} resumed"), weights(pair / f"tied {schedule}"))


@pytest.mark.nightly(but=["tied"])
@pytest.mark.parametrize("name", ["lora", "tied"])
def test_a_pipeline_goes_on_bit_for_bit(pair: Path, name: str) -> None:
    assert torch.equal(weights(pair / f"{name} resumed"), weights(pair / name))


def test_a_pipeline_goes_on_with_what_one_process_began(pair: Path) -> None:
    require_same(pair / "from one process", pair / "full alone")


def test_one_process_goes_on_with_what_a_pipeline_began(pair: Path) -> None:
    layouts.halfway(pair / "full", pair / "full from two")
    workbench.run(str(pair / "recipe.yaml"), words(pair, "full"), out=pair / "full from two", resume=True, quiet=True)
    require_same(pair / "full from two", pair / "full alone")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, pair: Path) -> Path:
    """Runs of four processes."""
    asked = [(cell["way"], *FOUR[cell["way"]]) for cell in cells(request, "test_four_processes")]
    jobs = [(way, [*words(pair, name), f"distributed={layout}"], None) for way, name, layout in asked]
    layouts.in_processes(pair, jobs, processes=4)
    return pair


@pytest.mark.nightly(but=["in two pipelines"])
@pytest.mark.parametrize("way", FOUR)
def test_four_processes(four: Path, way: str) -> None:
    require_same(four / way, four / f"{FOUR[way][0]} alone")
