"""What is imported is no garbage, and memory that is freed stays: neither changes what a process may still do."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from workbench.runs.process_memory import importing


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


FAULTS = """
import resource, sys, torch
from workbench.runs import process_memory
if sys.argv[1] == "kept":
    process_memory.keep()
def faults():
    began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.slow
def test_freed_memory_is_used_again() -> None:
    found = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "plain")
    }
    assert found["kept"] < found["plain"] / 10
