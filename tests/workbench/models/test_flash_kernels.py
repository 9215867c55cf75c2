"""Newer versions of flash attention in torch's dispatcher: which card takes which, and none that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    yield
    flash_kernels._FAILED.clear()
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


def fails(device: torch.device) -> float:
    raise RuntimeError("no kernel image is available\nmore")


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (lambda device: 0.5, "differs from float32 by 50.0%"),
        (lambda device: math.nan, "differs from float32"),
        (fails, "fails here (no kernel image is available)"),
    ],
    ids=["far", "nan", "fails"],
)
def test_what_is_wrong_is_put_back_and_not_tried_again(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, trial: Callable[[torch.device], float], told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(flash_kernels, "difference_from_float32", trial)
    for _ in range(2):
        said = flash_kernels.activate(CUDA, torch.bfloat16, dropout=False)
        assert said is not None and told in said and said.endswith("attention is torch's own")
        assert registered == ["FA3", "FA3 went"] and attention.current_flash_attention_impl() is None


def test_a_model_that_drops_weights_has_torchs_own_again(
    registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(flash_kernels, "difference_from_float32", lambda device: 0.003)
    for dropout, active in ((False, "FA3"), (True, None), (False, "FA3")):
        said = flash_kernels.activate(CUDA, torch.bfloat16, dropout=dropout)
        assert attention.current_flash_attention_impl() == active and (said is None) is dropout


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
