"""Our tuners are PEFT methods after `import workbench.adapters`, which itself imports no PEFT."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Bottleneck
from workbench.adapters.after_import import after_import

LOADING = """
import sys, workbench.adapters
assert not {"torch", "peft"} & sys.modules.keys()
from peft import PeftModel
from transformers import LlamaForCausalLM
backbone = LlamaForCausalLM.from_pretrained(sys.argv[1])
print(type(PeftModel.from_pretrained(backbone, sys.argv[2]).base_model).__name__)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_stock_peft_loads_our_tuners_after_one_import(tmp_path: Path) -> None:
    base = tiny("Llama")
    base.save_pretrained(tmp_path / "base")
    adapters.save(adapters.attach(base, Bottleneck(width=2), seed=0), tmp_path / "adapter")
    command = [sys.executable, "-W", "ignore", "-c", LOADING, str(tmp_path / "base"), str(tmp_path / "adapter")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "BottleneckModel"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module that can be imported, and has not been."""
    (tmp_path / "never_imported_before.py").write_text("there = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "never_imported_before", raising=False)
    return "never_imported_before"


def test_it_waits_for_the_import_and_for_nothing_else(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    before = list(sys.meta_path)
    after_import(module, lambda: calls.append(sys.modules[module].there))
    importlib.util.find_spec(module), importlib.util.find_spec("json")
    assert not calls and module not in sys.modules, "looking a module up imports nothing"
    importlib.import_module(module)
    assert calls == [True] and sys.meta_path == before
    importlib.reload(sys.modules[module])
    after_import(module, lambda: calls.append(False))
    assert calls == [True, False], "at once where the module is there"


def test_two_may_wait_for_one_module(module: str) -> None:
    calls: list[int] = []
    after_import(module, lambda: calls.append(1))
    after_import(module, lambda: calls.append(2))
    importlib.import_module(module)
    assert sorted(calls) == [1, 2]


def test_a_module_that_is_not_installed_stays_missing(module: str) -> None:
    after_import("no_such_module_anywhere", lambda: None)
    assert importlib.util.find_spec("no_such_module_anywhere") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
