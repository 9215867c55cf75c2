"""A study of Optuna with a process for each trial, two at a time, stopped by its own pruner; of use through search.py.

    python scripts/bench/peer_optuna.py SETTINGS.json OUT JOBS ETA FIRST

SETTINGS.json holds the words of `workbench run`, the space as lists of values, and the number of trials. Each process
evaluates after every FIRST steps; Optuna hears of each, and kills the process where its pruner says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import RandomSampler


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out, jobs, eta, first = Path(sys.argv[2]), *map(int, sys.argv[3:6])
    out.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = SuccessiveHalvingPruner(min_resource=first, reduction_factor=eta)
    study = optuna.create_study(sampler=RandomSampler(seed=0), pruner=pruner)
    study.optimize(
        lambda trial: _loss(trial, settings, out, first), n_trials=settings["trials"], n_jobs=jobs, catch=RuntimeError
    )
    ended = [str(trial.state.name) for trial in study.trials]
    told = {"best": study.best_value, "params": study.best_params, "states": ended}
    (out / "study.json").write_text(json.dumps(told), encoding="utf-8")


def _loss(trial: optuna.Trial, settings: dict[str, Any], out: Path, first: int) -> float:
    chosen = {key: trial.suggest_categorical(key, values) for key, values in settings["space"].items()}
    folder = out / f"trial-{trial.number:02}"
    words = [*settings["command"], *(f"{key}={value}" for key, value in chosen.items())]
    words += [f"evaluate.every={first}", "--out", str(folder)]
    with (out / f"trial-{trial.number:02}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([sys.executable, "-m", "workbench.cli", "run", *words], stdout=log, stderr=log)
    told = 0
    while process.poll() is None or told < len(_held_out(folder)):
        for step, loss in _held_out(folder)[told:]:
            told += 1
            trial.report(loss, step)
            if trial.should_prune():
                process.kill()
                process.wait()
                raise optuna.TrialPruned
        time.sleep(0.2)
    if process.returncode:
        raise RuntimeError(f"{folder} ended with status {process.returncode}")
    return _held_out(folder)[-1][1]


def _held_out(folder: Path) -> list[tuple[int, float]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["held_out_loss"]) for record in records if "held_out_loss" in record]


if __name__ == "__main__":
    main()
