"""`workbench lr`: short trainings at many learning rates over one frozen backbone, and the rate that they suggest."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.config import RunConfig
from workbench.config.checks import row_checks
from workbench.config.expansions.member_runs import Trial
from workbench.config.sections.search_config import shown
from workbench.config.task_facts import names
from workbench.errors import ConfigError, TrainingError
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import sweep, sweep_tasks
from workbench.recipes.over.sweep import SweepMember
from workbench.recipes.over.sweep_tasks import SweepTask
from workbench.recipes.single import streamed_rows
from workbench.recipes.verbs import start_checks
from workbench.report import learning_rate_plots
from workbench.runs import files, metrics_log
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer
from workbench.training.callbacks import SILENT, Callback
from workbench.training.optim import rate_choice
from workbench.training.optim.rate_choice import RateChoice
from workbench.training.optim.schedules import total_steps

REACH = 32.0
"""The rates go from the configured one by this factor down and up, where nobody says otherwise."""
STEPS = 24
"""Steps of each training, where nobody says otherwise and the run has as many."""
TABLE, PLOT = "learning_rate.json", "learning_rate.svg"
_MEASURED: dict[str, dict[str, Any]] = {
    "evaluate": {"every": None, "answers": 0, "probe": 0, "dynamics": False, "patience": None},
    "save": {"every": None, "ship": "last"},
    "average": {"method": "none"},
    "budget": {},
    "distributed": {},
}
"""Settings of a short training: nothing but its losses is wanted. Sections that are empty have their defaults."""


class Tried(NamedTuple):
    """A finished search for a learning rate."""

    config: RunConfig
    choice: RateChoice
    steps: int
    """Steps of each short training."""
    whole: int | None
    """Steps of the run itself; None where a budget decides that."""
    repeats: bool
    """Whether rows came more than once, so that late losses are of rows that were learnt from."""
    alone: str | None
    """Why the trainings ran one after another; None: in one bank."""
    folder: Path

    @property
    def suggested(self) -> float:
        """The rate for the whole run."""
        return self.choice.suggested(self.whole)


def rates_between(lowest: float, highest: float, count: int) -> list[float]:
    """So many rates, evenly spaced by their logarithms, in three digits; raises ConfigError where there are none."""
    if not 0 < lowest < highest < math.inf:
        raise ConfigError(
            f"--lowest {lowest:g} --highest {highest:g}: expected two rates above 0, the higher one last. "
            "Write --lowest 1e-4 --highest 1e-1."
        )
    return [float(f"{rate:.2e}") for rate in np.geomspace(lowest, highest, count)]


def find_learning_rate(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    out: Path | str = "lr",
    lowest: float | None = None,
    highest: float | None = None,
    rates: int = 11,
    steps: int | None = None,
    callback: Callback = SILENT,
) -> Tried:
    """Train briefly at each rate, choose one, and write learning_rate.json and learning_rate.svg into `out`.

    All trainings go over one frozen backbone, on the same rows.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe.
        overrides: `key=value` words on top of a file or name.
        out: Folder of the table and the plot.
        lowest: Of the rates; by default the configured one through 32.
        highest: By default the configured one times 32.
        rates: How many.
        steps: Of each training; by default 24, but no more than the run has.
        callback: Shows progress.

    Returns:
        The `suggested` rate for the whole run, and the `choice` with the losses of every rate.

    Raises:
        ConfigError: The recipe trains no single adapter, or draws rows by their losses.
        TrainingError: No rate came to the end of its training.

    Examples:
        >>> import workbench
        >>> words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "batch.size=4"]
        >>> tried = workbench.find_learning_rate("sft/quickstart", words, lowest=1e-4, highest=1e-2, rates=3, steps=8)
        >>> 1e-4 <= tried.suggested <= 1e-2
        True
    """
    config, out = load(recipe, overrides), Path(out)
    data = config.data
    if not config.task.fleets or config.over is not None:
        raise ConfigError(
            f"recipe={config.recipe}: a learning rate is looked for in the training of one adapter. "
            f"Write recipe={names(lambda task: task.fleets)}, and use its rate here."
        )
    if data.sampling.by != "all":
        raise ConfigError(
            f"data.sampling.by={data.sampling.by} draws rows by their losses, so that rates would not be compared on "
            "the same rows. Write data.sampling.by=all."
        )
    if reason := row_checks.curriculum_refusal(config, "the search for a rate"):
        raise ConfigError(f"data.curriculum: {reason}")
    if reason := row_checks.length_refusal(config, "the search for a rate"):
        raise ConfigError(f"data.length_warm_up {reason}")
    if data.select.by_backbone:
        raise ConfigError(
            f"data.select.by={data.select.by} asks the backbone about every row first. "
            f"Write {data.select.random_instead}: the rate is that for as many rows."
        )
    config = streamed_rows.local(config, say=callback.say)
    values = rates_between(
        config.train.learning_rate / REACH if lowest is None else lowest,
        config.train.learning_rate * REACH if highest is None else highest,
        rates,
    )
    files.require_writable(out / TABLE)
    start_checks.require(_short(config, config.train.learning_rate, 1), ALONE)
    with tempfile.TemporaryDirectory(prefix="workbench-lr-") as scratch:
        run = Run(Path(scratch), None, resumed=False)
        task = sweep_tasks.prepare(_short(config, values[0], 1), run, [], callback)
        rows = len(task.shared.rows["train"])
        whole = total_steps(config, rows)
        each = min(STEPS, whole or STEPS) if steps is None else steps
        trials = [Trial(shown(rate), {}, _short(config, rate, each), place) for place, rate in enumerate(values)]
        alone = bank_trainer.refusal(config)
        entries = [SweepMember(trial, run.child(f"members/{number}")) for number, trial in enumerate(trials)]
        # Nobody asks what the backbone scores before: a file in its place keeps it from being measured.
        files.write_json(run.path / "before.json", {"scores": {}, "answers": {}})
        losses = list((_together if alone is None else _one_by_one)(task, entries, callback))
    choice = rate_choice.choose(values, losses, steps=each)
    if choice is None:
        raise TrainingError(f"No rate from {values[0]:g} to {values[-1]:g} came to its end. Write a smaller --lowest.")
    outcome = Tried(config, choice, each, whole, each * config.batch.size > rows, alone, out)
    files.write_json(out / TABLE, _table(outcome))
    learning_rate_plots.write_search(
        out / PLOT, choice, suggested=outcome.suggested, configured=config.train.learning_rate
    )
    return outcome


def sentences(outcome: Tried) -> Iterator[str]:
    """The suggestion, the rule that it comes from, and what makes it uncertain."""
    choice, asked, whole = outcome.choice, outcome.config.train.learning_rate, outcome.whole
    low, high, lowered = choice.lowest.rate, choice.highest.rate, choice.lowered(whole)
    yield f"Suggested: train.learning_rate={outcome.suggested:g} (the recipe has {asked:g})."
    yield (
        f"Rule: the middle of the rates whose mean loss of the last {choice.late} of {outcome.steps} steps cannot be "
        f"told from the lowest, on the same rows step by step: {_range(low, high)}"
        + (
            f"; times {lowered:.2f}, the root of {outcome.steps} through the run's {whole:,} steps."
            if lowered < 1
            else "."
        )
    )
    tried = [each.rate for each in choice.tried]
    if high == tried[-1]:
        yield f"It is the highest that was tried: a higher one may be better. Write --highest {4 * tried[-1]:g}."
    if choice.best.rate == tried[0]:
        yield f"The best one is the lowest that was tried: a lower one may be better. Write --lowest {tried[0] / 4:g}."
    if outcome.repeats:
        yield (
            f"{outcome.steps} steps draw rows more than once: losses are partly of rows that were learnt from, which "
            "may favour too high a rate. Fewer --steps or more rows would tell better."
        )
    if whole is None or whole > 2 * outcome.steps:
        longer = (
            "how long the run is, its budget decides"
            if whole is None
            else f"the run is {whole / outcome.steps:.3g} times as long"
        )
        yield (
            f"Doubt: {longer}, and how much lower its best rate is than that of a short one differs between tasks. "
            "Where the run is dear, compare the suggestion with its half and its double in a sweep."
        )


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _short(config: RunConfig, rate: float, steps: int) -> RunConfig:
    """A training of so many steps at one rate, with the run's schedule from its beginning to its end."""
    values = config.model_dump(mode="json")
    values |= {name: values[name] | own if own else {} for name, own in _MEASURED.items()}
    if config.schedule.name == "plateau":  # which follows evaluations, and there are none
        values["schedule"] |= {"name": "constant", "patience": None, "drop": None, "floor": 0.0}
    values["train"] |= {"learning_rate": rate, "steps": steps, "epochs": None}
    return RunConfig.model_validate(values | {"trackers": ()})


def _together(task: SweepTask, entries: Sequence[SweepMember], callback: Callback) -> Iterator[list[float]]:
    """Losses of the steps of each member of one bank."""
    with suppress(TrainingError):  # every rate exploded, which their losses tell
        sweep.training(task, entries, callback).trainer.work()
    for entry in entries:
        yield [line["loss"] for line in metrics_log.read(entry.run.path)]


def _one_by_one(task: SweepTask, entries: Sequence[SweepMember], callback: Callback) -> Iterator[list[float]]:
    """Losses of the steps of each member, trained alone; what it leaves on disk is removed before the next."""
    for trial, own in entries:
        callback.say(f"Rate {trial.name}:")
        with suppress(TrainingError):
            task.single(trial.config, own).train()
        yield [line["loss"] for line in metrics_log.read(own.path)]
        shutil.rmtree(own.path)


def _table(tried: Tried) -> dict[str, Any]:
    choice = tried.choice
    return {
        "configured": tried.config.train.learning_rate,
        "suggested": tried.suggested,
        "alike": [choice.lowest.rate, choice.highest.rate],
        "best": choice.best.rate,
        "steps": tried.steps,
        "whole_steps": tried.whole,
        "late_steps": choice.late,
        "rates": [asdict(each) for each in choice.tried],
    }
