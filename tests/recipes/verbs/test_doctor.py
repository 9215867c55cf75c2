"""Faults of a machine are found there, and nothing else is complained of."""

from __future__ import annotations

from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli.verbs import app
from workbench.errors import ConfigError
from workbench.recipes.verbs import doctor


def test_nothing_makes_runs_fail_where_these_tests_run() -> None:
    found = doctor.examine()
    assert [each for each in found if each.is_fault] == []
    assert {"peft-workbench", "packages", "device", "bfloat16", "memory", "nf4, int8", "NCCL"} <= {
        each.subject for each in found
    }
    assert [bool(each.cure) for each in found] == sorted((bool(each.cure) for each in found), reverse=True)


def test_packages_that_are_missing_or_of_another_version_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=99", "no-such-package", "torch; extra == 'test'", "torch>=2", "torch<1; sys_platform == 'none'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    *_, found = doctor.packages()
    assert found.is_fault and found.cure.startswith("numpy ") and ">=99 is needed; no-such-package is not" in found.cure


def test_an_extra_of_another_version_is_told_and_one_that_is_not_installed_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(doctor.optional_packages()) == []
    needed = [
        "numpy>=99; extra == 'test'",
        "numpy>=99; extra == 'serve'",
        "no-such-package; extra == 'eval'",
        "torch<1",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    (found,) = doctor.optional_packages()
    assert found.subject == "numpy" and ">=99 is needed" in found.fact and found.cure and not found.is_fault


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),  # an RTX 4090 runs binaries of the A100
        ((8, 0), ["sm_86"], False),
        ((6, 1), ["sm_75", "sm_80", "sm_120"], False),  # a GTX 1080 with a torch of today
        ((12, 0), ["sm_80", "sm_90a"], False),  # a new GPU with an old torch
        ((12, 0), ["sm_80", "compute_90"], True),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 0), [], True),
        ((9, 4), ["gfx90a", "gfx942"], True),  # ROCm, which is asked nothing
    ],
)
def test_a_gpu_runs_binaries_of_its_own_major_version_and_older_intermediate_forms(
    capability: tuple[int, int], built: list[str], runs: bool
) -> None:
    assert doctor.runs_on(capability, built) is runs


def test_a_driver_that_torch_does_not_use_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(doctor.accelerator()) == []
    (tmp_path / "version").touch()
    (found,) = doctor.accelerator()
    assert found.is_fault and "CUDA" in found.cure
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = doctor.accelerator()
    assert not found.is_fault and "Unset it" in found.cure


@pytest.mark.parametrize(
    ("gpu", "built", "fact"), [(False, False, "gloo"), (False, True, "gloo"), (True, False, "not in")]
)
def test_how_devices_talk_is_told_with_and_without_them(
    gpu: bool, built: bool, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor.torch.distributed, "is_nccl_available", lambda: built)
    (found,) = doctor.communication()
    assert found.subject == "NCCL" and fact in found.fact and bool(found.cure) is gpu


@pytest.mark.parametrize(
    ("apart", "fact"),
    [
        ((), "each GPU reaches the memory of all others; 40 GB/s from cuda:2 to cuda:0, the slowest of 3 links"),
        (((0, 2), (2, 0)), "no peer access: cuda:0 to cuda:2, cuda:2 to cuda:0; 40 GB/s"),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_named_and_the_slowest_link_is_told(
    apart: tuple[tuple[int, int], ...], fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {(0, 1): 180e9, (1, 2): 200e9, (2, 0): 40e9}
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(doctor.torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)
    monkeypatch.setattr(doctor, "link_speed", lambda *pair: rates[pair])
    (found,) = doctor.links()
    assert found.fact.startswith(fact) and bool(found.cure) is bool(apart) and not found.is_fault

    def full(*pair: int) -> float:
        raise doctor.torch.OutOfMemoryError

    monkeypatch.setattr(doctor, "link_speed", full)
    (found,) = doctor.links()
    assert "no room to measure" in found.fact
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    assert list(doctor.links()) == []


def test_optional_kernels_for_the_generation_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(doctor.flash_kernels, "installed", lambda package: package == "flash_attn_interface")
    (found,) = doctor.kernels()
    assert found.fact.startswith("FlashAttention 3; not installed: liger-kernel for norms") and not found.cure
    assert "causal-conv1d for short convolutions" in found.fact and "FlashAttention 4" not in found.fact
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    assert list(doctor.kernels()) == []


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
