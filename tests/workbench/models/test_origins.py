"""What is told where a backbone cannot be loaded."""

from __future__ import annotations

import errno

import pytest

from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.models.origins import loading_errors

EXHAUSTED = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__name__)
def test_exhausted_memory_is_no_damaged_file(error: Exception, stories: str) -> None:
    with (
        pytest.raises(BackboneError, match=r"memory is exhausted\. End other programs, write model\.weights=nf4"),
        loading_errors(ModelConfig(id=stories), "weights", "*.safetensors"),
    ):
        raise error


def test_other_errors_over_a_whole_folder_are_damage(stories: str) -> None:
    with (
        pytest.raises(BackboneError, match=r"damaged weights \(ValueError: header too large\)"),
        loading_errors(ModelConfig(id=stories), "weights", "*.safetensors"),
    ):
        raise ValueError("header too large")
