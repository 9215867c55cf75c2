"""The day on a GPU, rehearsed on a CPU: tests of accelerators and the benchmark with tiny shapes, from one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import requires
from pathlib import Path

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
SIDES = ["workbench", "TRL tuned", "raw loop"]


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
    assert all(each["tokens_per_second"] > 0 and each["peak_bytes"] > 0 for each in found)
    assert (out / "gpu.md").read_text().count("| 8b-nf4-ragged |") == len(SIDES)


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
