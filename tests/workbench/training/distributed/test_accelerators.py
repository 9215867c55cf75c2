"""Layouts by default on accelerators, for which CPUs with so much memory stand: nobody waits for one that runs out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import MINILM, cells, save_tiny
from tests.matrix import LAYOUTS
from tests.recipes.weather import weather, write
from tests.workbench.training.distributed import layouts, test_bank_layouts, test_task_layouts
from tests.workbench.training.distributed.test_layouts import METHODS, curve, require_same, save_model, write_recipe
from tests.workbench.training.distributed.test_task_layouts import TASKS, words_of, write_rows
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

WORDS = [f"adapter={METHODS['lora']}", "train.steps=3", "save.every=null"]
SHARDED = [name for name in LAYOUTS if name != "ddp"]
TAUGHT = [name for name in TASKS if name != "sft"]
"""Tasks beside the one that meets all layouts."""
FEW = ["ddp", "zero2", "zero3_cpu"]
ROOMY, TIGHT = 10**9, 9_500_000


def in_processes(folder: Path, jobs: dict[str, list[str]], limits: tuple[int, int]) -> dict[str, list[list[int]]]:
    """Train in the layouts that names begin with; gives the most bytes of each pass that a process tried, and of its
    steps, by name."""
    laid: list[Any] = [
        (name, [*words, f"distributed={LAYOUTS[name.split()[0]]}"], None) for name, words in jobs.items()
    ]
    layouts.in_processes(folder, laid, "accelerator", *map(str, limits))
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in jobs}


def batch(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "manifest.json").read_text())["batch"])


def asked(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What the layouts train that this session's tests look at."""
    tests = ("test_the_whole_batch_is_one_pass_where_it_fits", "test_all_take_what_fits_in_the_one_with_least_memory")
    names = {cell["layout"] for test in tests for cell in cells(request, test)}
    return {name: WORDS for name in LAYOUTS if name in names}


@pytest.fixture(scope="module")
def roomy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of layouts where everything fits, and of one process, by their names; `held.json`: `in_processes`."""
    folder = tmp_path_factory.mktemp("roomy")
    write_recipe(folder, Path(short_stories))
    workbench.run(str(folder / "recipe.yaml"), WORDS, out=folder / "alone", quiet=True)
    (folder / "held.json").write_text(json.dumps(in_processes(folder, asked(request), (ROOMY, ROOMY))))
    return folder


@pytest.fixture(scope="module")
def tight(
    request: pytest.FixtureRequest, roomy: Path, tmp_path_factory: pytest.TempPathFactory, short_stories: str
) -> Path:
    """The same where the largest passes do not fit in the second process."""
    folder = tmp_path_factory.mktemp("tight")
    write_recipe(folder, Path(short_stories))
    held = json.loads((roomy / "held.json").read_text())
    limit = int(0.8 * min(max(each[1][:-1]) for name, each in held.items() if name in SHARDED))
    (folder / "held.json").write_text(json.dumps([limit, in_processes(folder, asked(request), (ROOMY, limit))]))
    return folder


@pytest.fixture(scope="module")
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """Runs of tasks in layouts, and of one process, by their names."""
    folder = tmp_path_factory.mktemp("taught")
    save_model(folder / "model", stories, "qwen3", num_key_value_heads=2, head_dim=8)
    save_tiny(folder / "tensor encoder", "EuroBert", "MaskedLM", MINILM, mask_token_id=103)
    write_recipe(folder, folder / "model")
    write_rows(folder)
    pairs = [(cell["layout"], cell["task"]) for cell in cells(request, "test_a_task_needs_no_further_setting")]
    words = {task: [*WORDS, "data.held_out=0.2", *words_of(folder, task, "tensor")] for _, task in pairs}
    for task, own in words.items():
        workbench.run(str(folder / "recipe.yaml"), own, out=folder / f"{task} alone", quiet=True)
    in_processes(folder, {f"{layout} {task}": words[task] for layout, task in pairs}, (ROOMY, ROOMY))
    return folder


@pytest.mark.nightly(but=FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_batch_is_one_pass_where_it_fits(roomy: Path, layout: str) -> None:
    assert batch(roomy / layout)["tokens_per_device"] == batch(roomy / "alone")["tokens_per_device"]
    require_same(roomy / layout, roomy / "alone")


@pytest.mark.nightly(but=FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_take_what_fits_in_the_one_with_least_memory(tight: Path, roomy: Path, layout: str) -> None:
    whole, found = batch(roomy / "alone")["tokens_per_device"], batch(tight / layout)
    assert found["tokens_per_device"] < whole
    limit, held = json.loads((tight / "held.json").read_text())
    assert all(each <= limit for each in held[layout][1])
    require_same(tight / layout, roomy / "alone")


@pytest.mark.nightly(but=["classify-zero3", "rerank-fsdp2_3"])
@pytest.mark.parametrize("layout", ["fsdp2_3", "zero2", "zero3"])
@pytest.mark.parametrize("task", TAUGHT)
def test_a_task_needs_no_further_setting(taught: Path, task: str, layout: str) -> None:
    test_task_layouts.require_same(taught / f"{layout} {task}", taught / f"{task} alone")
    tokens = [batch(taught / name)["tokens_per_device"] for name in (f"{layout} {task}", f"{task} alone")]
    assert tokens[0] == tokens[1], "the whole batch is one pass"


def test_a_bank_over_shares_takes_what_fits_in_the_process_with_least_memory(
    tmp_path: Path, short_stories: str
) -> None:
    """Five folds in one bank whose backbone two processes share: nothing is asked of the user."""
    write(tmp_path / "train.jsonl", weather(45, seed=0))
    write(tmp_path / "test.jsonl", weather(7, seed=1))
    recipe = {
        "recipe": "crossval",
        "folds": {"k": 2},
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl")},
        "batch": {"size": 12},
        "train": {"steps": 3, "learning_rate": 5e-3},
        "evaluate": {"probe": 0},
        "save": {"every": None},
    }
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    workbench.run(str(tmp_path / "recipe.yaml"), out=tmp_path / "alone", quiet=True)
    wanted = test_bank_layouts.curves(tmp_path / "alone")
    roomy = in_processes(tmp_path, {"fsdp2_3 roomy": []}, (ROOMY, ROOMY))["fsdp2_3 roomy"]
    limit = int(0.8 * max(roomy[1]))
    in_processes(tmp_path, {"fsdp2_3 tight": []}, (ROOMY, limit))
    tokens = [
        batch(tmp_path / name / "members" / "round-0")["tokens_per_device"]
        for name in ("fsdp2_3 roomy", "fsdp2_3 tight")
    ]
    assert tokens[1] < tokens[0]
    for name in ("fsdp2_3 roomy", "fsdp2_3 tight"):
        found = test_bank_layouts.curves(tmp_path / name)
        assert found.keys() == wanted.keys() and len(found) == 2
        for member, steps in wanted.items():
            for step, other in zip(steps, found[member], strict=True):
                assert other == pytest.approx(step, rel=1e-5)


def test_shares_are_taken_where_a_device_cannot_hold_all(tmp_path: Path, stories: str) -> None:
    """By default; else each holds all, to the same bits as where that is written."""
    wide = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}
    save_model(tmp_path / "model", stories, "llama", **wide)
    write_recipe(tmp_path, tmp_path / "model")
    words = [f"adapter={METHODS['full']}", "train.steps=3", "save.every=null"]
    workbench.run(str(tmp_path / "recipe.yaml"), words, out=tmp_path / "alone", quiet=True)
    both: list[Any] = [("roomy", words, None), ("written", [*words, "distributed.zero=0"], None)]
    layouts.in_processes(tmp_path, both, "accelerator", str(ROOMY), str(ROOMY))
    limits = str(ROOMY), str(TIGHT)
    layouts.in_processes(tmp_path, [("tight", words, None)], "accelerator", *limits)
    found = {name: json.loads((tmp_path / name / "manifest.json").read_text())["layout"] for name in ("roomy", "tight")}
    assert found["roomy"]["layout"] == "each device holds all"
    assert "zero=" in found["tight"]["layout"] and "to cpu" not in found["tight"]["layout"]
    assert "lacks" in found["tight"]["why"] and len(found["tight"]["tried"]) > 2
    assert all(each <= TIGHT for each in json.loads((tmp_path / "tight.1.json").read_text()))
    assert curve(tmp_path / "roomy") == curve(tmp_path / "written")
    require_same(tmp_path / "tight", tmp_path / "alone")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["ddp", "fsdp2_3"])
def test_a_process_that_never_comes_is_told(tmp_path: Path, short_stories: str, layout: str) -> None:
    write_recipe(tmp_path, Path(short_stories))
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)Process 0 waited 3.0 s for another one.*--resume"):
        layouts.in_processes(tmp_path, [("run", [*WORDS, f"distributed={LAYOUTS[layout]}"], None)], "still")
    assert time.monotonic() - began < 300, "it is not waited for"
