"""Cross-validation: every row is scored by an adapter that did not train on it.

Folds are runs of the task, trained together in one bank, each with a run directory of its own. Rows with one label
each go further: stages that out-of-fold rows decide about follow (`crossval_labelled`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench import report
from workbench.config import DataConfig, RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.config.sections.basic_sections import ID
from workbench.crossval import gains
from workbench.crossval.prediction import OUT_OF_FOLD
from workbench.data import named_sets
from workbench.data.rows import read_rows
from workbench.errors import TrainingError
from workbench.recipes.over import crossval_words, member_results, sweep, sweep_tasks
from workbench.recipes.over.crossval_words import Kept
from workbench.recipes.single.single_run import SingleRun
from workbench.recipes.task import MembersAtOnce, ScoringOptions, implementation
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]
LOSSES = "held_out_losses.parquet"
"""Losses of single rows, in the run directories of tasks of tokens."""
_BOUNDS = ("_low", "_high")
"""Ends of the names of bounds, of which a mean over folds says nothing."""


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Train, choose and score as `config` says; returns what stands in scores.json."""
    if config.crossvalidates:
        from workbench.recipes.over import crossval_labelled

        return crossval_labelled.main(config, run, callback)
    trials, shared = sweep_expansion.trials(config), sweep_expansion.shared(config)
    task = sweep_tasks.prepare(shared, run, trials, callback)
    unlabelled = crossval_words.prepare(config, task.shared) if crossval_words.wanted(config) else None
    sweep.train_all(config, task, run, sweep.member_runs(config, run, trials), callback)
    if config.refits:
        refit(config, run, callback)
    if not run.ranks.first:
        return {}

    # Each fold is scored by what its member saved, which trained on the others.
    members = [task.single(trial.config, sweep.member_run(run, trial)) for trial in trials]
    score(members)
    if not crossval_words.wanted(config):
        return finish(config, run, members)
    kept = crossval_words.decide(
        config, run, trials, members, unlabelled, lambda tables: pooled(config, out_of_fold(config, members, tables))
    )
    score(kept.members)
    return finish(config, run, kept.members, kept)


def score(members: Sequence[SingleRun[Any, Any]]) -> None:
    """Write the scores and predictions of each member into its run directory, where they are not there yet.

    Raises:
        TrainingError: A member has no adapter, or no finite loss.
    """
    for number, single in enumerate(members):
        own = single.run
        if own.adapter.exists():
            member_results.opened(own, Trial(own.path.name, {}, single.config, number))
            member_results.finish(single)
        if not (own.path / "scores.json").exists():
            raise TrainingError(f"{own.path.name}: {own.manifest.get('reason', 'its held-out loss is not finite')}")


def out_of_fold(
    config: RunConfig, members: Sequence[SingleRun[Any, Any]], tables: Sequence[pd.DataFrame]
) -> pd.DataFrame:
    """The tables of all members as one, with the id, repeat, fold, seed and member of each row."""
    import pandas as pd  # 0.2 s, which a plan need not wait for

    table = pd.concat(
        [
            table.assign(
                repeat=each.config.data.fold.repeat,
                fold=str(each.config.data.fold.number),
                seed=each.config.seed - config.seed,
                member=each.run.path.name,
            )
            for each, table in zip(members, tables, strict=True)
        ],
        ignore_index=True,
    )
    known = ids(config.data)
    table.insert(1, ID, [known.get(place, place) for place in table["row"]])
    return table


def ids(config: DataConfig) -> dict[str, str]:
    """The id of each training row by its place, of the files in which `data.columns` names one."""
    own = config.training_files
    prefixes = named_sets.prefixes({name: each.train for name, each in own.items()})
    return {
        prefixes[name] + row.place: str(row.columns.get(each.columns[ID]))
        for name, each in own.items()
        if ID in each.columns
        for row in read_rows(each.train, each)
    }


def pooled(config: RunConfig, table: pd.DataFrame) -> dict[str, float]:
    """Scores of all rows together; rows of one repeat and seed are all rows once."""
    import pandas as pd

    found = [implementation(config).pooled(config, own) for _, own in table.groupby(["repeat", "seed"])]
    return dict(pd.DataFrame(found).mean().to_dict())


def refit(config: RunConfig, run: Run, callback: Callback) -> None:
    """Train one adapter on all rows, which the run ships; of several processes the first one does."""
    if run.ranks.first and not run.adapter.exists():
        callback.say("One adapter on all rows ...")
        own, alone = Run(run.path / "members" / "refit", None, resumed=True), sweep_expansion.refit(config)
        if not own.adapter.exists():
            implementation(alone).begin(alone, own, callback).train(score_later=True)
        with files.new_folder(run.adapter) as aside:
            shutil.copytree(own.adapter, aside, dirs_exist_ok=True)
    run.ranks.wait()


def finish(config: RunConfig, run: Run, members: Sequence[SingleRun[Any, Any]], kept: Kept | None = None) -> Scores:
    """Write what the folds say together: out-of-fold predictions, scores of each fold and of all, and the report.

    Args:
        kept: What stages decided, where there were any.
    """
    import pandas as pd

    found = [files.read_json(each.run.path / "scores.json") for each in members]
    for name, target in {"predictions.parquet": OUT_OF_FOLD, LOSSES: f"out_of_fold_{LOSSES}"}.items():
        if (members[0].run.path / name).exists():
            tables = [pd.read_parquet(each.run.path / name) for each in members]
            files.write_bytes(run.path / target, out_of_fold(config, members, tables).to_parquet())
    if kept is not None and kept.outputs is not None:
        pairs = [(each, each.rows["held_out"], own) for each, own in zip(kept.members, kept.outputs, strict=True)]
        found = [old | {"after": m.scored(rows, p).scores} for old, (m, rows, p) in zip(found, pairs, strict=True)]
        tables = [m.table(rows, p, labelled=True) for m, rows, p in pairs]
        files.write_bytes(run.path / OUT_OF_FOLD, out_of_fold(config, members, tables).to_parquet())
    folds = [
        {
            "member": each.run.path.name,
            "repeat": each.config.data.fold.repeat,
            "fold": str(each.config.data.fold.number),
            "seed": each.config.seed - config.seed,
            "train_rows": len(each.rows["train"]),
            "rows": len(each.rows["held_out"]),
            "scores": scores["after"],
        }
        for each, scores in zip(members, found, strict=True)
    ]
    sizes = {key: float(np.mean([fold[key] for fold in folds])) for key in ("train_rows", "rows")}
    summary = {
        when: gains.fold_summary(
            [{name: value for name, value in each[when].items() if not name.endswith(_BOUNDS)} for each in found],
            train_rows=sizes["train_rows"],
            test_rows=sizes["rows"],
        )
        for when in ("before", "after")
    }
    more = {"folds": folds, "summary": summary["after"], "refits": config.refits and not config.task.averages(config)}
    if kept is None:
        files.write_json(run.path / "stages.json", {"stages": [], **more})
    else:
        kept.log.write(**more)
    scores: Scores = {when: {name: each["mean"] for name, each in own.items()} for when, own in summary.items()}
    for name, each in summary["after"].items():
        scores["after"] |= {f"{name}{end}": each[end[1:]] for end in _BOUNDS}
    scores["after"] |= pooled(config, pd.read_parquet(run.path / OUT_OF_FOLD))
    files.write_bytes(run.path / "predictions.parquet", (run.path / OUT_OF_FOLD).read_bytes())
    if config.data.test is not None:  # of what the run ships; nothing was chosen by these rows
        scores["test"] = implementation(config).evaluate(run.path, config, ScoringOptions())
    files.write_json(run.path / "scores.json", scores)
    run.note(status="done", model=members[0].run.manifest["model"])
    report.write(run.path)
    return scores
