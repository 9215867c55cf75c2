"""Two groups of processes, each as torchrun starts them on a machine: one is killed, and the run goes on without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import workbench
from tests import forked
from tests.workbench.training.distributed.test_launcher import free_port, processes, reach
from tests.workbench.training.distributed.test_layouts import METHODS, write_recipe

pytestmark = pytest.mark.slow

WORDS = [f"adapter={METHODS['lora']}", "train.steps=40", "save.every=5"]


def machine(folder: Path, port: int, name: str, *, hosts_the_store: bool) -> subprocess.Popen[str]:
    """A machine's processes, in a folder of their own: who starts the others is forked, those that train are Python's.

    A killed host would take the store of the rendezvous with it, which is no machine that a run can lose.
    """
    command = [forked.python(), "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=elastic"]
    times = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    command += [f"--rdzv-conf=is_host={str(hosts_the_store).lower()},{times}"]
    command += [
        "--no-python",
        sys.executable,
        "-m",
        "workbench.cli.verbs",
        "run",
        str(folder / "recipe.yaml"),
        *WORDS,
        "--out",
        str(folder / "run"),
    ]
    (folder / name).mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder / name
    )


@pytest.mark.nightly
def test_the_run_goes_on_without_a_machine_that_was_killed(tmp_path: Path, stories: str) -> None:
    write_recipe(tmp_path, Path(stories))
    port = free_port()
    stays = machine(tmp_path, port, "stays", hosts_the_store=True)
    goes = machine(tmp_path, port, "goes", hosts_the_store=False)
    try:
        reach(stays, tmp_path / "run", step=7)
        family = processes(tmp_path / "goes")
        assert len(family) >= 3, "it has joined: who asks for a fork, the fork, and who trains"
        for process in family:
            process.kill()
        _, said = stays.communicate(timeout=240)
        assert stays.returncode == 0, said[-3000:]
    finally:
        stays.kill()
        goes.kill()
        goes.communicate()
    workbench.run(str(tmp_path / "recipe.yaml"), WORDS, out=tmp_path / "alone", quiet=True)
    found, wanted = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("run", "alone"))
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) <= 1e-3 * float(value.norm())
