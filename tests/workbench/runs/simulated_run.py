"""A run on a machine whose speed changes, in simulated time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from workbench.runs.deadline import Deadline, Pause, TimePlan
from workbench.training.optim.schedules import due


@dataclass
class Machine:
    """A clock that goes on by work alone; work takes the longer, the larger the factor of that time is."""

    factors: list[tuple[float, float]] = field(default_factory=list)
    """(until, factor), in order; after the last one the factor is 1."""
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Do what takes so long at factor 1."""
        for until, factor in self.factors:
            if self.now < until:
                done = min(seconds, (until - self.now) / factor)
                self.now += done * factor
                seconds -= done
        self.now += seconds


@dataclass(frozen=True)
class Job:
    """What a run consists of, in seconds at factor 1."""

    start: float = 8.0
    scoring: float = 4.0
    answers: float = 3.0
    evaluation: float = 2.5
    report: float = 0.4
    leaving: float = 0.2
    checkpoint: float = 0.05
    steps: tuple[float, ...] = (0.9, 1.0, 1.1, 1.0)
    every: float | int | None = 0.25
    parts: int = 20
    """That scoring and answers are cut into."""

    @property
    def plan(self) -> TimePlan:
        after = {"scoring": 1.0, "answers": 1.0, "load": 1.0, "report": 2.0, "checkpoint": 3.0, "evaluation": 1.0}
        return TimePlan(after, [Pause("evaluation", self.every), Pause("checkpoint", 0.25)])


@dataclass
class Outcome:
    """What came of a run."""

    ends: float
    shares: list[float]
    """After each step."""
    middles: list[float]
    """In the middle of each step, where the learning rate is read off."""
    scored: bool
    """Whether there was time to score everything."""


def go(machine: Machine, job: Job, limit: float, *, clock: Deadline | None = None, share: float = 0.0) -> Outcome:
    """A run as the trainer and a recipe do it."""
    clock = clock or begun(machine, job, limit)
    clock.plan(job.plan)
    clock.begin(share)
    shares, middles, live = [share], list[float](), True
    lengths = itertools.cycle(job.steps)
    while live:
        machine.work(next(lengths))
        clock.stepped()
        before = shares[-1]
        middles.append(clock.share(before, 0.5))
        after = clock.share(before, 1.0)
        live = clock.fits_another()
        after = after if live else 1.0
        if due(job.every, step=len(shares), before=before, after=after) and (not live or clock.affords("evaluation")):
            with clock.phase("evaluation"):
                machine.work(job.evaluation)
            live = live and clock.fits_another()
        if due(0.25, step=len(shares), before=before, after=after):
            with clock.phase("checkpoint"):
                machine.work(job.checkpoint)
        shares.append(after if live else 1.0)
    scored = finish(machine, job, clock)
    return Outcome(clock.spent, shares[1:], middles, scored)


def begun(machine: Machine, job: Job, limit: float) -> Deadline:
    """The clock of a run that has loaded and scored its backbone."""
    began = machine.now
    machine.work(job.start)
    clock = Deadline(limit, began=began, clock=machine)
    with clock.phase("load"):
        machine.work(0.5)
    with clock.phase("scoring"):
        machine.work(job.scoring)
    with clock.phase("answers"):
        machine.work(job.answers)
    return clock


def finish(machine: Machine, job: Job, clock: Deadline) -> bool:
    """All that comes after training; whether there was time to score everything."""
    machine.work(job.checkpoint + 0.5)
    for part in [job.scoring / job.parts] * job.parts + [job.answers / job.parts] * job.parts:
        if clock.over:
            break
        machine.work(part)
    with clock.phase("report"):
        machine.work(job.report)
    machine.work(job.leaving)
    return not clock.over or clock.spent < clock.limit_s
