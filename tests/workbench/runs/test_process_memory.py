"""What is imported is no garbage, and memory that is freed stays: neither changes what a process may still do."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from workbench.runs import process_memory
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
def test_freed_memory_is_used_again() -> None:
    found = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "plain")
    }
    assert found["kept"] < found["plain"] / 10


def test_torchs_compiler_is_not_imported_for_what_nobody_calls() -> None:
    code = (
        "import sys\nfrom workbench.runs.process_memory import importing\n"
        "with importing():\n    import peft\n"
        "assert 'bitsandbytes' in sys.modules and 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_compiled_later_computes_the_same() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for later in (
        process_memory._compiled_when_called(twice, backend="eager"),
        process_memory._compiled_when_called(backend="eager")(twice),
    ):
        assert later(torch.tensor(3)) == 6
