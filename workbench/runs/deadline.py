"""The wall clock of a run that must end in time: what is spent, what is reserved for the end, what is left to train.

Training goes on while the time spent, one more step and the reserve fit into the limit. The reserve is what comes after
training, as long as it took before (longer if steps have become slower since), and a share of the limit. Everything is
in seconds, summed over all processes that worked on the run one after another.
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
"""Share of the limit that is reserved for the unforeseen."""
STEPS = 5
"""The duration of the next step is estimated from so many of the last ones."""
LANDED = 0.95
"""Share of the schedule that the last step reaches at least."""
REPORT, LEAST_REPORT = 0.1, 1.0
"""Estimate of a report's duration before one is written: a share of the process's start-up, and the least seconds."""
ALIKE = {"evaluation": "scoring", "scoring": "evaluation"}
"""Parts of a run that take about as long as each other."""
BEAT = 0.5
"""Seconds between two writes of the clock file."""


class PhaseTime(NamedTuple):
    """Duration of one unit of a part of a run."""

    seconds: float
    step: float | None
    """Duration of a training step at that time; None before the first."""


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
    """Whether all steps do the same work, so that a faster step means a faster machine."""


class Deadline:
    """The clock of one run, and its limit if it has one.

    Args:
        limit_s: Limit on the sum over all processes.
        began: When this process began, by `clock`; by default now.
        spent_s: Spent by earlier processes.
        clock: Seconds, never decreasing.
        state: What `state` returned at the end of an earlier process.
        larger: The setting to write where so many seconds are needed.
        agreed: Maps this process's finding to that of the first process. All processes that train together call
            `share`, `fits_another`, `affords` and `begin` at the same time.
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
        """When the run would have begun without interruptions, by the clock."""
        self._clock, self._larger, self._agreed = clock, larger, agreed
        self._plan = TimePlan({}, ())
        report = PhaseTime(max(LEAST_REPORT, REPORT * (clock() - self.began - spent_s)), None)
        self._measured: dict[str, PhaseTime] = {"report": report} | {
            name: PhaseTime(*each) for name, each in state["measured"].items()
        }
        self._steps = deque[float](state["steps"], maxlen=STEPS)
        self._first: float | None = None
        """Duration of this process's first steps; measurements made before them are compared with it."""
        self._since: float | None = None
        """When the last step ended, or training began."""
        self._paused = 0.0
        """Time since then that was not training."""

    @property
    def limited(self) -> bool:
        """Whether wall clock ends the run."""
        return self.limit_s < math.inf

    @property
    def spent(self) -> float:
        """Time spent so far by all processes."""
        return self._clock() - self.began

    @property
    def rest(self) -> float:
        """Time until what comes after training must begin."""
        return (1 - SPARE) * self.limit_s - self.spent - self._after if self.limited else math.inf

    @property
    def over(self) -> bool:
        """Whether there is only time for a report."""
        return self.spent + max(2 * self._seconds("report"), SPARE / 2 * self.limit_s) > self.limit_s

    def plan(self, plan: TimePlan) -> None:
        """Say what the run will do."""
        self._plan = plan

    def knows(self, name: str) -> bool:
        """Whether a part of the run was measured."""
        return name in self._measured

    @contextmanager
    def phase(self, name: str, units: float = 1.0) -> Iterator[None]:
        """Measure `units` units of a part of the run that is no training step, unless it raises."""
        began, paused = self.spent, self._paused
        yield
        seconds = self.spent - began
        self._measured[name] = PhaseTime(seconds / units, self._step)
        self._paused = paused + seconds  # phases inside are part of it

    def begin(self, share: float) -> None:
        """Begin training, or go on where `share` of the run is done.

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

    def stepped(self) -> None:
        """Measure a training step, whose gradients are there."""
        if self._since is None:  # nobody asked for an end in time
            return
        now = self.spent
        self._steps.append(now - self._since - self._paused)
        self._since, self._paused = now, 0.0
        if self._first is None or len(self._steps) < STEPS:
            self._first = self._step

    def share(self, done: float, part: float) -> float:
        """Share of the run that is done after `part` of the step whose gradients are there.

        What is left of the schedule is divided evenly among the whole steps that there is still time for, so that the
        share never falls, and is 1 at the end of the last step however the speed changes.

        Args:
            done: Share of the run that was done before this step.
            part: Of this step, 0 to 1.
        """
        if not self.limited:
            return done
        more: int = self._agreed(self._more(done) if self.rest > self._longest else 0)
        share = done + (1 - done) * part / (1 + more)
        return share if more else max(share, LANDED)

    def fits_another(self) -> bool:
        """Whether there is time for another step and for what comes after training.

        The next evaluation may be the last one, whose time is reserved: earlier ones need no time of their own here.
        """
        return bool(self._agreed(self.rest > self._longest)) if self.limited else True

    def affords(self, *names: str) -> bool:
        """Whether these interruptions of training take at most half of the time that is left for training."""
        if not self.limited:
            return True
        cost = sum(self._seconds(pause.name) * pause.units for pause in self._plan.pauses if pause.name in names)
        rest = self.rest
        return bool(self._agreed(cost < min(rest / 2, rest - self._longest)))

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
    def _longest(self) -> float:
        return max(self._steps, default=0.0)

    @property
    def _step(self) -> float | None:
        """Median duration of the last steps; None before the first."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def _after(self) -> float:
        """Expected duration of everything after training."""
        return sum(units * self._seconds(name) for name, units in self._plan.after.items())

    def _seconds(self, name: str) -> float:
        """Expected duration of a unit: as measured, or longer if steps have become slower since then."""
        measurement = self._measured.get(name) or self._measured.get(ALIKE.get(name, ""))
        if measurement is None:
            return 0.0
        now, then = self._step, measurement.step or self._first
        slower = now / then if now and then else 1.0
        return measurement.seconds * (slower if self._plan.steady else max(slower, 1.0))

    def _more(self, done: float) -> int:
        """Steps that there is time for after this one; interruptions take half of the time at most."""
        rest, step = self.rest, max(self._step or 0.0, 1e-9)
        return math.floor(max(rest - self._pauses(done, rest / step), rest / 2) / step)

    def _pauses(self, done: float, steps: float = 0.0) -> float:
        """Time for interruptions of training once `done` of the run is done, with so many steps to come."""
        seconds = 0.0
        for name, every, units in self._plan.pauses:
            if isinstance(every, int):
                seconds += steps / every * units * self._seconds(name)
            elif every is not None:  # how many multiples of `every` lie between `done` and the end
                times = max(0, math.ceil(1 / every - 1e-9) - 1 - math.floor(done / every + 1e-9))
                seconds += times * units * self._seconds(name)
        return seconds

    def _enough(self, done: float) -> str:
        """The setting to write so that the run would not be refused."""
        needed = self.spent + self._after + self._pauses(done)
        return self._larger(5 * math.ceil((1.25 + SPARE) * needed / 5))


def start(
    config: BudgetConfig, file: Path, *, began: float, agreed: Callable[[Any], Any] = lambda each: each
) -> Deadline:
    """The clock of a run, which goes on from what `file` holds of earlier processes.

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

    def larger(seconds: float) -> str:
        hours = seconds / 3600
        needed = {"time": seconds, "energy": hours * (config.power or 0), "money": hours * (config.price or 0)}
        words = [f"sbatch --time={math.ceil(seconds / 60)}"] if config.time == "slurm" else []
        given = {name: getattr(config, name) for name in needed}
        short = [name for name, value in given.items() if isinstance(value, float) and value < needed[name]]
        return " and ".join([*words, *(f"budget.{name}={needed[name]:.4g}" for name in short)])

    return Deadline(min(limits), began=began, spent_s=spent, state=state, larger=larger, agreed=agreed)


def require_end(config: BudgetConfig) -> None:
    """Raise ConfigError where a run is to end with its Slurm job, and this process runs in none."""
    if config.time == "slurm":
        _slurm_end()


def _slurm_end() -> float:
    """When Slurm will end the job that this process runs in, in seconds since 1970."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        raise ConfigError(
            "budget.time=slurm: this is no Slurm job, or its Slurm does not tell when it will end "
            "(SLURM_JOB_END_TIME). Write the time itself, such as budget.time=90m."
        )
    return float(end)


def plan(config: RunConfig, *, held_out: int, test: int, peers: int = 1) -> TimePlan:
    """Everything that a run does besides training steps.

    Args:
        held_out: Tokens of the held-out rows.
        test: Tokens of the test rows.
        peers: Models that train together, the best of which is shipped.
    """
    every = config.evaluate.every
    evaluations = peers * (1.0 if config.average.method == "none" else 2.0)
    after = {
        "evaluation": (0.0 if every is None else evaluations) + (peers if peers > 1 else 0),
        "samples": 0.0 if every is None else 1.0,
        "checkpoint": 3.0,  # one that may stand before the last step, its own, and the adapter's
        "load": 1.0,
        "scoring": 1 + test / held_out,
        "answers": 1.0 + (test > 0),
        "report": 2.0,
    }
    pauses = [Pause("evaluation", every, evaluations), Pause("samples", every), Pause("checkpoint", config.save.every)]
    return TimePlan(after, pauses, steady=config.freeze.policy == "none")


@contextmanager
def kept(deadline: Deadline, file: Path) -> Iterator[None]:
    """Write the state of a limited run's clock to `file` every BEAT seconds, so that a killed run counts its time."""
    if not deadline.limited:
        yield
        return
    over = threading.Event()

    def write() -> None:
        # Without fsync, which takes time: a write that outlives the process is enough.
        aside = file.with_name(f".{file.name}.unfinished")
        with suppress(OSError):  # a full disk is reported by the files that must be written
            aside.write_text(json.dumps(deadline.state()))
            os.replace(aside, file)

    def beat() -> None:
        while not over.wait(BEAT):
            write()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        write()


def process_began() -> float:
    """When this process began, by `time.monotonic`."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - time.time() + float(psutil.Process().create_time())
    # psutil counts from a boot time that the kernel tells in whole seconds.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    per_second: int = os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / per_second)
