"""The wall clock of a run that has to end in time: what is spent, what is kept for the end, what is left for training.

Training goes on while the time spent, another step and the reserve fit into the limit. The reserve is what comes after
training, as long as it took before, or longer where steps have become slower since then, and a share of the limit.
Everything is in seconds, counted through all processes that worked on the run.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from workbench.config import RunConfig
from workbench.config.sections.budget_config import BudgetConfig
from workbench.errors import ConfigError, Stopped
from workbench.runs import files

SPARE = 0.04
"""Share of the limit that is kept for what nobody foresees."""
STEPS = 5
"""So many of the last steps tell how long another one takes."""
LANDED = 0.95
"""Where the schedule is in the last step, at least."""
REPORT, LEAST_REPORT = 0.1, 1.0
"""Until a report is written: its time as a share of what the process took to start, and the least seconds."""
ALIKE = {"evaluation": "scoring", "scoring": "evaluation"}
"""Parts of a run that take about as long as each other."""
BEAT = 0.5
"""Seconds between two notes of what is spent."""


class PhaseTime(NamedTuple):
    """Duration of one unit of a part of a run."""

    seconds: float
    step: float | None
    """Duration of a training step at that time, where one was done by then."""


class Pause(NamedTuple):
    """An interruption of training."""

    name: str
    every: int | float | None
    """Steps, or share of the run."""
    units: float = 1.0


class TimePlan(NamedTuple):
    """Everything that a run does besides training steps, in units that are measured under the same names."""

    after: Mapping[str, float]
    """Parts after the last step."""
    pauses: Sequence[Pause]
    steady: bool = True
    """Whether all steps are the same work, so that a faster one means a faster machine."""


class Deadline:
    """The clock of one run, and its limit if it has one.

    Args:
        limit_s: Of all processes together.
        began: When this process began, by `clock`; by default now.
        spent_s: By earlier processes.
        clock: Seconds, that only grow.
        state: What `state` gave at the end of an earlier process.
        larger: What to write where so many seconds are needed.
        agreed: From what this process finds to what the first of those that train together finds. All of them ask for
            `share`, `fits_another`, `affords` and `begin` together.
    """

    def __init__(
        self,
        limit_s: float = math.inf,
        *,
        began: float | None = None,
        spent_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        state: Mapping[str, Any] | None = None,
        larger: Callable[[float], str] = lambda seconds: f"budget.time={seconds:.0f}s",
        agreed: Callable[[Any], Any] = lambda each: each,
    ) -> None:
        state = state or {"measured": {}, "steps": []}
        self.limit_s = limit_s
        self.began = (clock() if began is None else began) - spent_s
        """When the run would have begun, had nothing interrupted it; by the clock."""
        self._clock = clock
        self._larger, self._agreed = larger, agreed
        self._plan = TimePlan({}, ())
        guess = {"report": PhaseTime(max(LEAST_REPORT, REPORT * (clock() - self.began - spent_s)), None)}
        self._measured: dict[str, PhaseTime] = guess | {
            name: PhaseTime(*each) for name, each in state["measured"].items()
        }
        self._steps = deque[float](state["steps"], maxlen=STEPS)
        self._first: float | None = None
        """Duration of the first steps, which what was measured before them is compared with."""
        self._since: float | None = None
        """When the last step ended, or training began."""
        self._paused = 0.0
        """Time since then in which nothing trained."""

    @property
    def limited(self) -> bool:
        """Whether wall clock ends the run."""
        return self.limit_s < math.inf

    @property
    def spent(self) -> float:
        """Time spent so far by all processes."""
        return self._clock() - self.began

    def plan(self, plan: TimePlan) -> None:
        """Say what the run will do."""
        self._plan = plan

    def knows(self, name: str) -> bool:
        """Whether a part of the run was measured."""
        return name in self._measured

    @contextmanager
    def phase(self, name: str, units: float = 1.0) -> Iterator[None]:
        """Measure so many units of a part of the run that is no training step, unless it raises."""
        began, paused = self.spent, self._paused
        yield
        seconds = self.spent - began
        self._measured[name] = PhaseTime(seconds / units, self._step)
        self._paused = paused + seconds  # phases inside are part of it

    def begin(self, share: float) -> None:
        """Training begins, or goes on where `share` of the run is done.

        Raises:
            ConfigError: There is not enough time for a step.
        """
        self._since, self._paused = self.spent, 0.0
        if not self.fits_another():
            raise ConfigError(
                f"budget: {self.spent:.0f} of {self.limit_s:.0f} s are spent, and scoring, saving and reports still "
                f"take about {self._after:.0f} s: no time is left to train.\n"
                f"  Write {self._enough(share)} or more, or fewer evaluate.answers, a rarer evaluate.every, or a "
                "smaller data.held_out."
            )

    @property
    def over(self) -> bool:
        """Whether there is only time for a report."""
        return self.spent + max(2 * self._seconds("report"), SPARE / 2 * self.limit_s) > self.limit_s

    def overrun(self) -> Exception:
        """The error of a run whose time is over while a model is scored; afterwards the adapter is saved."""
        if self._since is None and not self._steps:
            return ConfigError(
                f"budget: {self.limit_s:.0f} s are not enough to score the backbone before training.\n"
                f"  Write {self._larger(2 * math.ceil(self.spent))} or more, or fewer evaluate.answers, or a smaller "
                "data.held_out."
            )
        return Stopped(
            f"budget: the machine became slow, and {self.limit_s:.0f} s are over before all is scored. The adapter is "
            f"saved, and so is what is scored. Write {self._enough(1.0)} or more to have the rest scored."
        )

    def stepped(self) -> None:
        """The gradients of a training step are there."""
        if self._since is None:  # nobody asked for an end in time
            return
        now = self.spent
        self._steps.append(now - self._since - self._paused)
        self._since, self._paused = now, 0.0
        if self._first is None or len(self._steps) < STEPS:
            self._first = self._step

    def share(self, done: float, part: float) -> float:
        """Share of the run that is done when a part of the step is whose gradients are there.

        What is left of the schedule is divided evenly among the whole steps that there is still time for, so that the
        share never falls, and is 1 at the end of the last one however the speed changes.

        Args:
            done: Share of the run that was done before this step.
        """
        if not self.limited:
            return done
        more: int = self._agreed(self._more(done) if self._fits else 0)
        share = done + (1 - done) * part / (1 + more)
        return share if more else max(share, LANDED)

    def fits_another(self) -> bool:
        """Whether there is time for another step, and for what comes after training.

        An evaluation after it may be the last one, whose time is kept: those before it are left out of the account.
        """
        return bool(self._agreed(self._fits)) if self.limited else True

    def affords(self, *names: str) -> bool:
        """Whether interruptions of training take no more than half of the time that is left for training."""
        if not self.limited:
            return True
        cost = sum(self._seconds(pause.name) * pause.units for pause in self._plan.pauses if pause.name in names)
        rest = self.rest
        return bool(self._agreed(cost < min(rest / 2, rest - self._longest)))

    def state(self) -> dict[str, Any]:
        """All that a later process must know, as JSON."""
        measured = dict(self._measured)  # another thread asks while this one measures
        return {
            "limit_s": round(self.limit_s, 3),
            "spent_s": round(self.spent, 3),
            "steps": list(self._steps),
            "measured": {name: each._replace(step=each.step or self._first) for name, each in measured.items()},
        }

    @property
    def _fits(self) -> bool:
        """Whether this process finds time for another step."""
        return self.rest > self._longest

    @property
    def _longest(self) -> float:
        return max(self._steps, default=0.0)

    @property
    def _step(self) -> float | None:
        """Duration of the last steps, of which a single slow one does not count; None before the first."""
        return statistics.median(self._steps) if self._steps else None

    def _seconds(self, name: str) -> float:
        """Expected duration of a unit: as it was measured, or longer where steps have become slower since then."""
        measurement = self._measured.get(name) or self._measured.get(ALIKE.get(name, ""))
        if measurement is None:
            return 0.0
        now, then = self._step, measurement.step or self._first
        slower = now / then if now and then else 1.0
        return measurement.seconds * (slower if self._plan.steady else max(slower, 1.0))

    @property
    def _after(self) -> float:
        """Expected duration of everything after training."""
        return sum(units * self._seconds(name) for name, units in self._plan.after.items())

    @property
    def rest(self) -> float:
        """Time until what comes after training must begin."""
        return (1 - SPARE) * self.limit_s - self.spent - self._after if self.limited else math.inf

    def _more(self, done: float) -> int:
        """Steps that there is time for after this one; interruptions take half of the time at most."""
        rest, step = self.rest, max(self._step or 0.0, 1e-9)
        return math.floor(max(rest - self._pauses(done, rest / step), rest / 2) / step)

    def _pauses(self, done: float, steps: float = 0.0) -> float:
        """Time for interruptions of training from a share of the run on, with so many steps to come."""
        seconds = 0.0
        for name, every, units in self._plan.pauses:
            if every is not None:
                times = steps / every if isinstance(every, int) else _moments_left(every, done)
                seconds += times * units * self._seconds(name)
        return seconds

    def _enough(self, done: float) -> str:
        """Setting to write for a run that is not to be refused."""
        needed = self.spent + self._after + self._pauses(done)
        return self._larger(5 * math.ceil((1.25 + SPARE) * needed / 5))


def start(
    config: BudgetConfig, file: Path, *, began: float, agreed: Callable[[Any], Any] = lambda each: each
) -> Deadline:
    """The clock of a run, going on from what `file` holds of earlier processes.

    Args:
        began: When this process began, by `time.monotonic`.
        agreed: See `Deadline`.

    Raises:
        ConfigError: It is to end with its Slurm job, and runs in none.
    """
    if not config.timed:
        return Deadline(began=began)
    state = files.read_json(file) or None
    spent = float(state["spent_s"]) if state else 0.0
    limits = [] if config.seconds is None else [config.seconds]
    if config.time == "slurm":
        limits.append(spent + (time.monotonic() - began) + _slurm_end() - time.time())
    return Deadline(
        min(limits),
        began=began,
        spent_s=spent,
        state=state,
        larger=lambda seconds: _larger(config, seconds),
        agreed=agreed,
    )


def require_end(config: BudgetConfig) -> None:
    """Raise ConfigError where a run is to end with its Slurm job, and this process runs in none."""
    if config.time == "slurm":
        _slurm_end()


def plan(config: RunConfig, *, held_out: int, test: int, peers: int = 1) -> TimePlan:
    """Everything that a run does besides training steps.

    Args:
        held_out: Tokens of the held-out rows.
        test: Tokens of the test rows.
        peers: Models that train together, the best of which is shipped.
    """
    evaluations = peers * (1.0 if config.average.method == "none" else 2.0)
    after = {
        "evaluation": (0.0 if config.evaluate.every is None else evaluations) + (peers if peers > 1 else 0),
        "samples": 0.0 if config.evaluate.every is None else 1.0,
        "checkpoint": 3.0,  # one that may stand before the last step, its own, and the adapter's
        "load": 1.0,
        "scoring": 1 + test / held_out,
        "answers": 1.0 + (test > 0),
        "report": 2.0,
    }
    every = config.evaluate.every
    pauses = [Pause("evaluation", every, evaluations), Pause("samples", every), Pause("checkpoint", config.save.every)]
    return TimePlan(after, pauses, steady=config.freeze.policy == "none")


@contextmanager
def kept(deadline: Deadline, file: Path) -> Iterator[None]:
    """Note in `file`, again and again, what a limited run's clock knows, so that a killed run counts what it spent."""
    if not deadline.limited:
        yield
        return
    over = threading.Event()

    def note() -> None:
        # Not through to the disk: what outlives the process is enough, and syncing takes its time.
        aside = file.with_name(f".{file.name}.unfinished")
        with suppress(OSError):  # a full disk is told by what must be written
            aside.write_text(json.dumps(deadline.state()))
            os.replace(aside, file)

    def beat() -> None:
        while not over.wait(BEAT):
            note()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        note()


def process_began() -> float:
    """When this process began, by `time.monotonic`."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - time.time() + float(psutil.Process().create_time())
    # psutil counts from a boot time that the kernel tells in whole seconds.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    per_second: int = os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / per_second)


def _slurm_end() -> float:
    """When the Slurm job that this process runs in will be ended, Unix time."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        raise ConfigError(
            "budget.time=slurm: this is no Slurm job, or its Slurm does not tell when it will end "
            "(SLURM_JOB_END_TIME). Write the time itself, such as budget.time=90m."
        )
    return float(end)


def _larger(config: BudgetConfig, seconds: float) -> str:
    """Setting to write, or limit to ask for, where a run needs so many seconds."""
    hours = seconds / 3600
    needed = {"time": seconds, "energy": hours * (config.power or 0), "money": hours * (config.price or 0)}
    given = {name: getattr(config, name) for name in needed}
    words = [f"sbatch --time={math.ceil(seconds / 60)}"] if config.time == "slurm" else []
    short = [name for name, value in given.items() if isinstance(value, float) and value < needed[name]]
    return " and ".join([*words, *(f"budget.{name}={needed[name]:.4g}" for name in short)])


def _moments_left(every: float, share: float) -> int:
    """How often something that happens after each such share of a run is still to happen before its end."""
    return max(0, math.ceil(1 / every - 1e-9) - 1 - math.floor(share / every + 1e-9))
