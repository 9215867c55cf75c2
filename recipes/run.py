"""`workbench run`: the recipe that a configuration names, in a run directory of its own."""

from __future__ import annotations

import time
from pathlib import Path

from workbench import clocking, files, report, runs
from workbench.config import RunConfig
from workbench.engine import Watcher
from workbench.errors import ResumeError, Stopped, WorkbenchError
from workbench.recipes import classify, crossval, distill, sft, sweep

RECIPES = {
    "sft": sft.main,
    "mlm": sft.main,
    "classify": classify.main,
    "crossval": crossval.main,
    "sweep": sweep.main,
    "distill": distill.main,
}


def run(config: RunConfig, *, out: Path, resume: bool, watcher: Watcher, began: float | None = None) -> Path:
    """Run `config` in the directory `out`; returns that directory, whose report says how it ended.

    Args:
        began: When its wall clock began, by `time.monotonic`; by default now.
    """
    began = time.monotonic() if began is None else began
    if resume and config.budget.timed and files.read_json(out / "manifest.json").get("status") == "done":
        raise ResumeError(f"{out} is done, and its time is over. `workbench evaluate {out}` scores it again.")
    directory = runs.start(out, config, resume=resume)
    watcher.say(f"Run directory: {directory.path}")
    clock = directory.path / "clock.json"
    try:
        directory.timer = clocking.start(config.budget, clock, began=began)
        with clocking.kept(directory.timer, clock):
            RECIPES[config.recipe](config, directory, watcher)
    except Stopped as stopped:
        directory.note(status="stopped", reason=str(stopped))
        report.write(directory.path)
        raise Stopped(f"{stopped}\nContinue with: --out {directory.path} --resume") from None
    except BaseException as error:
        told = isinstance(error, WorkbenchError)
        directory.note(status="failed", reason=str(error) if told else f"{type(error).__name__}: {error}")
        report.write(directory.path)
        raise
    finally:
        directory.close()
    return directory.path
