"""The same curve, values and scores where processes compute the same rows together, each a part of every block."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import (
    METHODS,
    curve,
    require_same,
    save_model,
    weights,
    write_recipe,
)
from workbench.evaluation import training_dynamics

pytestmark = pytest.mark.slow

STEPS = ["train.steps=3", "save.every=2", "distributed.bucket_bytes=1000"]
TWO = "distributed.tensor=2"
CELLS = {
    "lora": [
        "batch={size: 5, tokens_per_device: 100}",
        "evaluate={every: 2, answers: 2, max_new_tokens: 6}",
        "save.ship=best",
    ],
    "full": ["batch={size: 5, tokens_per_device: 64, packing: false}", "train.checkpointing=true"],
}
"""By method: packed rows, answers and the best step's values; padded rows in several passes, recomputed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A recipe over a model of two blocks, 4 heads and 2 of keys, whose norms stand inside of attention, too."""
    folder = tmp_path_factory.mktemp("cut")
    save_model(folder / "model", stories, "qwen3", num_key_value_heads=2, head_dim=8)
    write_recipe(folder, folder / "model")
    return folder


def words(method: str) -> list[str]:
    return [*STEPS, f"adapter={METHODS[method]}", "train.max_grad_norm=0.1", *CELLS[method]]


def run(folder: Path, name: str, method: str, *, origin: str | None = None) -> None:
    if origin is not None:
        layouts.halfway(folder / origin, folder / name)
    workbench.run(str(folder / "recipe.yaml"), words(method), out=folder / name, resume=origin is not None, quiet=True)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Runs of two processes, and those of one; some go on with what others began."""
    jobs: list[tuple[str, list[str], str | None]] = []
    resumed = [cell["method"] for cell in cells(request, "test_in_parts_it_goes_on_bit_for_bit")]
    for method in CELLS:
        run(folder, f"{method} alone", method)
        jobs.append((f"{method} in two", [*words(method), TWO], None))
        if method in resumed:
            jobs.append((f"{method} resumed", [*words(method), TWO], f"{method} in two"))
    jobs.append(("full from one", [*words("full"), TWO], "full alone"))
    layouts.in_processes(folder, jobs)
    for method in CELLS:
        if {"method": method, "way": "from two"} in cells(request, "test_blocks_in_parts_change_nothing"):
            run(folder, f"{method} from two", method, origin=f"{method} in two")
    return folder


@pytest.mark.nightly(but=["in two-lora", "in two-full", "from two-full"])
@pytest.mark.parametrize("method", CELLS)
@pytest.mark.parametrize("way", ["in two", "from two"])
def test_blocks_in_parts_change_nothing(pair: Path, method: str, way: str) -> None:
    require_same(pair / f"{method} {way}", pair / f"{method} alone")


def test_a_run_of_one_process_goes_on_in_two(pair: Path) -> None:
    require_same(pair / "full from one", pair / "full alone")


def test_each_row_is_recorded_once(pair: Path) -> None:
    found, wanted = (pd.read_parquet(pair / name / training_dynamics.FILE) for name in ("lora in two", "lora alone"))
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-4)


@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize("method", CELLS)
def test_in_parts_it_goes_on_bit_for_bit(pair: Path, method: str) -> None:
    assert curve(pair / f"{method} resumed") == curve(pair / f"{method} in two")
    assert torch.equal(weights(pair / f"{method} resumed"), weights(pair / f"{method} in two"))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, pair: Path) -> Path:
    """Runs of two groups of two processes, which share the rows of a step in other micro-batches."""
    more = [TWO, "batch.tokens_per_device=160"]
    methods = [cell["method"] for cell in cells(request, "test_groups_share_rows")]
    layouts.in_processes(
        pair, [(f"{method} in four", [*words(method), *more], None) for method in methods], processes=4
    )
    return pair


@pytest.mark.nightly(but=["full"])
@pytest.mark.parametrize("method", CELLS)
def test_groups_share_rows(four: Path, method: str) -> None:
    require_same(four / f"{method} in four", four / f"{method} alone")
