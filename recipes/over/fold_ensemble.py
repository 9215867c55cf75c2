"""Reward models of folds together: scores of the pairs that each did not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.evaluation import reward_scores
from workbench.runs import files, units
from workbench.runs.run_directory import Run

OUT_OF_FOLD = "out_of_fold.parquet"


def out_of_fold(run: Run, trials: Sequence[Trial[RunConfig]]) -> dict[str, Any]:
    """The scores of all pairs together, each rated by the member that did not train on it: `out_of_fold`.

    out_of_fold.parquet has them with their fold. A fold without an adapter, whose member failed, is left out.
    """
    import pandas as pd  # 0.2 s, which a plan need not wait for

    tables = [
        pd.read_parquet(path).assign(fold=trial.config.data.fold.number)
        for trial in trials
        if (path := run.path / "members" / trial.name / "predictions.parquet").exists()
    ]
    every = pd.concat(tables, ignore_index=True)
    files.write_bytes(run.path / OUT_OF_FOLD, every.to_parquet())
    judged = every[~every["tie"]]
    gaps = (judged["chosen_reward"] - judged["rejected_reward"]).to_numpy()
    scores = units.rounded(reward_scores.of_gaps(gaps))
    return {"out_of_fold": {"pairs": float(len(every)), **scores}}
