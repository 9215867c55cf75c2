"""What teachers are tried with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tests.workbench.distillation.staged import save, three_rows
from workbench.data.batching import MicroBatch
from workbench.distillation.teacher_sources import TeacherSource


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TeacherSource]:
    """Adapters over stories260K that have learnt something, as a teacher."""
    return partial(save, tmp_path_factory)


@pytest.fixture(scope="module")
def batch() -> MicroBatch:
    """Three rows."""
    return three_rows()


@pytest.fixture(autouse=True)
def _no_gradients_are_off() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
