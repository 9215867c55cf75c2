"""The members of a sweep: the run that each combination of values is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.config import task_facts
from workbench.config.checks import row_checks
from workbench.config.expansions import distill_expansion, member_runs
from workbench.config.expansions.member_runs import Run, Trial
from workbench.config.sections.run_sections import RunSections

MOST = 1000
"""Members of a sweep."""


def trials(config: Run) -> list[Trial[Run]]:
    """Every member of a sweep, in order.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    over, folds = config.sweep.over, config.sweep.folds
    member_runs.require(_of_folds(config) if folds else _misfits(config))
    if folds:
        held_out = [{"data.fold.of": folds, "data.fold.number": number} for number in range(folds)]
        base = {**config.model_dump(mode="json"), **config.as_task(), "sweep": {}}
        return member_runs.trials(config, base, [f"fold={n}" for n in range(folds)], held_out, section="sweep.folds")
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    names = [member_runs.folder_name(settings) for settings in combinations]
    if len(set(names)) < len(names):
        names = [f"{number:03}-{name}" for number, name in enumerate(names)]
    base = {**config.model_dump(mode="json"), **config.as_task(), "sweep": {}}
    members = member_runs.trials(config, base, names, combinations, section="sweep.over")
    twice = [key for key in over if len({str(trial.settings[key]) for trial in members}) < len(over[key])]
    member_runs.require([(f"sweep.over.{key}", _TWICE) for key in twice])
    return members


def shared(config: Run) -> Run:
    """The first member with the sweep's own seed: model, data and held-out rows are those of all members."""
    return trials(config)[0].config.model_copy(update={"seed": config.seed})


def shipped_values(values: Mapping[str, Any], folder: Path, members: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config.yaml in the run directory `folder`, as those of the run whose adapter it ships.

    Of a sweep or search that is its best member with its own seed, which decides the held-out rows.

    Args:
        members: Its table, which `OverFacts.table` names.
    """
    over = task_facts.OVER.get(str(values.get("recipe")))
    if over is None or over.table is None:
        return distill_expansion.shipped_values(values, folder)
    best = [each["settings"] for each in members.get("members", ()) if each["member"] == members["best"]]
    settings = {key: value for each in best for key, value in each.items() if key != "seed"}
    base = {**values, "recipe": values.get("of") or over.of, "of": None, **{name: {} for name in over.sections}}
    if over.own_clock:
        base["budget"] = {"tokens": (values.get("budget") or {}).get("tokens")}
    return member_runs.written(base, settings)


def _of_folds(config: RunSections) -> list[tuple[str, str]]:
    """Mistakes of a sweep over folds that are known before any member is looked at."""
    mistakes = []
    if config.task.output is None or not config.task.folds or config.reward.kind != "outcome":
        what = "reward.kind=process" if config.reward.kind != "outcome" else f"of={config.task.name}"
        apart = "data.fold.of=5 data.fold.number=0, and so on, run one fold each"
        mistakes.append(("sweep.folds", f"makes an ensemble of rewards of pairs, not with {what}; there {apart}."))
    if config.sweep.over:
        mistakes.append(("sweep.over", "sweep.folds has one member for each fold. Leave one of the two out."))
    if config.save.ship == "best" or config.average.method != "none":
        why = "save.ship=best and average would choose by the rows that the out-of-fold score is measured on"
        mistakes.append(("sweep.folds", f"{why}. Write save.ship=last, evaluate.patience=null, and leave average out."))
    return [*mistakes, *_of_time(config), *misfits(config, "a sweep")]


def _of_time(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.budget.timed:
        yield "budget", "a sweep cannot end in time. Write train.steps or budget.tokens, of each member."


def _misfits(config: RunSections) -> list[tuple[str, str]]:
    over = config.sweep.over
    refused = {key: member_runs.refusal(config, key, recipe="sweep", over=over) for key in over}
    mistakes = [(f"sweep.over.{key}", why) for key, why in refused.items() if why]
    if math.prod(map(len, over.values())) < 2:
        mistakes.append(("sweep.over", "needs two members or more, such as {train.learning_rate: [1.0e-4, 1.0e-3]}."))
    if (count := math.prod(map(len, over.values()))) > MOST:
        mistakes.append(("sweep.over", f"{count:,} members; {MOST:,} at most. Write fewer values."))
    return [*mistakes, *_of_time(config), *misfits(config, "a sweep")]


def misfits(config: RunSections, recipe: str) -> Iterator[tuple[str, str]]:
    """Mistakes of a recipe that compares members, `recipe` in words, whatever they differ in."""
    if config.evaluate.every is None:
        yield "evaluate.every", f"{recipe} compares held-out losses. Write evaluate.every=0.25."
    if config.data.select.by_backbone:
        select = config.data.select
        recipes = task_facts.names(lambda task: select.by in task.chooses)
        yield "data.select", f"by={select.by} is for recipe={recipes}. Write {select.random_instead}."
    if config.data.sampling.by != "all":
        yield "data.sampling", f"members of {recipe} train on the same rows. Leave it out."
    if config.grow.is_on and config.over is not None and config.over.own_clock:
        yield "grow", f"{recipe} stops members early, and grow needs the whole run. Leave it out."
    if config.data.mix.by == "learned":
        yield "data.mix", "by=learned gives each member rows of its own. Write data.mix.by=weight."
    if reason := row_checks.curriculum_refusal(config, recipe):
        yield "data.curriculum", reason
    if reason := row_checks.length_refusal(config, recipe):
        yield "data.length_warm_up", reason
    if config.trackers:
        yield "trackers", f"{recipe} sends nothing anywhere. Leave it out."


_TWICE = "duplicate value. Write each once."
