"""The number of adapters that train together in the memory of a device: by dry runs of few, and of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.runs import units

MOST = 16
"""Members of a dry run at most: it takes time for each, and between two that are known bytes grow by the member."""


@dataclass(frozen=True)
class MembersThatFit:
    """Members of a bank that a memory holds."""

    count: int
    """As many as fit; 0: not even one."""
    each: float
    """Bytes that one more takes, between the two dry runs with most."""
    known: Mapping[int, int]
    """Bytes by dry runs with so many members."""
    memory: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step with so many members."""

    @property
    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "fit": self.count,
            "bytes_each": round(self.each),
            "bytes_by_dry_run": dict(self.known),
            "seconds_per_step": dict(self.seconds),
        }

    @property
    def sentence(self) -> str:
        """All of it in words."""
        dry_runs = ", ".join(f"{units.size(size)} with {many}" for many, size in sorted(self.known.items()))
        steps = ", ".join(f"{seconds:.3g} s with {many}" for many, seconds in sorted(self.seconds.items()))
        return (
            f"{self.count:,} adapters like these fit at a time into {units.size(self.memory)}, by "
            f"{units.size(self.each)} each (dry runs: {dry_runs}){steps and f'; a step takes {steps}'}."
        )


def that_fit(needed: Callable[[int], int], *, few: int, memory: int) -> MembersThatFit:
    """The most members whose bank takes no more than `memory` bytes.

    Bytes of members that are alike grow about evenly: with one and with `few` it is found how much. So many are the
    answer as a dry run says fit where one more does not; beyond MOST members no dry run is made.

    Args:
        few: More than one.
        needed: Bytes of a training of so many members, by a dry run.
    """
    known = {many: needed(many) for many in (few, 1)}
    while True:
        fitting = max((many for many, size in known.items() if size <= memory), default=0)
        above = min((many for many, size in known.items() if size > memory), default=None)
        guess = max(_reached(known, memory), fitting + 1)
        if above is None and MOST in known:
            return MembersThatFit(guess - 1 if guess == MOST + 1 else guess, _each(known), known, memory)
        if above == fitting + 1:
            return MembersThatFit(fitting, _each(known), known, memory)
        tried = min(guess, MOST if above is None else above - 1)
        known[tried] = needed(tried)


def _reached(known: Mapping[int, int], memory: int) -> int:
    """Members that take `memory` bytes, counted from the dry run that is nearest; 0 where one takes more."""
    nearest = min(known, key=lambda many: abs(known[many] - memory))
    return max(0, nearest + math.floor((memory - known[nearest]) / _each(known)))


def _each(known: Mapping[int, int]) -> float:
    less, more = sorted(known)[-2:]
    return max(1.0, (known[more] - known[less]) / (more - less))
