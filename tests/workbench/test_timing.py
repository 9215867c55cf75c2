"""Runs on a simulated machine, whose speed changes while they go on."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.evaluation.timely import in_time
from workbench.schedules import due
from workbench.timing import Pause, Plan, Timer, phase

TOKENS = 1000
"""Of a step."""


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
    def plan(self) -> Plan:
        after = {"scoring": 1.0, "answers": 1.0, "load": 1.0, "report": 2.5, "checkpoint": 2.0, "evaluation": 1.0}
        return Plan(after, [Pause("evaluation", self.every), Pause("checkpoint", 0.25)], tokens=4 * TOKENS)


@dataclass
class Outcome:
    """What came of a run."""

    ends: float
    shares: list[float]
    """After each step."""
    middles: list[float]
    """In the middle of each step, where the learning rate is read off."""
    answered: int


def go(machine: Machine, job: Job, limit: float, *, timer: Timer | None = None, share: float = 0.0) -> Outcome:
    """A run as the engine and a recipe do it."""
    timer = timer or begun(machine, job, limit)
    timer.plan(job.plan)
    timer.begin(share)
    shares, middles = [share], []
    lengths = itertools.cycle(job.steps)
    live = not share or timer.fits_another()
    while live:
        machine.work(next(lengths))
        middles.append(max(shares[-1], timer.share(ahead=-0.5)))
        before, after = shares[-1], max(shares[-1], timer.share(ahead=0))
        timer.stepped(TOKENS)
        live = timer.fits_another()
        after = after if live else 1.0
        if due(job.every, step=len(shares), before=before, after=after):
            with timer.phase("evaluation"):
                machine.work(job.evaluation)
            live = live and timer.fits_another()
        if due(0.25, step=len(shares), before=before, after=after):
            with timer.phase("checkpoint"):
                machine.work(job.checkpoint)
        shares.append(after if live else 1.0)
    ends, answered = finish(machine, job, timer)
    return Outcome(ends, shares[1:], middles, answered)


def begun(machine: Machine, job: Job, limit: float) -> Timer:
    """The clock of a run that has loaded and scored its backbone."""
    began = machine.now
    machine.work(job.start)
    timer = Timer(limit, began=began, clock=machine)
    with timer.phase("load"):
        machine.work(0.5)
    with timer.phase("scoring"):
        machine.work(job.scoring)
    with timer.phase("answers"):
        machine.work(job.answers)
    return timer


def finish(machine: Machine, job: Job, timer: Timer) -> tuple[float, int]:
    """All that comes after training; when it ends, and how many parts of the answers were written."""
    machine.work(job.checkpoint + 0.5)
    done = {"scoring": 0, "answers": 0, "rest": 0}
    for name, seconds in (("scoring", job.scoring), ("answers", job.answers)):
        if name == "scoring" or timer.left() > 0:
            for _ in in_time(range(job.parts), timer.left):
                machine.work(seconds / job.parts)
                done[name] += 1
    with timer.phase("report"):
        machine.work(job.report)
    if timer.ended and timer.left() > timer.seconds("scoring", 1 / job.parts):
        for _ in in_time(range(100_000), timer.left):
            machine.work(job.scoring / job.parts)
        machine.work(job.report)
    machine.work(job.leaving)
    return timer.spent, done["answers"]
