"""Recipes over tasks: folds, sweeps, searches, fleets and students. Their facts, which need no torch."""

from workbench.config.expansions import (
    distill_expansion,
    fleet_expansion,
    rounds_expansion,
    search_expansion,
    sweep_expansion,
)
from workbench.config.task_facts import OverFacts, TaskFacts, names, register_over


def _banked(task: TaskFacts) -> str | None:
    if task.banked:
        return None
    return f"its adapters do not train together in a bank. Write of={names(lambda each: each.banked)}."


def _folded(task: TaskFacts) -> str | None:
    if task.folds:
        return None
    return f"its rows are not held out in folds. Write of={names(lambda each: each.folds)}."


def _fleet(task: TaskFacts) -> str | None:
    if task.fleets:
        return None
    return f"its members cannot have rows of their own in a bank. Write of={names(lambda each: each.fleets)}."


def _answering(task: TaskFacts) -> str | None:
    if task.learns_answers:
        return None
    return f"it does not learn from answers of its own. Write of={names(lambda each: each.learns_answers)}."


def _student(task: TaskFacts) -> str | None:
    if task.students:
        return None
    return f"no teacher says anything of its rows. Write of={names(lambda each: each.students)}."


register_over(
    OverFacts(
        name="crossval",
        line="folds in one bank: out-of-fold scores, ensembles, pseudo-labels, test-time views",
        module="workbench.recipes.over.crossval",
        of="classify",
        stages="workbench.recipes.over.crossval_verbs",
        able=_folded,
        sections=("duplicates", "folds", "pseudo_label", "tta", "correction", "ensemble", "sweep"),
        members=lambda config: [trial.config for trial in sweep_expansion.trials(config)],
        fresh="scores each row by an adapter that never saw it, and that run may have learnt from it",
        spread=True,
        folds=True,
    )
)
register_over(
    OverFacts(
        name="sweep",
        line="settings and seeds in one bank; the best is shipped",
        module="workbench.recipes.over.sweep",
        of="sft",
        able=_banked,
        sections=("sweep",),
        members=lambda config: [trial.config for trial in sweep_expansion.trials(config)],
        table="sweep.json",
        spread=True,
    )
)
register_over(
    OverFacts(
        name="search",
        line="the best of many settings by successive halving, in one bank",
        module="workbench.recipes.over.search",
        of="sft",
        able=_banked,
        sections=("search",),
        members=lambda config: [trial.config for trial in search_expansion.ends(config)],
        own_clock=True,
        table="search.json",
        shared=True,
    )
)
register_over(
    OverFacts(
        name="fleet",
        line="adapters of many users, with rows of their own, over one backbone",
        module="workbench.recipes.over.fleet",
        of="sft",
        able=_fleet,
        sections=("fleet",),
        members=lambda config: [trial.config for trial in fleet_expansion.trials(config)],
        completed=fleet_expansion.with_rows,
        shared=True,
        ships=False,
    )
)
register_over(
    OverFacts(
        name="distill",
        line="a student of a teacher, of an ensemble, or of its peers",
        module="workbench.recipes.over.distill",
        of="sft",
        able=_student,
        sections=("distill",),
        completed=distill_expansion.with_loss,
        members=lambda config: [distill_expansion.as_plain_run(config)],
        fresh="begins with a fresh adapter",
        adapters=False,
    )
)
register_over(
    OverFacts(
        name="rounds",
        line="best-of-n and iterative DPO: answers are sampled, judged and learnt, round after round",
        module="workbench.recipes.over.rounds",
        of="prefer",
        able=_answering,
        sections=("rounds",),
        members=lambda config: [trial.config for trial in rounds_expansion.trials(config)],
        table="rounds.json",
        inspects="workbench.recipes.over.rounds",
        read_by="reinforce",
    )
)
