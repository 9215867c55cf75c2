"""The members of a sweep: the run that each combination of values is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.config import task_facts
from workbench.config.checks import crossval_checks, row_checks, view_checks
from workbench.config.expansions import distill_expansion, member_runs
from workbench.config.expansions.member_runs import Run, Trial
from workbench.config.sections.run_sections import RunSections
from workbench.schema import Section

_LABELLING = ("unlabelled", "rounds", "threshold", "agreement", "cap", "least_gain", "sure")
"""Settings of pseudo-labels that folds which are runs read."""
MOST = 1000
"""Members of a sweep."""


def trials(config: Run) -> list[Trial[Run]]:
    """Every member of a sweep, or of a cross-validation whose folds are runs, in order.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    if config.over is not None and config.over.folds:
        return _folds(config)
    over = config.sweep.over
    member_runs.require(_misfits(config))
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    names = [member_runs.folder_name(settings) for settings in combinations]
    if len(set(names)) < len(names):
        names = [f"{number:03}-{name}" for number, name in enumerate(names)]
    base = _plain(config)
    if "seed" in over:
        base["data"]["seed"] = config.rows_seed
    return _different(config, base, names, combinations)


def _different(
    config: Run, base: dict[str, Any], names: list[str], combinations: list[dict[str, Any]]
) -> list[Trial[Run]]:
    """The members of `sweep.over`, of which no two are equal."""
    members, over = member_runs.trials(config, base, names, combinations, section="sweep.over"), config.sweep.over
    twice = [key for key in over if len({str(trial.settings[key]) for trial in members}) < len(over[key])]
    member_runs.require([(f"sweep.over.{key}", _TWICE) for key in twice])
    return members


def banks(config: Run) -> list[Trial[Run]]:
    """The cross-validations over the same folds that `sweep.over` makes of one; raises Mistakes: as `trials`."""
    over = config.sweep.over
    member_runs.require(_of_over(config, "cross-validation", free="model."))
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    base = {**config.model_dump(mode="json"), "sweep": {}}
    base["data"]["seed"], base["folds"]["nested"] = config.rows_seed, None
    names = [f"{number}-{member_runs.folder_name(each)}" for number, each in enumerate(combinations)]
    return _different(config, base, names, combinations)


def outer(config: Run) -> list[Trial[Run]]:
    """The cross-validations of `folds.nested`, each of which sees all outer folds but one."""
    assert config.folds.nested is not None, "it is asked for"
    base = config.model_dump(mode="json")
    base["data"]["seed"] = config.rows_seed
    base["folds"] |= {"nested": None, "refit": False}
    wanted = [{"data.fold": {"of": config.folds.nested, "number": number}} for number in range(config.folds.nested)]
    names = [f"fold-{number}" for number in range(config.folds.nested)]
    return member_runs.trials(config, base, names, wanted, section="folds.nested")


def _folds(config: Run) -> list[Trial[Run]]:
    """The runs of a cross-validation: fold by fold, the seeds of a fold together."""
    folds, alike = config.folds, config.duplicates
    member_runs.require([*_fold_misfits(config), *misfits(config, "a cross-validation")])
    numbers = list(itertools.product(range(folds.repeats), range(folds.k), range(folds.seeds)))
    dealt: dict[str, Any] = {"of": folds.k, "group": folds.group, "column": folds.column, "time": folds.time}
    dealt["near"] = None if alike.on_duplicate == "ignore" else alike.cutoff(pictures=False)
    wanted = [
        {
            "data.fold": {**dealt, "repeat": repeat, "number": fold},
            "data.seed": config.rows_seed,
            "seed": config.seed + seed,
        }
        for repeat, fold, seed in numbers
    ]
    names = [f"repeat-{repeat}-fold-{fold}-seed-{seed}" for repeat, fold, seed in numbers]
    return member_runs.trials(config, _plain(config), names, wanted, section="folds")


def refit(config: Run) -> Run:
    """The run of one adapter on all rows of a cross-validation; its held-out loss is one of rows that train."""
    fold = trials(config)[0].config.data.fold.model_dump() | {"trains": True}
    return type(config).model_validate(member_runs.written(_plain(config), {"data.fold": fold}))


def _plain(config: Run) -> dict[str, Any]:
    """Values of a member, before its own settings."""
    sections = config.over.sections if config.over is not None else ()
    return {**config.model_dump(mode="json"), **config.as_task(), **{name: {} for name in sections}}


def _fold_misfits(config: RunSections) -> Iterator[tuple[str, str]]:
    """Settings of stages that need one label a row, or that would choose by the rows that a fold is scored on."""
    of, alike = f"of={config.task.name}", config.duplicates
    stages = config.task.word_stages
    read = {"pseudo_label": _LABELLING if stages else (), "tta": type(config.tta).model_fields if stages else ()}
    for name in ("pseudo_label", "tta", "correction", "ensemble", "sweep"):
        if not read.get(name) and config.differs(name):
            yield name, f"is a stage of rows with one label each, not of {of}. Leave it out."
    for name, keys in read.items():
        section: Section = getattr(config, name)
        for key in type(section).model_fields if keys else ():
            if key not in keys and section.differs(key):
                yield f"{name}.{key}", f"is for rows with one label each. With {of} leave it out."
    for key, _, why in (each.partition(": ") for each in view_checks.mistakes(config) if stages):
        yield key, why
    if stages and config.differs("pseudo_label"):
        if config.pseudo_label.unlabelled is None:
            yield "pseudo_label", "names no rows without labels. Write pseudo_label.unlabelled=FILE, or leave it out."
        if config.folds.time is not None:
            yield "folds.time", "trains on the past alone, and pseudo_label would look at later rows. Leave one out."
    if idle := crossval_checks.idle_stages(config):
        yield "folds.keep", f"names {', '.join(idle)}, which this run does not have. Leave it out."
    for name in type(alike).model_fields:
        if name not in ("on_duplicate", "threshold") and alike.differs(name):
            yield f"duplicates.{name}", f"is for rows with one label each. With {of} leave it out."
    if alike.on_duplicate in ("keep_one", "weight"):
        yield "duplicates.on_duplicate", f"with {of} near-duplicates share a fold. Write together, or ignore."
    if config.data.differs("held_out"):
        yield "data.held_out", "recipe=crossval validates on folds; folds.k says how many. Leave it out, or write 0.05."
    if config.data.streaming.on:
        yield "data.streaming", "reads a part of the rows at a time, and folds look at all of them. Leave it out."
    if config.folds.nested is not None:
        why = f"is for of=classify, whose stages rows out of fold choose. With of={config.task.name} name rows that"
        yield "folds.nested", f"{why} nothing sees as data.test, and leave it out."
    if config.data.drop_suspects:
        yield "data.drop_suspects", f"is for rows with one label each. With {of} leave it out."
    if config.budget.timed:
        yield "budget", "a cross-validation cannot end in time. Write train.steps or budget.tokens, of each member."
    if config.save.ship == "best" or config.evaluate.patience is not None or config.average.method != "none":
        yield (
            "save",
            "ship=best, evaluate.patience and average would choose by the rows that the out-of-fold score is measured "
            "on. Write save.ship=last, evaluate.patience=null, and leave average out.",
        )


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


def _misfits(config: RunSections) -> list[tuple[str, str]]:
    mistakes = _of_over(config, "sweep")
    if config.budget.timed:
        mistakes.append(("budget", "a sweep cannot end in time. Write train.steps or budget.tokens, of each member."))
    return [*mistakes, *misfits(config, "a sweep")]


def _of_over(config: RunSections, recipe: str, *, free: str | None = None) -> list[tuple[str, str]]:
    """Mistakes in `sweep.over`; keys that begin with `free` may differ although members of a sweep share them."""
    over = config.sweep.over
    judged = [key for key in over if free is None or not key.startswith(free)]
    refused = {key: member_runs.refusal(config, key, recipe=recipe, over=over) for key in judged}
    mistakes = [(f"sweep.over.{key}", why) for key, why in refused.items() if why]
    if math.prod(map(len, over.values())) < 2:
        mistakes.append(("sweep.over", "needs two members or more, such as {train.learning_rate: [1.0e-4, 1.0e-3]}."))
    if (count := math.prod(map(len, over.values()))) > MOST:
        mistakes.append(("sweep.over", f"{count:,} members; {MOST:,} at most. Write fewer values."))
    return mistakes


def misfits(config: RunSections, recipe: str) -> Iterator[tuple[str, str]]:
    """Mistakes of a recipe that compares members, `recipe` in words, whatever they differ in."""
    if config.evaluate.every is None and not (config.over is not None and config.over.folds):
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
