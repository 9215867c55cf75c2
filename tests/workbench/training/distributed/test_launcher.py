"""`workbench run --devices 2`, as a person and a machine treat it: killed, stopped, and told nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests import forked
from workbench.config.yaml_text import dump_yaml
from workbench.evaluation import forward_passes

STEPS = 30
GONE = 30.0
"""Seconds after which nothing of a killed run may be left."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    folder = tmp_path_factory.mktemp("launching")
    rows = [f'{{"question": "How many is {n}?", "answer": "{n + 1}{" it is" * (n % 7)}"}}' for n in range(96)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    content = {
        "recipe": "sft",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": 0.1},
        "batch": {"size": 8},
        "train": {"steps": STEPS, "learning_rate": 1e-3},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": 5},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(content))
    return folder / "recipe.yaml"


def start(recipe: Path, out: Path, *words: str, python: str = "") -> subprocess.Popen[str]:
    """A run that works in its parent folder."""
    command = [
        python or forked.python(),
        "-m",
        "workbench.cli.verbs",
        "run",
        str(recipe),
        *words,
        "--out",
        str(out),
        "--devices",
        "2",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent)


def steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def processes(folder: Path) -> list[psutil.Process]:
    """Those of this test that work in a folder."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [process] if process.cwd() == str(folder) else []
    return found


def reach(launcher: subprocess.Popen[str], out: Path, *, step: int) -> None:
    """Wait until a run has done so many steps."""
    end = time.monotonic() + 120
    while steps(out) < step:
        assert launcher.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def await_end(family: list[psutil.Process]) -> None:
    """Nobody is left in time."""
    end = time.monotonic() + GONE
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < end, "somebody was left behind"
        time.sleep(0.05)


def kill_each(family: list[psutil.Process]) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):  # a fork ends with who asked for it
            process.kill()


def kill_one_rank(launcher: subprocess.Popen[str]) -> None:
    family = processes(Path(os.readlink(f"/proc/{launcher.pid}/cwd")))
    kill_each([process for process in family if process.environ().get("RANK") == "1"])


def kill_the_launcher(launcher: subprocess.Popen[str]) -> None:
    launcher.kill()


def kill_all(launcher: subprocess.Popen[str]) -> None:
    kill_each(processes(Path(os.readlink(f"/proc/{launcher.pid}/cwd"))))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "kills",
    [(kill_one_rank, kill_the_launcher), (kill_one_rank, kill_the_launcher, kill_all)],
    ids=["twice", "and all at once"],
)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_never_was(
    recipe: Path, tmp_path: Path, kills: Sequence[Callable[[subprocess.Popen[str]], None]]
) -> None:
    out, words = tmp_path / "killed", ["save.every=5"]
    for number, kill in enumerate(kills):
        before = steps(out)
        # Who learns that its parent has died is a process of its own: a fork has another parent.
        python = sys.executable if kill is kill_the_launcher else ""
        launcher = start(recipe, out, *words, *(["--resume"] if number else []), python=python)
        reach(launcher, out, step=before + 3)
        family = processes(tmp_path)
        assert len(family) >= 3
        kill(launcher)
        await_end(family)
        _, said = launcher.communicate(timeout=GONE)
        if kill is kill_one_rank:
            assert launcher.returncode == 2
            assert "was ended by signal 9" in said and "--resume" in said and "Traceback" not in said
    last = start(recipe, out, *words, "--resume")
    _, said = last.communicate(timeout=180)
    assert last.returncode == 0, said
    whole = start(recipe, tmp_path / "whole", *words)
    _, said = whole.communicate(timeout=180)
    assert whole.returncode == 0, said
    found, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (out, tmp_path / "whole"))
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_polite_stop_saves_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    launcher = start(recipe, tmp_path / "run", "save.every=null", "train.steps=4000")
    reach(launcher, tmp_path / "run", step=2)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, said
    assert "--resume" in said and "Traceback" not in said
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_more_devices_than_there_are_is_refused(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench.cli.verbs", "run", str(recipe), "--devices", "9999"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "this machine has" in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_that_were_told_different_things_refuse_to_train_together(recipe: Path, tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    told = []
    for rank in range(2):
        command = [
            forked.python(),
            "-m",
            "workbench.cli.verbs",
            "run",
            str(recipe),
            f"train.learning_rate={rank + 1}e-3",
        ]
        told.append(
            subprocess.Popen(
                [*command, "--out", str(tmp_path / "run")],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        )
    for process in told:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "Process 1 was given another configuration than process 0" in said
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_a_polite_stop_while_processes_score_together_keeps_what_is_scored(recipe: Path, tmp_path: Path) -> None:
    words = [
        "distributed={engine: fsdp2, zero: 3}",
        "evaluate={every: null, answers: 9, max_new_tokens: 2000}",
        "train.steps=1",
    ]
    launcher = start(recipe, tmp_path / "run", *words)
    assert launcher.stderr is not None
    lines = iter(launcher.stderr.readline, "")
    assert any("Scoring the backbone" in line for line in lines), launcher.communicate()
    time.sleep(2)  # it knows the loss of all rows, and is in the middle of the answers
    launcher.send_signal(signal.SIGTERM)
    heard, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, heard + said
    assert "what is scored so far is kept" in heard + said and "Traceback" not in heard + said
    assert (tmp_path / "run" / forward_passes.FILE).exists()
    assert not (tmp_path / "run" / "before.json").exists()
