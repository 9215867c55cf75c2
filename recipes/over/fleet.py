"""A fleet: runs of many users in one bank over one backbone; one that has ended leaves, and one that waits joins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from workbench import report
from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.errors import ResumeError, WorkbenchError
from workbench.models import backbones
from workbench.recipes.over import fleet_board, member_results
from workbench.recipes.over.fleet_bank import FleetMember, prepared
from workbench.recipes.over.fleet_board import FleetBoard
from workbench.recipes.over.fleet_training import FleetTraining, trials
from workbench.recipes.single import streamed_rows
from workbench.recipes.single.single_run import Scores
from workbench.recipes.task import MembersAtOnce
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Train every member; returns means of their scores before and after, as they stand in scores.json.

    Raises:
        TrainingError: every member failed; this is the first one's.
    """
    if not run.resumed:
        shutil.rmtree(run.path / "members", ignore_errors=True)
        (run.path / fleet_board.TABLE).unlink(missing_ok=True)
    all_ = trials(config)
    board = FleetBoard.of(run, all_, config.fleet.at_once)

    # Data first, of every member: what is wrong with that of one is known before another has trained for hours.
    unscored = [trial for trial in all_ if not board.is_over(trial)]
    with _new_ones_removed(board, unscored):
        members = {
            trial.name: read(trial, member_results.opened(board.run_of(trial), trial), callback) for trial in unscored
        }
    if board.rest and not board.at_once:
        left = [members[trial.name].trial for trial in board.rest]
        board.at_once = at_once(config, left, callback, run.ranks)
    if board.rest:
        FleetTraining(config, board, members, callback).work()

    # Score what will be shipped: reload each saved adapter, do not trust the live one.
    for member in members.values():
        member_results.finish(member.single)
    return finish(board, callback) if run.ranks.first else {}


@contextmanager
def _new_ones_removed(board: FleetBoard, trials: Sequence[Trial[RunConfig]]) -> Iterator[None]:
    """Leave no directories of new members where the rows of one are refused: the fleet's says why."""
    try:
        yield
    except WorkbenchError:
        for own in map(board.run_of, trials):
            if not own.resumed:
                shutil.rmtree(own.path)
        if not board.run.resumed:
            shutil.rmtree(board.run.path / "members", ignore_errors=True)
        raise


def read(
    trial: Trial[RunConfig], run: Run, callback: Callback, *, loader: backbones.Loader = backbones.load
) -> FleetMember:
    """A member with its rows; what is wrong with them is said of it by name."""
    try:
        local = streamed_rows.local(trial.config, run.ranks, callback.say)
        return prepared(Trial(trial.name, trial.settings, local, trial.number), run, callback, loader=loader)
    except ResumeError:
        raise
    except WorkbenchError as error:
        raise type(error)(f"fleet.members.{trial.name}: {error}") from None


def finish(board: FleetBoard, callback: Callback) -> Scores:
    """Write scores.json and the report of the whole; say who failed."""
    run, scores = board.run, board.scores()
    files.write_json(run.path / "scores.json", scores)
    board.write()
    failed = {row["member"]: row["reason"] for row in board.rows() if row["status"] == "failed"}
    for name, reason in failed.items():
        callback.say(f"{name} failed, and has no adapter: {reason}")
    run.note(status="done", failed=sorted(failed))
    report.write(run.path)
    return scores
