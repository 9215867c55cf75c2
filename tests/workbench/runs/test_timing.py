"""Runs on a simulated machine, whose speed changes while they go on."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.evaluation.timely import in_time
from workbench.runs.timing import Pause, TimePlan, Timer, phase
from workbench.training.optim.schedules import due

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
    def plan(self) -> TimePlan:
        after = {"scoring": 1.0, "answers": 1.0, "load": 1.0, "report": 2.5, "checkpoint": 2.0, "evaluation": 1.0}
        return TimePlan(after, [Pause("evaluation", self.every), Pause("checkpoint", 0.25)], tokens=4 * TOKENS)


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
        if due(job.every, step=len(shares), before=before, after=after) and (not live or timer.affords("evaluation")):
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


@st.composite
def changing(draw: st.DrawFn) -> Machine:
    """A machine whose speed at most halves or doubles every few seconds."""
    factors, until, factor = [], 0.0, draw(st.sampled_from([0.5, 1.0, 2.0, 3.0]))
    for _ in range(12):
        until += draw(st.floats(4, 40))
        factor = min(3.0, max(0.5, factor * draw(st.sampled_from([0.5, 0.7, 1.4, 2.0]))))
        factors.append((until, factor))
    return Machine([*factors, (1e9, factor)])


jobs = st.builds(
    Job,
    start=st.floats(1, 8),
    scoring=st.floats(0.5, 4),
    answers=st.floats(0, 4),
    evaluation=st.floats(0.3, 2.5),
    report=st.floats(0.1, 0.3),
    leaving=st.floats(0.05, 0.15),
    steps=st.lists(st.floats(0.3, 1.5), min_size=4, max_size=4).map(tuple),
    every=st.sampled_from([None, 0.1, 0.25, 0.5, 10]),
)


@given(machine=changing(), job=jobs, limit=st.sampled_from([90.0, 120.0, 300.0]))
@settings(max_examples=40, deadline=None)
def test_ends_within_the_window_however_the_speed_changes(machine: Machine, job: Job, limit: float) -> None:
    try:
        outcome = go(machine, job, limit)
    except ConfigError:
        assert limit < 120, "there is time for this"
        return
    assert 0.97 * limit <= outcome.ends <= limit
    assert outcome.shares == sorted(outcome.shares)
    assert outcome.shares[-1] == 1
    assert outcome.middles[-1] > 0.75


def test_at_constant_speed_the_schedule_is_that_of_a_known_number_of_steps() -> None:
    outcome = go(Machine(), Job(steps=(1.0,), every=None, checkpoint=0.0), 120.0)
    count = len(outcome.shares)
    assert count > 85
    assert outcome.middles == pytest.approx([(number + 0.5) / count for number in range(count)], abs=0.6 / count)
    assert outcome.middles[-1] > 1 - 1 / count
    assert outcome.answered == Job.parts


@pytest.mark.parametrize("factors", [[(40.0, 1.0), (1e9, 2.0)], [(40.0, 2.0), (1e9, 1.0)], [(30.0, 1.0), (60.0, 2.0)]])
def test_a_change_of_speed_leaves_the_end_of_the_schedule_where_it_is(factors: list[tuple[float, float]]) -> None:
    outcome = go(Machine(factors), Job(), 120.0)
    assert 0.97 * 120 <= outcome.ends <= 120
    assert outcome.middles[-1] > 0.95
    assert outcome.answered == Job.parts


@pytest.mark.parametrize("at", [20.0, 25.0, 30.0, 35.0, 40.0, 50.0])
def test_the_schedule_ends_where_long_steps_become_three_times_as_long(at: float) -> None:
    outcome = go(Machine([(at, 1.0), (1e9, 3.0)]), Job(steps=(2.5,), every=0.5), 80.0)
    assert outcome.middles[-1] > 0.9


def test_answers_are_cut_where_the_machine_becomes_slow_at_the_end() -> None:
    outcome = go(Machine([(102.0, 1.0), (1e9, 2.0)]), Job(), 120.0)
    assert 0.97 * 120 <= outcome.ends <= 120
    assert outcome.answered < Job.parts


def test_an_evaluation_that_leaves_no_time_to_train_waits_for_the_end() -> None:
    outcome = go(Machine([(21.0, 1.0), (38.0, 3.0)]), Job(start=6.0, every=0.5), 60.0)
    assert 0.97 * 60 <= outcome.ends <= 60
    assert outcome.middles[-1] > 0.85
    assert outcome.answered == Job.parts


def test_evaluations_do_not_count_as_training() -> None:
    machine, job = Machine(), Job(steps=(1.0,), scoring=10.0, evaluation=10.0, every=0.5)
    outcome = go(machine, job, 120.0)
    grown = [after - before for before, after in itertools.pairwise([0.0, *outcome.shares[:-1]])]
    assert max(grown) < 1.1 * min(grown)


@pytest.mark.parametrize("killed_after", [5.0, 30.0, 60.0, 80.0])
def test_a_resumed_run_honours_what_was_spent(killed_after: float) -> None:
    machine, job = Machine(), Job()
    first = begun(machine, job, 120.0)
    first.plan(job.plan)
    first.begin(0.0)
    share = 0.0
    while machine.now < killed_after:
        machine.work(1.0)
        share = first.share(ahead=0)
        first.stepped(TOKENS)
    state = json.loads(json.dumps(first.state()))
    saved = share / 2  # the last checkpoint lies far back

    again = Machine(now=1000.0)
    again.work(job.start)
    second = Timer(120.0, began=1000.0, spent_s=state["spent_s"], state=state, clock=again)
    assert second.spent == pytest.approx(first.spent + job.start, abs=1e-3)
    outcome = go(again, job, 120.0, timer=second, share=saved)
    assert 0.97 * 120 <= outcome.ends <= 120
    assert saved <= outcome.shares[0] <= saved + 0.25
    assert outcome.middles[-1] > 0.9


def test_a_run_that_is_over_is_refused_with_what_to_write() -> None:
    machine, job = Machine(), Job()
    timer = begun(machine, job, 30.0)
    timer.plan(job.plan)
    machine.work(8.0)
    with pytest.raises(ConfigError, match=r"budget: 24 of 30 s are spent.*\n.*budget\.time=\d+s or more") as refused:
        timer.begin(0.3)
    enough = float(str(refused.value).split("budget.time=")[1].split("s")[0])
    go(Machine(), job, enough)


def test_a_budget_that_scoring_before_uses_up_is_refused() -> None:
    machine = Machine()
    timer = Timer(30.0, began=0.0, clock=machine)
    timer.require_time("scoring")
    machine.work(29.0)
    with pytest.raises(ConfigError, match="30 s are not enough for scoring"):
        timer.require_time("scoring")


def test_time_in_a_phase_is_no_time_of_a_step() -> None:
    def steps(pause: float) -> Any:
        machine = Machine()
        timer = Timer(100.0, began=0.0, clock=machine)
        timer.plan(replace(Job().plan, after={}, pauses=[]))
        timer.begin(0.0)
        for _ in range(3):
            machine.work(1.0)
            timer.stepped(TOKENS)
            with timer.phase("evaluation"), timer.phase("inside"):
                machine.work(pause)
        return timer.state()["step_s"]

    assert steps(0.5) == steps(7.0) == pytest.approx(1.0)


def test_nothing_is_measured_without_a_clock() -> None:
    with phase(None, "evaluation"):
        pass
