"""`workbench run`: the recipe that a configuration names, in a run directory of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workbench import report
from workbench.config import RunConfig, plugins
from workbench.config.expansions.member_runs import Trial
from workbench.config.sections.distill_config import TEACHER
from workbench.errors import ResumeError, Stopped, WorkbenchError
from workbench.models import backbones
from workbench.recipes.over.fleet_training import adapters
from workbench.recipes.single import start_adapter, streamed_rows, token_reference
from workbench.recipes.task import implementation, main_of
from workbench.recipes.verbs import layout, start_checks
from workbench.recipes.verbs.start_checks import PLAIN
from workbench.runs import deadline, files, process_memory, provenance, run_directory, units
from workbench.runs.ranks import ALONE, Ranks, joined, launched, require_same, restarted
from workbench.runs.resume_command import resume_command
from workbench.runs.run_directory import Run
from workbench.runs.run_log import RunLog
from workbench.training import determinism, thread_choice
from workbench.training.callbacks import Callback
from workbench.training.capacity import available
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
    require_same(ranks, hashlib.sha256(f"{resume} {out} {config.model_dump_json()}".encode()).hexdigest())
    determinism.prepare(config)
    config = backbones.with_arriving_weights(config)
    asked = config.data
    config = streamed_rows.local(config, ranks, callback.say)
    chosen = layout.decided(config, ranks, begun=out if resume else None)
    config = chosen.config.model_copy(update={"data": config.data})
    start_checks.require(config, ranks, memory=not resume and not chosen.tried)
    if resume and config.budget.timed and files.read_json(out / "manifest.json").get("status") == "done":
        raise ResumeError(f"{out} is done, and its time is over. `workbench evaluate {out}` scores it again.")
    if resume and not config.sweep.over and "parts" in files.read_json(out / "decision.json"):
        raise ResumeError(f"{out} is a blend, which trains nothing. Resume its parts, and blend them again as --out.")
    directory = _entered(out, config.model_copy(update={"data": asked}), resume=resume, ranks=ranks)
    log = log or RunLog()
    if ranks.first:
        log.open(directory.path)
    callback.say(f"Run directory: {directory.path}")
    if not ranks.alone or config.distributed.sharded:
        callback.say(chosen.sentence(ranks.world))
        directory.note(**{layout.NOTE: chosen.told(ranks.world)})
    clock = directory.path / "clock.json"
    try:
        directory.deadline = deadline.start(config.budget, clock, began=began, agreed=ranks.agreed)
        with deadline.kept(directory.deadline, clock), thread_choice.as_begun(directory):
            if ranks.first:
                note_inputs(config, directory)
            main_of(config, at_once)(config, directory, callback)
    except Stopped as stopped:
        directory.note(status="stopped", reason=str(stopped))
        _report(directory)
        ended = Stopped(f"{stopped}\nContinue with: {resume_command(directory.home)}")
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


def _entered(out: Path, config: RunConfig, *, resume: bool, ranks: Ranks) -> Run:
    """The run directory, which the first of the processes starts."""
    forget_peak(backbones.device())  # of an earlier run in this process, which knows its device by now
    directory = run_directory.start(out, config, resume=resume, ranks=ranks) if ranks.first else None
    ranks.wait()
    return directory or run_directory.follow(out, resume=resume, ranks=ranks)


def _report(directory: Run) -> None:
    if directory.ranks.first:
        report.write(directory.path)


def note_inputs(config: RunConfig, run: Run) -> None:
    """Note what the run reads; raises ResumeError where it goes on with other files than it began with.

    What few recipes read is imported for them alone: each import takes a part of the time to the first step.
    """
    own = [*config.plugins, *filter(None, (config.tta.function, config.data.curriculum.function))]
    provenance.note_files(run, "your code", plugins.fingerprints(own))
    if config.model.id != TEACHER:
        provenance.note_files(run, "backbone", backbones.file_digests(config.model))
    template = config.model.chat_template
    if template is not None and template.is_file():
        provenance.note_files(run, "chat template", {str(template): provenance.digest(template)})
    if token_reference.wanted(config):
        wanted = token_reference.of_tokens(config)
        provenance.note_files(run, "reference", token_reference.named(wanted, config).source.files)
    if config.reinforce.start is not None:
        start = start_adapter.folder(config.reinforce.start)
        adapter, written = start / "adapter", start / "config.yaml"
        start_digests = provenance.digests(adapter, title=config.reinforce.start) if adapter.is_dir() else {}
        start_digests |= {str(written): provenance.digest(written)} if written.is_file() else {}
        provenance.note_files(run, "start", start_digests)
    for title, digests in implementation(config).files(config).items():
        provenance.note_files(run, title, digests)
    if config.rewards:
        from workbench.evaluation import rewards

        failed = run.before.get("status") == "failed" and str(run.before.get("reason")).startswith("rewards")
        provenance.note_files(run, "rewards", rewards.digests(config.rewards), corrected=failed)
    if config.distill.teacher.id is not None:
        from workbench.distillation import teacher_sources

        try:
            file_digests = teacher_sources.find(config.distill.teacher, config.model).files
        except WorkbenchError:
            return  # it may be gone once a cache holds all that it says; where it is needed, the recipe says so
        provenance.note_files(run, "teacher", file_digests)


BYTES = 16
"""Bytes of memory for each trained parameter: value, gradient and the optimizer's two moments, in float32."""


def at_once(config: RunConfig, trials: Sequence[Trial[RunConfig]], callback: Callback, ranks: Ranks = ALONE) -> int:
    """Members that train at the same time, of those that are left; planned where it is not plain that all fit.

    Args:
        ranks: The processes that train them together; the first one decides.
    """
    if config.fleet.at_once != "auto":
        return config.fleet.at_once
    return ranks.agreed(_that_fit(config, trials, callback, ranks) if ranks.first else 0)


def _that_fit(config: RunConfig, trials: Sequence[Trial[RunConfig]], callback: Callback, ranks: Ranks) -> int:
    room = available(backbones.device()) // (ranks.here if backbones.device().type == "cpu" else 1)
    sizes = adapters(config, trials)
    if (4 * sizes[0].total + BYTES * sum(size.trainable for size in sizes)) <= PLAIN * room:
        return len(trials)
    from workbench.recipes.verbs.plans import plan, plan_fleet  # few runs need it

    members = {trial.name: config.fleet.members[trial.name] for trial in trials}
    left = config.model_copy(update={"fleet": config.fleet.model_copy(update={"members": members})})
    planning = partial(plan.plan, devices=ranks.world, memory=None if ranks.alone else room)
    many = plan_fleet.decided(left, planning).fleet.at_once
    assert many != "auto", "it is decided"
    callback.say(f"{many} of {len(trials)} members at a time: as many as fit into {units.size(room)}, by a plan.")
    return many
