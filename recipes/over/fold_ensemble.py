"""Reward models of folds: each becomes a run directory, and scores the pairs that it did not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench import report
from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.config.yaml_text import dump_yaml
from workbench.evaluation import reward_scores
from workbench.recipes.over.sweep_tasks import SweepTask
from workbench.runs import files, units
from workbench.runs.run_directory import Run

OUT_OF_FOLD = "out_of_fold.parquet"


def finish(task: SweepTask, run: Run, members: Sequence[tuple[Trial[RunConfig], Run]]) -> dict[str, Any]:
    """Score each member on its own fold; returns `out_of_fold`, the scores of all pairs together.

    Every pair is scored once, by the member that did not train on it; out_of_fold.parquet has them with their fold. A
    fold without an adapter, whose member failed, is left out.
    """
    import pandas as pd  # 0.2 s, which a plan need not wait for

    tables = []
    for trial, own in members:
        if not own.adapter.exists():
            continue
        files.write_bytes(own.path / "config.yaml", dump_yaml(trial.config.model_dump(mode="json")).encode())
        task.single(trial.config, own).finish()
        table = pd.read_parquet(own.path / "predictions.parquet")
        tables.append(table.assign(fold=trial.config.data.fold.number))
    every = pd.concat(tables, ignore_index=True)
    files.write_bytes(run.path / OUT_OF_FOLD, every.to_parquet())
    judged = every[~every["tie"]]
    gaps = (judged["chosen_reward"] - judged["rejected_reward"]).to_numpy()
    scores = units.rounded(reward_scores.of_gaps(gaps))
    return {"out_of_fold": {"pairs": float(len(every)), **scores}}


def publish(run: Run, best: Run, more: dict[str, Any]) -> dict[str, Any]:
    """Scores and predictions of the run are those of the member whose adapter it ships, which `finish` scored already.

    Args:
        best: Directory of the member.
        more: Further scores to stand in scores.json.
    """
    files.write_bytes(run.path / "predictions.parquet", (best.path / "predictions.parquet").read_bytes())
    scores = files.read_json(best.path / "scores.json") | more
    files.write_json(run.path / "scores.json", scores)
    run.note(status="done")
    report.write(run.path)
    return scores
