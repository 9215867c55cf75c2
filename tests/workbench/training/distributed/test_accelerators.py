"""Layouts by default on accelerators, for which CPUs with so much memory stand: nobody waits for one that runs out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.matrix import LAYOUTS
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, require_same, write_recipe

pytestmark = pytest.mark.slow

WORDS = [f"adapter={METHODS['lora']}", "train.steps=3", "save.every=null"]
SHARDED = [name for name in LAYOUTS if name != "ddp"]
ROOMY = 10**9


def in_processes(folder: Path, names: list[str], limits: tuple[int, int]) -> dict[str, list[list[int]]]:
    """Train in layouts; gives the most bytes of each pass that a process tried, and of its steps, by layout."""
    jobs: list[Any] = [(name, [*WORDS, f"distributed={LAYOUTS[name]}"], None) for name in names]
    layouts.in_processes(folder, jobs, "accelerator", *map(str, limits))
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in names}


def batch(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "manifest.json").read_text())["batch"])


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of all layouts where everything fits, and of one process, by their names; `held.json`: `in_processes`."""
    folder = tmp_path_factory.mktemp("roomy")
    write_recipe(folder, Path(short_stories))
    workbench.run(str(folder / "recipe.yaml"), WORDS, out=folder / "alone", quiet=True)
    (folder / "held.json").write_text(json.dumps(in_processes(folder, list(LAYOUTS), (ROOMY, ROOMY))))
    return folder


@pytest.fixture(scope="module")
def tight(roomy: Path, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The same where the largest passes do not fit in the second process."""
    folder = tmp_path_factory.mktemp("tight")
    write_recipe(folder, Path(short_stories))
    held = json.loads((roomy / "held.json").read_text())
    limit = int(0.8 * min(max(held[name][1][:-1]) for name in SHARDED))
    (folder / "held.json").write_text(json.dumps([limit, in_processes(folder, list(LAYOUTS), (ROOMY, limit))]))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_batch_is_one_pass_where_it_fits(roomy: Path, layout: str) -> None:
    assert batch(roomy / layout)["tokens_per_device"] == batch(roomy / "alone")["tokens_per_device"]
    require_same(roomy / layout, roomy / "alone")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_take_what_fits_in_the_one_with_least_memory(tight: Path, roomy: Path, layout: str) -> None:
    whole, found = batch(roomy / "alone")["tokens_per_device"], batch(tight / layout)
    assert found["tokens_per_device"] < whole
    limit, held = json.loads((tight / "held.json").read_text())
    assert all(each <= limit for each in held[layout][1])
    require_same(tight / layout, roomy / "alone")
