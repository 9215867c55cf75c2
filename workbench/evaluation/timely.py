"""Work that ends in time, with a fair sample of it done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Left = Callable[[], float]
"""Seconds left for something."""


def in_time(parts: Iterable[T], left: Left | None) -> Iterator[T]:
    """Parts of some work for as long as there is time for another, but at least one; all where no time limits them.

    They come in random order where time limits them, so that those that are done are a fair sample of all.
    """
    if left is None:
        yield from parts
        return
    shuffled, longest = list(parts), 0.0
    random.Random(0).shuffle(shuffled)
    for number, part in enumerate(shuffled):
        before = left()
        if number and before < longest:
            return
        yield part
        longest = max(longest, before - left())
