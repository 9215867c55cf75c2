"""Faults of a machine are found there, and nothing else is complained of."""

from __future__ import annotations

from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli.verbs import app
from workbench.errors import ConfigError
from workbench.recipes import doctor


def test_nothing_makes_runs_fail_where_these_tests_run() -> None:
    found = doctor.examine()
    assert [each for each in found if each.is_fault] == []
    assert {"peft-workbench", "packages", "device", "bfloat16", "memory", "nf4, int8"} <= {
        each.subject for each in found
    }
    assert [bool(each.cure) for each in found] == sorted((bool(each.cure) for each in found), reverse=True)


def test_packages_that_are_missing_or_of_another_version_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=99", "no-such-package", "torch; extra == 'test'", "torch>=2", "torch<1; sys_platform == 'none'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    *_, found = doctor.packages()
    assert found.is_fault and found.cure.startswith("numpy ") and ">=99 is needed; no-such-package is not" in found.cure


def test_a_driver_that_torch_does_not_use_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    assert list(doctor.accelerator()) == []
    (tmp_path / "version").touch()
    (found,) = doctor.accelerator()
    assert found.is_fault and "CUDA" in found.cure


def test_full_disks_and_little_shared_memory_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 10**9))
    assert [bool(each.cure) for each in doctor.disks()] == [True, True]
    assert "--shm-size" in list(doctor.memory())[-1].cure


def test_faults_end_the_verb_as_mistakes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = doctor.MachineFact("torch", "is not there", "Install it.", is_fault=True)
    monkeypatch.setattr(doctor, "examine", lambda: [fault])
    found = CliRunner().invoke(app, ["doctor"])
    assert isinstance(found.exception, ConfigError) and found.output.startswith("FAULT torch")
    assert "Install it." in found.output
