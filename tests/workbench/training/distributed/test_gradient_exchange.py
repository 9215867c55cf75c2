"""Two processes whose gradients travel in fewer bits: exact in the warm-up, near after it, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import workbench
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, curve, weights, write_recipe
from workbench.config import RunConfig
from workbench.runs.ranks import Ranks
from workbench.training.distributed.gradient_exchange import GradientExchange
from workbench.training.master_weights import MasterWeights

WARM_UP = 3
"""Of 6 steps; checkpoints are of steps 4 and 6."""
STEPS = ["train.learning_rate=3e-4", "train.steps=6", "save.every=4", "batch.tokens_per_device=160"]
POWER = f"distributed={{compression: {{gradients: powersgd, warm_up: {WARM_UP}}}}}"
HALVES = {
    "ddp": "{compression: {gradients: float16}}",
    "fsdp2": "{engine: fsdp2, zero: 3, compression: {gradients: bfloat16}}",
    "deepspeed": "{zero: 2, compression: {gradients: bfloat16}}",
}


def exchange(ranks: Ranks, **compression: object) -> GradientExchange:
    sections = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": {"compression": compression}}
    return GradientExchange(RunConfig.model_validate(sections), MasterWeights(nn.Linear(6, 5), torch.float32), ranks)


def test_only_powersgd_keeps_something() -> None:
    assert exchange(Ranks(0, 2)).hooks == {} and exchange(Ranks(0, 2), gradients="bfloat16").hooks == {}
    found = exchange(Ranks(0, 2), gradients="powersgd")
    saved = {"step": torch.tensor(3)}
    found.load(saved)
    assert found.hooks == {"compression": found} and found.state() == saved


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of two processes with compression and those of one process; a run that one process goes on with."""
    folder = tmp_path_factory.mktemp("compression")
    write_recipe(folder, Path(short_stories))
    words = {method: [f"adapter={METHODS[method]}", *STEPS] for method in METHODS}
    jobs: list[tuple[str, list[str], str | None]] = []
    for method in METHODS:
        workbench.run(str(folder / "recipe.yaml"), words[method], out=folder / f"{method} alone", quiet=True)
        jobs.append((f"{method} powersgd", [*words[method], POWER], None))
    jobs.append(("full resumed", [*words["full"], POWER], "full powersgd"))
    jobs += [(f"half {name}", [*words["lora"], f"distributed={layout}"], None) for name, layout in HALVES.items()]
    layouts.in_processes(folder, jobs)
    layouts.halfway(folder / "full powersgd", folder / "goes on alone")
    workbench.run(str(folder / "recipe.yaml"), words["full"], out=folder / "goes on alone", resume=True, quiet=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_powersgd_is_exact_in_its_warm_up_and_near_after_it(runs: Path, method: str) -> None:
    found, alone = curve(runs / f"{method} powersgd"), curve(runs / f"{method} alone")
    exact = WARM_UP + 1  # the gradients of the first step that is compressed are those of exact weights
    assert found[:exact] == pytest.approx(alone[:exact], rel=1e-5)
    assert found[-1] != alone[-1] and found == pytest.approx(alone, rel=0.02)


@pytest.mark.slow
def test_powersgd_goes_on_bit_for_bit(runs: Path) -> None:
    assert curve(runs / "full resumed") == curve(runs / "full powersgd")
    assert torch.equal(weights(runs / "full resumed"), weights(runs / "full powersgd"))


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_began(runs: Path) -> None:
    assert curve(runs / "goes on alone") == pytest.approx(curve(runs / "full powersgd"), rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_near(runs: Path, name: str) -> None:
    found, alone = curve(runs / f"half {name}"), curve(runs / "lora alone")
    assert found != alone and found == pytest.approx(alone, rel=1e-3)
