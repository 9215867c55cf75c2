"""The same curve where several processes compute the same rows together, alone or beside others that share the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, require_same, save_model, weights, write_recipe

pytestmark = pytest.mark.slow

STEPS = ["train.steps=3", "save.every=2"]
PARTS = {
    "lora padded": "{sequence: 2}",
    "full packed": "{sequence: 2}",
    "full padded": "{sequence: 2, zero: 3}",
    "lora fsdp2": "{sequence: 2, engine: fsdp2, zero: 3}",
}
"""Layouts whose rows are in parts, by method and by what is tried with it."""
FOUR = {
    "in parts of two groups": ("lora padded", "{sequence: 2}"),
    "in two copies": ("full padded", "{engine: fsdp2, zero: 3, replicas: 2}"),
    "in parts over two copies": ("lora fsdp2", "{sequence: 2, engine: fsdp2, zero: 2, replicas: 2}"),
}
"""Layouts of four processes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A recipe over a model of two blocks, 4 heads and 2 of keys."""
    folder = tmp_path_factory.mktemp("groups")
    save_model(folder / "model", stories, "llama", num_key_value_heads=2)
    write_recipe(folder, folder / "model")
    return folder


def alone(folder: Path, name: str, words: list[str]) -> None:
    workbench.run(str(folder / "recipe.yaml"), words, out=folder / f"{name} alone", quiet=True)


def words(name: str) -> list[str]:
    method, rows = name.split()
    packing = str(rows == "packed").lower()
    return [*STEPS, f"adapter={METHODS[method]}", f"batch={{size: 5, tokens_per_device: 100, packing: {packing}}}"]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Those runs of two processes that are asked for, and those of one."""
    asked = {cell["name"] for cell in cells(request, "test_rows_in_parts_change_nothing")}
    ways = {cell["way"] for cell in cells(request, "test_two_groups_of_two")}
    for name in PARTS:
        if name in asked | {FOUR[way][0] for way in ways}:
            alone(folder, name, words(name))
    jobs: list[tuple[str, list[str], str | None]] = [
        (f"{name} in parts", [*words(name), f"distributed={layout}"], None)
        for name, layout in PARTS.items()
        if name in asked | {"full packed"}
    ]
    jobs.append(("resumed", [*words("full packed"), f"distributed={PARTS['full packed']}"], "full packed in parts"))
    layouts.in_processes(folder, jobs)
    return folder


@pytest.mark.nightly(but=["full packed", "lora fsdp2"])
@pytest.mark.parametrize("name", PARTS)
def test_rows_in_parts_change_nothing(pair: Path, name: str) -> None:
    require_same(pair / f"{name} in parts", pair / f"{name} alone")


def test_packed_rows_are_in_parts_too(pair: Path) -> None:
    manifest = json.loads((pair / "full packed in parts" / "manifest.json").read_text())
    assert manifest["batch"]["packed"]


def test_a_run_in_parts_goes_on_bit_for_bit(pair: Path) -> None:
    found, wanted = (weights(pair / name) for name in ("resumed", "full packed in parts"))
    assert torch.equal(found, wanted)


def test_wall_clock_ends_all_processes_in_the_same_step(folder: Path) -> None:
    """Their clocks disagree; the first one's steps that fit end all of them, with the schedule at its end."""
    words = ["train.steps=null", "budget.time=7", "save.every=null", f"adapter={METHODS['lora']}"]
    layouts.in_processes(folder, [("in time", words, None)], "clocks")
    run = folder / "in time"
    manifest = json.loads((run / "manifest.json").read_text())
    rates = [json.loads(line)["learning_rate"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert manifest["status"] == "done"
    assert len(rates) > 3 and rates[-1] < 0.1 * max(rates)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, pair: Path) -> Path:
    """Those runs of four processes that are asked for, beside those of one."""
    ways = [cell["way"] for cell in cells(request, "test_two_groups_of_two")]
    jobs: list[tuple[str, list[str], str | None]] = []
    for way in ways:
        name, layout = FOUR[way]
        jobs.append((f"{name} {way}", [*words(name), f"distributed={layout}"], None))
    layouts.in_processes(pair, jobs, processes=4)
    return pair


@pytest.mark.nightly(but=["in parts over two copies"])
@pytest.mark.parametrize("way", FOUR)
def test_two_groups_of_two(four: Path, way: str) -> None:
    name, _ = FOUR[way]
    require_same(four / f"{name} {way}", four / f"{name} alone")
