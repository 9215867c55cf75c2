"""`workbench run`: the recipe that a configuration names, in a run directory of its own."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from workbench import report
from workbench.config import RunConfig
from workbench.errors import ResumeError, Stopped, WorkbenchError
from workbench.models import backbones
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import main_of
from workbench.recipes.verbs import fleet_size, inputs, start_checks
from workbench.runs import deadline, files, process_memory, run_directory
from workbench.runs.ranks import Ranks, joined, launched, require_same, restarted
from workbench.runs.run_directory import Run
from workbench.runs.run_log import RunLog
from workbench.training import thread_choice
from workbench.training.callbacks import Callback
from workbench.training.step_metrics import forget_peak


def run(
    config: RunConfig,
    *,
    out: Path,
    resume: bool,
    callback: Callback,
    began: float | None = None,
    log: RunLog | None = None,
) -> Path:
    """Run `config` in the directory `out`; returns that directory, whose report says how it ended.

    Args:
        began: When its wall clock began, by `time.monotonic`; by default now.
        log: Becomes the run's log, and keeps what ends it; `callback` writes what it says.
    """
    began = time.monotonic() if began is None else began
    process_memory.keep()
    ranks = joined()
    # A machine that comes anew knows nothing of the restart that it takes part in.
    resume = ranks.any(resume or (restarted() and run_directory.began_since(out, launched())))
    asked = config.data
    config = streamed_rows.local(config, ranks, callback.say)
    solved = config.distributed.zero == "auto"
    if solved:
        config = ranks.agreed(_resumed(config, out) if resume else _solved(config, ranks) if ranks.first else config)
    start_checks.require(config, ranks, memory=not resume and not solved)
    if resume and config.budget.timed and files.read_json(out / "manifest.json").get("status") == "done":
        raise ResumeError(f"{out} is done, and its time is over. `workbench evaluate {out}` scores it again.")
    directory = _entered(out, config.model_copy(update={"data": asked}), resume=resume, ranks=ranks)
    log = log or RunLog()
    if ranks.first:
        log.open(directory.path)
    callback.say(f"Run directory: {directory.path}")
    clock = directory.path / "clock.json"
    try:
        directory.deadline = deadline.start(config.budget, clock, began=began, agreed=ranks.agreed)
        with deadline.kept(directory.deadline, clock), thread_choice.as_begun(directory):
            if ranks.first:
                inputs.require_same(config, directory)
            main_of(config, fleet_size.at_once)(config, directory, callback)
    except Stopped as stopped:
        directory.note(status="stopped", reason=str(stopped))
        _report(directory)
        ended = Stopped(f"{stopped}\nContinue with: --out {directory.home} --resume")
        log.end(ended)
        raise ended from None
    except ResumeError as error:  # the run is as good as before
        directory.note(**directory.before)
        log.end(error)
        raise
    except BaseException as error:
        expected = isinstance(error, WorkbenchError)
        log.end(error)
        directory.note(status="failed", reason=str(error) if expected else f"{type(error).__name__}: {error}")
        _report(directory)
        raise
    finally:
        log.close()
        directory.close()
    return directory.home


def _solved(config: RunConfig, ranks: Ranks) -> RunConfig:
    """The fastest way to carry out the run that fits into the devices at hand."""
    from workbench.recipes.verbs.plans.plan import solve

    return solve(config, devices=ranks.world).require().config


def _resumed(config: RunConfig, out: Path) -> RunConfig:
    """Configuration with the decisions that were taken when the run began."""
    begun = run_directory.begun(out, config)
    train = config.train.model_copy(
        update={name: getattr(begun.train, name) for name in ("checkpointing", "offload_activations")}
    )
    model = config.model.model_copy(update={"weights": begun.model.weights})
    return config.model_copy(update={"distributed": begun.distributed, "train": train, "model": model})


def _entered(out: Path, config: RunConfig, *, resume: bool, ranks: Ranks) -> Run:
    """The run directory, which the first of the processes starts."""
    forget_peak(backbones.device())  # of an earlier run in this process, which knows its device by now
    require_same(ranks, hashlib.sha256(f"{resume} {out} {config.model_dump_json()}".encode()).hexdigest())
    directory = run_directory.start(out, config, resume=resume, ranks=ranks) if ranks.first else None
    ranks.wait()
    return directory or run_directory.follow(out, resume=resume, ranks=ranks)


def _report(directory: Run) -> None:
    if directory.ranks.first:
        report.write(directory.path)
