"""What is imported is no garbage, and memory that is freed stays: neither changes what a process may still do."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench.runs.process_memory import importing, restart_without_caches, settled


class Cycle:
    """Reaches itself, so that only a search frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _unfrozen() -> object:
    yield
    gc.unfreeze()


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_looked_for_afterwards(fails: bool) -> None:
    try:
        with importing():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None


@pytest.mark.parametrize("asked", [None, "0", "1"])
def test_what_is_compiled_afterwards_is_compiled(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is given to torch.compile inside the block stays as it is, whoever gives it."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", asked)
    compiled: list[str] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append("graph")
        return graph.forward

    with importing():
        inside = torch.compile(double, backend=backend)
    assert os.environ.get("TORCHDYNAMO_DISABLE") == asked
    assert inside is double
    outside = torch.compile(double, backend=backend)
    assert outside(torch.ones(1)) == 2 and len(compiled) == (asked != "1")


FAULTS = """
import resource, torch
from workbench.runs import process_memory
def faults():
    began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began
for keep in (lambda: None, process_memory.keep):
    keep()
    faults()
    print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.slow
def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < plain / 10


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_gaps_between_tensors_are_given_back() -> None:
    tensors = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB, which come from the heap
    before = settled()
    del tensors[:-1]  # the last one holds the end of the heap
    assert settled() < before - 100e6


RESTARTED = """
import os, sys
from workbench.runs.process_memory import restart_without_caches
print(os.getpid(), *sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), flush=True)
restart_without_caches()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_a_command_starts_again_once_with_its_words(own: str | None, tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(RESTARTED)
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    environment |= {} if own is None else {"GLIBC_TUNABLES": own}
    command = [sys.executable, str(tmp_path / "command.py"), "run", "a b", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    first, *again = done.stdout.splitlines()
    assert first.endswith(str(own))
    assert not again if own else again == [first.replace("None", "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0")]


def test_a_fork_does_not_start_its_parent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", "run", "others"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    restart_without_caches()
    assert "GLIBC_TUNABLES" not in os.environ
