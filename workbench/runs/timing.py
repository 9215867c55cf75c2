"""The wall clock of a run that has to end in time: what is spent, what is kept for the end, what is left for training.

The time of a run is counted through all processes that worked on it, in seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.errors import ConfigError
from workbench.runs.pace import Pace

SPARE, MOST_SPARE = 0.015, 10.0
"""Share of the limit, and seconds, by which a run aims to end before it."""
MARGIN = 1.2
"""What is kept for after training, as a multiple of what that is expected to take."""
LANDED = 0.9
"""Share of a run after which its schedule is near enough to its end."""
LATELY = 3.0
"""How long the past is that tells how fast the machine will be after training, as a multiple of how long that takes.

A shorter one ends a run early where others use the machine for a while; a longer one finds out late that they came to
stay, and cuts answers.
"""
ALIKE = {"evaluation": "scoring", "scoring": "evaluation"}
"""What takes about as long as something else."""
LEAVING = 0.5
"""Time from the last report to the end of the process, as a share of that of a report."""
REPORT, LEAST_REPORT = 0.1, 0.8
"""Until a report is measured: its time as a share of what the command took to start, and the least seconds."""


class MeasuredTime(NamedTuple):
    """Measured duration of a part of the run."""

    seconds: float
    """Of one unit of it."""
    at: float
    """When, in seconds of the run."""
    slowness: float | None = None
    """Of the machine at that time, where it was known then."""


class Pause(NamedTuple):
    """An interruption of training."""

    name: str
    every: int | float | None
    """Steps, or share of the run."""
    units: float = 1.0


@dataclass(frozen=True)
class TimePlan:
    """Everything that a run does besides training steps, in units that are measured under the same names."""

    after: Mapping[str, float]
    """What comes after the last step."""
    pauses: Sequence[Pause]
    tokens: int
    """In one unit of `evaluation` and of `scoring`, which are guessed until they are measured."""
    optional: tuple[str, ...] = ("answers",)
    """What is left out first, where time runs short."""


class Timer:
    """The clock of one run.

    What a part of the run took once, and how much slower the machine has become since then, give what it would take
    now. A step is begun where it fits before all that comes after training. Parts that are known here: `evaluation`,
    in training, the same work each time; `scoring`, of the same rows, before and after; `report`.

    Args:
        limit_s: Of all processes together.
        began: When this process began, by `clock`.
        spent_s: By earlier processes.
        clock: Seconds, that only grow.
        state: What `state` gave at the end of an earlier process.
        larger: What to write where so many seconds are needed.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        began: float,
        spent_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        state: Mapping[str, Any] | None = None,
        larger: Callable[[float], str] = lambda seconds: f"budget.time={seconds:.0f}s",
    ) -> None:
        self.limit_s = limit_s
        self.began = began - spent_s
        """When the run would have begun, had nothing interrupted it; by the clock."""
        self.ended = False
        """Whether it was the clock that ended training."""
        self.steady = True
        """Whether all steps of the run are the same work, and tell how fast the machine is."""
        self._clock = clock
        self._target = limit_s - min(SPARE * limit_s, MOST_SPARE)
        self._larger = larger
        self._plan: TimePlan | None = None
        guess = max(LEAST_REPORT, REPORT * (clock() - began))
        self._measured = {"report": MeasuredTime(guess, self.spent)}
        self._pace = Pace(state)
        if state is not None:
            self.ended = state["ended"]
            self._measured = {name: MeasuredTime(*found) for name, found in state["measured"].items()}
        self._at: float | None = None
        """When the last step ended, or training began."""
        self._paused = 0.0
        """Time since then in which nothing trained."""
        self._done = 0.0
        """Share of the run that was done then."""
        self._horizon = 0.0
        """The machine is expected to be as fast as it was in so many seconds before."""

    @property
    def spent(self) -> float:
        """Time spent so far by all processes."""
        return self._clock() - self.began

    def plan(self, plan: TimePlan) -> None:
        """Say what the run will do."""
        self._plan = plan

    @contextmanager
    def phase(self, name: str, units: float = 1.0) -> Iterator[None]:
        """Measure so many units of a part of the run that is no training step, unless it raises."""
        began, paused = self.spent, self._paused
        yield
        seconds = self.spent - began
        self._measured[name] = MeasuredTime(seconds / units, began + seconds / 2)
        if name == "evaluation":
            self._pace.evaluated(self._measured[name].at, seconds=seconds / units)
        self._paused = paused + seconds  # phases inside are part of it

    def begin(self, share: float) -> None:
        """Training begins, or goes on where `share` of the run is done.

        Raises:
            ConfigError: There is not enough time to do anything useful.
        """
        self._at, self._paused, self._done = self.spent, 0.0, share
        if self.spent + self._needed(optional=False) > self._target:
            raise ConfigError(self._refusal())

    def require_time(self, what: str) -> None:
        """Raise ConfigError where the time was over before `what` was done."""
        if self.left() <= 0:
            enough = self._larger(2 * self.limit_s)
            raise ConfigError(
                f"budget: {self.limit_s:.0f} s are not enough for {what}.\n"
                f"  Write {enough} or more, or fewer evaluate.answers, or a smaller data.held_out."
            )

    def stepped(self, tokens: int) -> None:
        """A training step of so many tokens is done."""
        assert self._at is not None, "training has begun"
        share, now = self.share(ahead=0), self.spent
        seconds = now - self._at - self._paused
        self._pace.stepped(now, seconds=seconds, tokens=tokens)
        self._at, self._paused, self._done = now, 0.0, share
        self.ended = self.ended or share >= 1

    def share(self, *, ahead: float) -> float:
        """Share of the time for training that is used when so many more steps are done.

        Between two steps it grows by the time since the last one over the time that whole steps can still use, so that
        it never falls, and is 1 at the end of the last step that fits, however the speed changes.

        Args:
            ahead: Steps of usual length from now on; less than 0 for a moment that has passed.
        """
        assert self._at is not None, "training has begun"
        since = self.spent - self._at - self._paused
        step = self._pace.usual or since
        if step <= 0:
            return self._done
        rest = self._training_left(self._at + self._paused, step)
        longest = max(self._pace.longest or step, since)
        steps = max(1, math.floor((rest - longest) / step) + 1)
        share = self._done + (1 - self._done) * min(max((since + ahead * step) / (steps * step), 0.0), 1.0)
        if ahead < 0 and rest - since < longest * max(1.0, since / step):
            # No other step follows: this one ends the schedule, however much of it the machine left no time for.
            return max(share, LANDED + (1 - LANDED) / 2)
        return share

    def fits_another(self) -> bool:
        """Whether there is time for another step, and for what comes after training.

        An evaluation after it may be the last one, whose time is kept: those before it are left out of the account.
        """
        fits = self._rest(self.spent) > (self._pace.longest or 0.0)
        self.ended = self.ended or not fits
        return fits

    def affords(self, name: str) -> bool:
        """Whether something that interrupts training takes no more than half of the time that is left for training."""
        rest = self._rest(self.spent)
        return self.seconds(name, sum(pause.units for pause in self._planned.pauses if pause.name == name)) < rest / 2

    def left(self) -> float:
        """Seconds until nothing but a report fits, and leaving."""
        return self._target - self.spent - self.seconds("report", 1 + LEAVING)

    def seconds(self, name: str, units: float = 1.0) -> float:
        """Expected duration of a part of the run, from measurements so far."""
        found = self._measured.get(name)
        if found is None:
            return units * self._guess(name)
        if self._at is not None and found.at >= self._at:
            return units * found.seconds  # no step since then says that anything has changed
        now = self._pace.slowness(self.spent, steady=self.steady, lately=self._horizon)
        then = found.slowness or self._pace.slowness(found.at, steady=self.steady)
        slower = now / then if now and then else 1.0
        expected = found.seconds * (slower if self.steady else max(slower, 1.0))
        if name == "scoring" and "evaluation" in self._measured:
            # Of the same rows, and without what makes training fast.
            expected = max(expected, self.seconds("evaluation"))
        return units * expected

    def state(self) -> dict[str, Any]:
        """All that a later process must know, as JSON."""
        measured = dict(self._measured)  # another thread asks while this one measures
        return {
            "limit_s": round(self.limit_s, 3),
            "spent_s": round(self.spent, 3),
            "ended": self.ended,
            **self._pace.state(),
            "measured": {
                name: found._replace(slowness=found.slowness or self._pace.slowness(found.at, steady=self.steady))
                for name, found in measured.items()
            },
        }

    def _guess(self, name: str) -> float:
        """A unit of what was not measured yet."""
        if name not in ALIKE:
            return 0.0
        other = self._measured.get(ALIKE[name])
        if other is not None:
            return self.seconds(ALIKE[name])
        # Without the backward pass, which takes as long as the forward pass at least.
        return self._planned.tokens * (self._pace.per_token(self.spent) or 0.0) / 2

    def _needed(self, *, optional: bool = True) -> float:
        """Expected duration of everything after training."""
        plan = self._planned
        chosen = {name: units for name, units in plan.after.items() if optional or name not in plan.optional}
        found = sum(self.seconds(name, units) for name, units in chosen.items())
        if optional:
            self._horizon = LATELY * found
        return found

    def _rest(self, at: float) -> float:
        """Time from a moment on until what comes after training must begin.

        Where that has come long before the schedule's end, because the machine became slow, first what is optional and
        then the margin give way to steps that bring the schedule there.
        """
        rest = self._target - MARGIN * self._needed() - at
        step = self._pace.longest or 0.0
        if rest < step and self._done < LANDED:
            kept = self._needed(optional=False)
            with_margin, bare = (self._target - times * kept - at for times in (MARGIN, 1.0))
            return with_margin if with_margin >= step else bare
        return rest

    def _training_left(self, at: float, step: float) -> float:
        """Time for training steps, from a moment on, when interruptions are taken off: half of it at most."""
        rest = self._rest(at)
        between = pauses = 0.0
        for name, every, units in self._planned.pauses:
            if isinstance(every, int):
                between += self.seconds(name, units) / every
            elif every is not None:
                pauses += self.seconds(name, units) * _moments_left(every, self._done)
        return max(rest - pauses, rest / 2) * step / (step + between)

    @property
    def _planned(self) -> TimePlan:
        assert self._plan is not None, "the recipe has said what it will do"
        return self._plan

    def _refusal(self) -> str:
        pauses = sum(
            self.seconds(name, units) * _moments_left(every, 0.0)
            for name, every, units in self._planned.pauses
            if isinstance(every, float)
        )
        enough = 5 * math.ceil(1.25 * (self.spent + MARGIN * self._needed() + pauses) / 5)
        return (
            f"budget: {self.spent:.0f} of {self.limit_s:.0f} s are spent, and scoring, saving and reports still take "
            f"about {self._needed():.0f} s: no time is left to train.\n"
            f"  Write {self._larger(enough)} or more, or fewer evaluate.answers, a rarer evaluate.every, or a smaller "
            "data.held_out."
        )


def phase(timer: Timer | None, name: str, units: float = 1.0) -> AbstractContextManager[None]:
    """`timer.phase` where a clock limits the run."""
    return nullcontext() if timer is None else timer.phase(name, units)


def left(timer: Timer | None) -> Callable[[], float] | None:
    """`timer.left` where a clock limits the run."""
    return None if timer is None else timer.left


def _moments_left(every: float, share: float) -> int:
    """How often something that happens after each such share of a run is still to happen before its end."""
    return max(0, math.ceil(1 / every - 1e-9) - 1 - math.floor(share / every + 1e-9))
