"""Members as runs of their own: a directory that verbs take, scores of what each saved, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.config.yaml_text import dump_yaml
from workbench.evaluation import comparison
from workbench.recipes.single.single_run import SingleRun
from workbench.runs import files, metrics_log, provenance, run_directory, score_files
from workbench.runs.run_directory import Run
from workbench.training import early_stopping


def opened(run: Run, trial: Trial[RunConfig]) -> Run:
    """The directory of a member as that of a run of its own."""
    if not (run.path / "config.yaml").exists():
        text = dump_yaml(trial.config.model_dump(mode="json"))
        run.note(name=trial.name, created=datetime.now(UTC).isoformat(timespec="seconds"), status="waiting")
        files.write_bytes(run.path / "config.yaml", text.encode())
    facts = {"versions": run_directory.versions(), "hardware": run_directory.hardware()}
    run.note(git_commit=run_directory.git_commit(), **facts)
    return run


def finish(single: SingleRun[Any, Any]) -> None:
    """Score what a member saved, and note that it has ended; one that is scored, or saved nothing, is left as it is."""
    run = single.run
    if run.ranks.agreed(run.adapter.exists() and run.manifest.get("status") != "done"):
        single.callback.say(f"Member {run.home.name}:")
        provenance.note_data(run, {name: rows.facts() for name, rows in single.rows.items()})
        single.finish()
    run.note(ended=True)


def row(trial: Trial[RunConfig], own: Run) -> dict[str, Any]:
    """A member so far, as its table shows it."""
    lines, done = metrics_log.read(own.path), own.adapter.exists()
    failure = own.manifest.get("reason") if not done and own.manifest.get("status") == "failed" else None
    watched = [line for line in lines if "held_out_loss" in line]
    judged = [(early_stopping.criterion(line, trial.config.evaluate), number) for number, line in enumerate(watched)]
    criterion, number = min((pair for pair in judged if math.isfinite(pair[0])), default=(None, None))
    best = {} if number is None else watched[number]
    running = "training" if lines else "waiting"
    return {
        "member": trial.name,
        "settings": trial.settings,
        "status": "failed" if failure else "done" if done else running,
        "steps": len(lines),
        "held_out_loss": watched[-1]["held_out_loss"] if watched and math.isfinite(judged[-1][0]) else None,
        "best_held_out_loss": best.get("held_out_loss"),
        "best_step": best.get("step"),
        "last": judged[-1][0] if watched and math.isfinite(judged[-1][0]) else None,
        "best": criterion,
        "seconds": lines[-1]["elapsed_s"] if lines else None,
        "trainable": own.manifest.get("model", {}).get("trainable"),
        "reason": failure,
    }


def copy_missing(source: Run, target: Run, name: str) -> None:
    """Copy a file of a run directory where the other one has none."""
    if (source.home / name).exists() and not (target.path / name).exists():
        files.write_bytes(target.path / name, (source.home / name).read_bytes())


def over_seeds(members: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Statistics of every score of members that differ in nothing but their seed, for each combination of the others.

    Args:
        members: Each with `settings`, and `scores` by split and name.

    Returns:
        Of each combination its `settings` without the seed, and `scores` by split and name, each as `statistics`.
        Bounds of a member's own scores are left out.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for each in members:
        key = str({name: value for name, value in each["settings"].items() if name != "seed"})
        groups.setdefault(key, []).append(each)
    return [
        {
            "settings": {name: value for name, value in group[0]["settings"].items() if name != "seed"},
            "scores": {
                split: {
                    name: statistics([own["scores"].get(split, {}).get(name) for own in group])
                    for name in dict.fromkeys(name for own in group for name in own["scores"].get(split, {}))
                    if not score_files.is_bound(name)
                }
                for split in dict.fromkeys(split for own in group for split in own["scores"])
            },
        }
        for group in groups.values()
    ]


def statistics(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, sample standard deviation and Student's 95 % interval of the mean, over the values that are numbers.

    `sd` is None for fewer than two, the bounds also where all are equal, which says nothing of other seeds.
    """
    known = np.asarray([value for value in values if value is not None and math.isfinite(value)], dtype=np.float64)
    low, high = comparison.mean_interval(known) or (None, None)
    return {
        "mean": float(known.mean()) if len(known) else None,
        "sd": float(known.std(ddof=1)) if len(known) > 1 else None,
        "low": low,
        "high": high,
        "seeds": len(known),
    }
