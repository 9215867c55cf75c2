"""Whole models written as stock ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def save(model: nn.Module, folder: Path) -> None:
    """Write a model of transformers into `folder`, as transformers does."""
    with _unwrapped():
        model.save_pretrained(folder)  # type: ignore[operator]


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Inside, accelerate does not ask whether a model is wrapped by DeepSpeed, for which it would import it.

    Nothing that is saved here is, and the import takes seconds and warns about accelerators.
    """
    from accelerate.utils import other

    module: Any = other
    before = module.is_deepspeed_available
    module.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        module.is_deepspeed_available = before
