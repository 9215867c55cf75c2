"""Newer versions of flash attention in torch's dispatcher: which card takes which, and none that differs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from tests.workbench.models.test_attention_backend import _by_rows
from workbench.config import ModelConfig
from workbench.models import attention_backend, backbones, flash_kernels

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was found out about a card is forgotten."""
    flash_kernels._installed.cache_clear()
    yield
    flash_kernels._installed.cache_clear()
    flash_kernels._put_back()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both packages stand beside torch, and say when they are asked; the list of those that were."""
    from torch.nn.attention import _registry

    asked: list[str] = []
    monkeypatch.setattr(flash_kernels, "installed", lambda package: True)
    for name in flash_kernels.NEWER:

        def register(name: str = name) -> Any:
            asked.append(name)
            return SimpleNamespace(remove=lambda: asked.append(f"{name} went"))

        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, register)
    return asked


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows are computed here as the kernel of a GPU computes them."""
    monkeypatch.setattr(attention_backend, "_kernel", lambda: _by_rows)


@pytest.mark.parametrize(("generation", "taken"), [(8, []), (9, ["FA3"]), (10, ["FA4"]), (12, [])])
def test_each_version_is_for_its_generation(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, generation: int, taken: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (generation, 0))
    monkeypatch.setattr(flash_kernels, "difference_from_float32", lambda device: 0.003)
    said = flash_kernels.activate(CUDA, torch.bfloat16, dropout=False)
    assert registered == taken and attention.current_flash_attention_impl() == (taken or [None])[0]
    assert said == (f"attention by {flash_kernels.NEWER[taken[0]].title}" if taken else None)
    flash_kernels.activate(CUDA, torch.bfloat16, dropout=False)
    assert registered == taken, "once in a process"


@pytest.mark.parametrize(
    ("device", "compute", "dropout"),
    [("cpu", torch.bfloat16, False), ("cuda", torch.float32, False), ("cuda", torch.bfloat16, True)],
)
def test_what_they_do_not_compute_stays(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, device: str, compute: torch.dtype, dropout: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert flash_kernels.activate(torch.device(device), compute, dropout=dropout) is None
    assert not registered


@pytest.mark.parametrize("distance", [0.5, float("nan")])
def test_what_differs_from_float32_is_put_back(registered: list[str], distance: float) -> None:
    newer = flash_kernels.NEWER["FA3"]
    said = flash_kernels._replaced("FA3", newer, CUDA, lambda device: distance)
    assert registered == ["FA3", "FA3 went"] and attention.current_flash_attention_impl() is None
    assert "differs from float32" in said and said.endswith("attention is torch's own")


def test_what_fails_is_put_back(registered: list[str]) -> None:
    def fails(device: torch.device) -> float:
        raise RuntimeError("no kernel image is available\nmore")

    said = flash_kernels._replaced("FA3", flash_kernels.NEWER["FA3"], CUDA, fails)
    assert "fails here (no kernel image is available)" in said
    assert attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("by_rows")
def test_the_trial_tells_right_kernels_from_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert 0 < flash_kernels.difference_from_float32(here) < flash_kernels.LEAST_LIKE

    def sees_the_future(*rows: Any, window_size: tuple[int, int], **settings: Any) -> Tensor:
        return _by_rows(*rows, window_size=(-1, -1), **settings)

    monkeypatch.setattr(attention_backend, "_kernel", lambda: sees_the_future)
    assert flash_kernels.difference_from_float32(here) > flash_kernels.LEAST_LIKE


def test_auto_is_torchs_own_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another kernel rows are not packed, servers refuse the model and encoders take no prefix."""
    monkeypatch.setattr(backbones, "is_flash_attn_2_available", lambda: True)
    for compute in (torch.bfloat16, torch.float32):
        assert backbones._attention(ModelConfig(id="x"), compute, CUDA) is None
    asked = ModelConfig(id="x", attention="flash_attention_2")
    assert backbones._attention(asked, torch.bfloat16, CUDA) == "flash_attention_2"
