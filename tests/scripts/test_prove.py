"""The day on a GPU, rehearsed on a CPU: tests of accelerators and the benchmark with tiny shapes, from one command."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import forked

ROOT = Path(__file__).parents[2]
THERE = [
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "einops",
    "jinja2",
    "matplotlib",
    "ninja",
    "opencv-python-headless",
    "pandas",
]
THERE += [
    "pillow",
    "protobuf",
    "psutil",
    "pyarrow",
    "rich",
    "scikit-learn",
    "tensorboard",
    "threadpoolctl",
    "typer",
    "xxhash",
]
"""What a machine for training has (scripts/gpu/README.md)."""
SIDES = ["workbench", "TRL tuned", "raw loop", "TRL packed", "Unsloth", "workbench packed, expandable segments"]
UNSLOTH = """
import json, os, sys
first = not {"transformers", "peft", "trl"} & set(sys.modules)
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

def note(**given):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(given) + "\\n")

class FastLanguageModel:
    def from_pretrained(folder, *, dtype, **given):
        note(first=first, dtype=str(dtype), **given)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)

    def get_peft_model(model, *, use_gradient_checkpointing, **given):
        note(use_gradient_checkpointing=use_gradient_checkpointing, **given)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
"""
"""A module that takes what scripts/bench/gpu_sides.py gives to Unsloth, and notes it."""


@pytest.fixture
def rehearsed(tmp_path: Path) -> Callable[..., Path]:
    """Runs prove.sh --rehearse with further words; gives the folder of its results."""

    def run(*words: str) -> Path:
        environment = {**os.environ, "PYTHON": forked.python(), "OUT": str(tmp_path), "WHEELS": "none"}
        environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
        # A fork has imported what pytest's own plugins bring along.
        environment["PYTEST_ADDOPTS"] = "-W ignore::pytest.PytestAssertRewriteWarning"
        command = ["bash", str(ROOT / "scripts" / "gpu" / "prove.sh"), "--rehearse", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return tmp_path

    return run


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("methods", "branches", "memory"), marks=pytest.mark.slow, id="one process"),
        pytest.param(("runs",), marks=pytest.mark.nightly, id="runs"),
        pytest.param(("layouts",), marks=pytest.mark.nightly, id="several"),
    ],
)
def test_tests_are_rehearsed(names: tuple[str, ...], rehearsed: Callable[..., Path]) -> None:
    out = rehearsed("tests", *(f"test_{name}.py" for name in names))
    results = [json.loads(line) for line in (out / "tests.jsonl").read_text().splitlines()]
    assert any(each["outcome"] == "passed" for each in results)
    assert all(each["reason"] for each in results if each["outcome"] == "skipped")


@pytest.mark.nightly
def test_the_benchmark_is_rehearsed(rehearsed: Callable[..., Path]) -> None:
    out = rehearsed("bench", "8b-nf4-ragged")
    _, *found = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    assert [each["side"] for each in found] == SIDES
    ran = [each for each in found if each["side"] != "Unsloth" or importlib.util.find_spec("unsloth")]
    assert all(each["tokens_per_second"] > 0 and each["peak_bytes"] > 0 for each in ran)
    assert (out / "gpu.md").read_text().count("| 8b-nf4-ragged |") == len(SIDES)


def _sides(out: Path, *words: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Results of some sides of the benchmark with tiny shapes, by name."""
    python = sys.executable if environment else forked.python()  # a fork has read its environment before
    command = [python, str(ROOT / "scripts" / "bench" / "gpu.py"), *words, "--rehearse", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    _, *found = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    return {each["side"]: each for each in found}


@pytest.mark.slow
def test_a_packed_rival_and_another_allocator(tmp_path: Path) -> None:
    ours, packed = "workbench packed, expandable segments", "TRL packed"
    found = _sides(tmp_path, "1b-bf16-ragged", "--sides", packed, ours)
    assert found[packed]["packed"].startswith("yes, "), "and by which attention"
    # Two packed rows of at most 16 tokens, where the first four rows as they are have 40.
    assert all(16 < count <= 32 for count in found[packed]["tokens"])
    assert found[ours]["expandable_segments"] == found[ours]["packed"] == "yes"
    assert found[packed]["expandable_segments"] == "no"
    assert found[ours]["tokens_per_second"] > 0
    table = (tmp_path / "gpu.md").read_text().splitlines()
    assert f"| 1b-bf16-ragged | {ours} | no | yes | as fits | as fits | yes |" in table[-1]
    assert len({line.count("|") for line in table[2:]}) == 1


@pytest.mark.slow
def test_unsloth_gets_the_same_model_and_adapter(tmp_path: Path) -> None:
    (tmp_path / "unsloth.py").write_text(UNSLOTH)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    notes = tmp_path / "notes.jsonl"
    found = _sides(tmp_path, "1b-nf4-2k", "--sides", "Unsloth", "TRL packed", PYTHONPATH=path, NOTES=str(notes))
    assert set(found) == {"Unsloth"}, "rows of one length are not packed"
    assert found["Unsloth"]["tokens_per_second"] > 0 and found["Unsloth"]["checkpointing"] == "unsloth"
    assert set(found["Unsloth"]["tokens"]) == {4 * 64}
    loaded, adapted = [json.loads(line) for line in notes.read_text().splitlines()]
    assert loaded == {
        "first": True,
        "dtype": "torch.bfloat16",
        "max_seq_length": 64,
        "load_in_4bit": True,
        "use_exact_model_name": True,
    }
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert adapted == {"use_gradient_checkpointing": "unsloth", "r": 16, "lora_alpha": 32, "target_modules": modules}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="unsloth is installed here")
def test_a_side_without_its_package_says_so(tmp_path: Path) -> None:
    found = _sides(tmp_path, "1b-bf16-2k", "--sides", "Unsloth")
    assert found["Unsloth"]["skipped"] == "unsloth is not installed here"
    assert "| unsloth is not installed here |" in (tmp_path / "gpu.md").read_text()


def test_what_a_machine_lacks_or_has_too_old_is_installed(tmp_path: Path) -> None:
    for name in ("nobody_has_this-1.0", "torch-2.99", "peft-0.21.0"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "missing.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [Path(line).name for line in done.stdout.split()] == ["nobody_has_this-1.0-py3-none-any.whl"]


def test_wheels_and_machine_have_all_that_the_package_needs() -> None:
    """A dependency that is new here is not there: the first minute on a GPU would end with its import."""
    lines = (ROOT / "scripts" / "gpu" / "wheels.txt").read_text(encoding="utf-8").splitlines()
    brought = {canonicalize_name(line.split("==")[0]) for line in lines if line and not line.startswith("#")}
    assert _needed(["peft-workbench"]) - _needed(THERE) - brought == set()


def _needed(names: Iterable[str]) -> set[str]:
    """Packages, and all that these need."""
    found, left = set[str](), [canonicalize_name(name) for name in names]
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        needs = (Requirement(text) for text in requires(name) or ())
        left += [
            canonicalize_name(each.name) for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found - {"peft-workbench"}


def test_one_binary_of_a_wheel_is_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    names = [f"bitsandbytes/libbitsandbytes_{kind}.so" for kind in ("cpu", "cuda118", "cuda130", "rocm70")]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ["bitsandbytes/__init__.py", *names]:
            file.writestr(name, "x")
        file.writestr("bitsandbytes-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu" / "thin.py"), str(wheel), "cuda130"], check=True)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == ["bitsandbytes/__init__.py", names[0], names[2], "bitsandbytes-1.0.dist-info/RECORD"]
        assert file.read("bitsandbytes-1.0.dist-info/RECORD").decode().count("\n") == 2
