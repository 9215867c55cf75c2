"""Parts of a pass that are alike, of which a dry run computes the first two and the last alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_FEW = ContextVar("few", default=False)
Part = TypeVar("Part")


def wanted(parts: Sequence[Part]) -> Sequence[Part]:
    """The parts to compute: all of them; inside `few`, the first two and the last."""
    return [*parts[:2], *parts[2:][-1:]] if _FEW.get() else parts


@contextmanager
def few() -> Iterator[None]:
    """Inside, a pass computes few of its parts: for tensors without values, of which all between take the memory of
    the second."""
    token = _FEW.set(True)
    try:
        yield
    finally:
        _FEW.reset(token)
