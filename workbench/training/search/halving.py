"""Successive halving in rounds: which trials of a search go on, and how many new ones begin.

A rung is a share of a trial's steps after which it is compared with all that reached it; one in `eta` goes on. Each
round trains those that go on and, in the places that are left, new ones. With all trials in the first round this is
successive halving (Jamieson & Talwalkar 2016); with fewer it is the promotion rule of ASHA (Li et al. 2020), applied at
the end of a round instead of by each worker, so that it depends only on the losses and not on timing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Standing = Mapping[int, float]
"""Loss of a trial at each rung that it reached; infinite where it failed before the rung."""


class Move(NamedTuple):
    """A trial that trains on, or begins."""

    trial: int
    rung: int
    """The rung at which it is compared next."""


class Round(NamedTuple):
    """Trials that train at once."""

    moves: tuple[Move, ...]
    """Trials that go on, the most advanced first."""
    new: int
    """Trials that begin."""


@dataclass(frozen=True)
class Halving:
    """The rungs of a search, and the rule by which trials are promoted."""

    eta: int
    """One in `eta` trials goes on."""
    rungs: int
    """Comparisons before the end."""

    @property
    def shares(self) -> list[float]:
        """Share of a member's steps at each rung; the last is 1."""
        return [1 / self.eta**power for power in range(self.rungs, -1, -1)]

    @property
    def top(self) -> int:
        """The last rung, at the end of a training."""
        return self.rungs

    def next_round(self, standings: Sequence[Standing], *, left: int, at_once: int) -> Round | None:
        """Trials that train next; None where the search is over.

        Args:
            standings: Of each trial so far.
            left: Number of trials that have not begun.
            at_once: Trials in a round.
        """
        promoted = []
        for rung in range(self.top - 1, -1, -1):
            reached = sorted((each[rung], trial) for trial, each in enumerate(standings) if rung in each)
            for loss, trial in reached[: len(reached) // self.eta]:
                if math.isfinite(loss) and max(standings[trial]) == rung:
                    promoted.append(Move(trial, rung + 1))
        moves = tuple(promoted[:at_once])
        new = min(left, at_once - len(moves))
        if moves or new:
            return Round(moves, new)
        if self._ended(standings) or (best := leader(standings)) is None:
            return None
        return Round((Move(best, max(standings[best]) + 1),), 0)  # fewer than eta are left, and none reached the end

    def cost(self, trained: Round, standings: Sequence[Standing]) -> float:
        """Cost of a round, in whole trainings."""
        shares = self.shares
        moves = (shares[rung] - self.reached(standings[trial]) for trial, rung in trained.moves)
        return trained.new * shares[0] + sum(moves)

    def reached(self, standing: Standing) -> float:
        """Share of its steps that a trial has done."""
        return self.shares[max(standing)] if standing else 0.0

    def within(self, wanted: Round | None, standings: Sequence[Standing], *, trainings: float) -> Round | None:
        """The part of a round for which there is time, such that one trial can still reach its end.

        Args:
            wanted: The round that halving would train.
            trainings: Time that is left, in whole trainings.
        """
        if wanted is None:
            return None
        done = self._ended(standings)
        known = [self.reached(each) for each in standings if _alive(each)]
        parts = [Round(wanted.moves[:count], 0) for count in range(1, len(wanted.moves) + 1)]
        parts += [Round(wanted.moves, new) for new in range(1, wanted.new + 1)]
        taken = Round((), 0)
        for part in parts:
            after = [self.shares[rung] for _, rung in part.moves] + [self.shares[0]] * (part.new > 0)
            rest = 0.0 if done else 1 - max([*known, *after], default=0.0)  # of the most advanced trial
            if self.cost(part, standings) + rest <= trainings:
                taken = part
        if taken.moves or taken.new:
            return taken
        best = leader(standings)
        return None if done or best is None else Round((Move(best, self.top),), 0)

    def _ended(self, standings: Sequence[Standing]) -> bool:
        """Whether a trial reached the end without failing."""
        return any(math.isfinite(each.get(self.top, math.inf)) for each in standings)

    def everything(self, trials: int) -> list[int]:
        """Number of trials that reach each rung if all begin at once and none fails."""
        counts = [trials]
        for _ in range(self.rungs):
            counts.append(max(1, counts[-1] // self.eta))
        return counts

    def cost_of(self, counts: Sequence[int]) -> float:
        """Cost of a search with so many trials at each rung, in whole trainings."""
        parts = [share - before for share, before in zip(self.shares, [0.0, *self.shares], strict=False)]
        return sum(count * part for count, part in zip(counts, parts, strict=True))

    def in_words(self, rung: int) -> str:
        """Share of the steps at a rung: 1/16, or all."""
        return "all" if rung == self.top else f"1/{self.eta ** (self.top - rung)}"


def leader(standings: Sequence[Standing]) -> int | None:
    """The trial with the lowest loss on the highest rung that any trial reached; None where all failed."""
    alive = [(-max(each), each[max(each)], trial) for trial, each in enumerate(standings) if _alive(each)]
    return min(alive)[2] if alive else None


def _alive(standing: Standing) -> bool:
    return bool(standing) and math.isfinite(standing[max(standing)])
