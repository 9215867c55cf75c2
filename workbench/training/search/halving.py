"""Successive halving in waves: which members of a search go on, and how many new ones begin.

A rung is a share of a member's steps after which it is compared with all that came as far; one of `eta` goes on. Each
wave holds those that go on and, in the places that are left, new ones. With all trials in the first wave this is
successive halving (Jamieson & Talwalkar 2016); with fewer it is the promotion rule of ASHA (Li et al. 2020), asked at
the end of a wave instead of by each worker, so that it depends on the losses alone and on no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Standing = Mapping[int, float]
"""Loss of a trial at each rung that it reached, infinite where it failed on the way."""


class Move(NamedTuple):
    """A trial that trains on, or begins."""

    trial: int
    rung: int
    """Where it is compared next."""


class Wave(NamedTuple):
    """Members that train at once."""

    moves: tuple[Move, ...]
    """Trials that go on, those that are farthest first."""
    new: int
    """Trials that begin."""


@dataclass(frozen=True)
class Halving:
    """The rungs of a search, and the rule by which trials climb them."""

    eta: int
    """One of so many goes on."""
    rungs: int
    """Comparisons before the end."""

    @property
    def shares(self) -> list[float]:
        """Share of a member's steps at each rung; the last is 1."""
        return [1 / self.eta**power for power in range(self.rungs, -1, -1)]

    @property
    def top(self) -> int:
        """The rung at the end of a training."""
        return self.rungs

    def next_wave(self, standings: Sequence[Standing], *, left: int, at_once: int) -> Wave | None:
        """Members that train next; None where the search is over.

        Args:
            standings: Of each trial so far.
            left: Trials that have not begun.
            at_once: Members of a wave.
        """
        moves = tuple(self._promotions(standings))[:at_once]
        new = min(left, at_once - len(moves))
        if moves or new:
            return Wave(moves, new)
        if self._ended(standings) or (best := leader(standings)) is None:
            return None
        return Wave((Move(best, max(standings[best]) + 1),), 0)  # fewer than eta are left, and nobody came to the end

    def _promotions(self, standings: Sequence[Standing]) -> Iterator[Move]:
        """Trials among the best of a rung that have not gone on from there."""
        for rung in range(self.top - 1, -1, -1):
            reached = sorted((each[rung], trial) for trial, each in enumerate(standings) if rung in each)
            for loss, trial in reached[: len(reached) // self.eta]:
                if math.isfinite(loss) and max(standings[trial]) == rung:
                    yield Move(trial, rung + 1)

    def cost(self, wave: Wave, standings: Sequence[Standing]) -> float:
        """Steps that a wave trains, in whole trainings."""
        shares = self.shares
        return wave.new * shares[0] + sum(shares[rung] - self.reached(standings[trial]) for trial, rung in wave.moves)

    def reached(self, standing: Standing) -> float:
        """Share of its steps that a trial has done."""
        return self.shares[max(standing)] if standing else 0.0

    def within(self, wave: Wave | None, standings: Sequence[Standing], *, trainings: float) -> Wave | None:
        """The part of a wave for which there is time, so that one member still comes to its end.

        Args:
            wave: What halving would train.
            trainings: Whole trainings that there is time for.
        """
        if wave is None:
            return None
        done = self._ended(standings)
        taken = Wave((), 0)
        for larger in _growing(wave):
            if self.cost(larger, standings) + (0.0 if done else self._path(larger, standings)) <= trainings:
                taken = larger
        if taken.moves or taken.new:
            return taken
        best = leader(standings)
        return None if done or best is None else Wave((Move(best, self.top),), 0)

    def _ended(self, standings: Sequence[Standing]) -> bool:
        """Whether a trial came to the end without failing."""
        return any(math.isfinite(each.get(self.top, math.inf)) for each in standings)

    def _path(self, wave: Wave, standings: Sequence[Standing]) -> float:
        """Steps that the member which is farthest after a wave still has to train, in whole trainings."""
        known = [self.reached(each) for trial, each in enumerate(standings) if _alive(each)]
        after = [self.shares[rung] for _, rung in wave.moves] + [self.shares[0]] * (wave.new > 0)
        return 1 - max([*known, *after], default=0.0)

    def everything(self, trials: int) -> list[int]:
        """Members that reach each rung where all trials begin at once and none fails."""
        counts = [trials]
        for _ in range(self.rungs):
            counts.append(max(1, counts[-1] // self.eta))
        return counts

    def cost_of(self, counts: Sequence[int]) -> float:
        """Steps of a search with so many members at each rung, in whole trainings."""
        parts = [share - before for share, before in zip(self.shares, [0.0, *self.shares], strict=False)]
        return sum(count * part for count, part in zip(counts, parts, strict=True))

    def in_words(self, rung: int) -> str:
        """Share of the steps at a rung: 1/16, or all."""
        return "all" if rung == self.top else f"1/{self.eta ** (self.top - rung)}"


def leader(standings: Sequence[Standing]) -> int | None:
    """The trial with the lowest loss on the highest rung that any reached without failing; None where all failed."""
    alive = [(-max(each), each[max(each)], trial) for trial, each in enumerate(standings) if _alive(each)]
    return min(alive)[2] if alive else None


def _alive(standing: Standing) -> bool:
    return bool(standing) and math.isfinite(standing[max(standing)])


def _growing(wave: Wave) -> Iterator[Wave]:
    """The beginnings of a wave: its moves one by one, then its new trials."""
    for count in range(1, len(wave.moves) + 1):
        yield Wave(wave.moves[:count], 0)
    for new in range(1, wave.new + 1):
        yield Wave(wave.moves, new)
