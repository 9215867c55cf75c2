"""Commands run one at a time and in order, also those of a server that is gone."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.cli.ui.job_queue import JobQueue, QueuedCommand, state_folder
from workbench.errors import ConfigError

QUICK = ("--help",)
"""Words with which any verb ends at once, and well."""


def _until(queue: JobQueue, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, queue.jobs
        queue.step()
        time.sleep(0.02)


def _states(queue: JobQueue) -> list[str]:
    return [job.state for job in queue.jobs]


@contextmanager
def _live_run(folder: Path) -> Iterator[None]:
    """Somebody else's, as long as the block lasts."""
    folder.mkdir()
    with (folder / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_nothing_starts_while_a_run_of_somebody_else_lives(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    with _live_run(tmp_path / "elsewhere"):
        number = queue.add("ls", QUICK, run="first").number
        assert _states(queue) == ["waiting"] and queue.busy("first") and not queue.busy("second")
        assert queue.stop(number) and not queue.stop(number) and not queue.stop(99)
    assert _states(queue) == ["stopped"] and not queue.busy("first")
    queue.close()


def test_a_queue_that_cannot_go_on_says_why_and_tries_again(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    with _live_run(tmp_path / "elsewhere"):
        number = queue.add("ls", QUICK, run="first").number
    queue.log(number).mkdir()  # where the output of the job should go
    queue.go_on()
    assert "Is a directory" in queue.trouble and _states(queue) == ["waiting"]
    queue.log(number).rmdir()
    queue.go_on()
    assert queue.trouble == "" and _states(queue) == ["running"]
    _until(queue, lambda: _states(queue) == ["done"])
    queue.close()


def test_the_log_of_a_run_is_that_of_its_job_once_it_is_there(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    with _live_run(tmp_path / "elsewhere"):
        trains, scores = (queue.add(verb, QUICK, run="first").number for verb in ("run", "evaluate"))
        here = state_folder(tmp_path) / f"{trains}.log"
        here.write_text("Loading torch ...\n")
        assert queue.log(trains) == here
        here.unlink()  # as the run does that takes its place
        assert queue.log(trains) == tmp_path / "first" / "log.txt"
        assert queue.log(scores) == state_folder(tmp_path) / f"{scores}.log"
    queue.close()


@pytest.mark.slow
def test_a_job_that_fails_before_its_run_has_a_directory_keeps_its_own_log(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    number = queue.add("run", ("no/recipe", "--out", str(tmp_path / "first")), run="first").number
    _until(queue, lambda: _states(queue) == ["failed"])
    assert queue.log(number).parent == state_folder(tmp_path) and "no/recipe" in queue.log(number).read_text()
    queue.close()


@pytest.mark.slow
def test_commands_run_one_after_another_and_outlive_their_server(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    queue.add("ls", QUICK, run="a")
    queue.add("ls", ("nothing",), run="b")
    queue.add("ls", QUICK, run="c")
    assert _states(queue) == ["running", "waiting", "waiting"]
    pid = queue.jobs[0].pid
    assert pid is not None and psutil.Process(pid).is_running()
    queue.close()
    left = queue

    queue = JobQueue(tmp_path)  # the next server
    assert _states(queue)[1:] == ["waiting", "waiting"]
    most = 0

    def ended() -> bool:
        nonlocal most
        most = max(most, _states(queue).count("running"))
        return all(job.ended for job in queue.jobs)

    _until(queue, ended)
    assert most == 1
    # The first left no manifest and was another server's child: nobody knows that it ended well.
    assert _states(queue) == ["failed", "failed", "done"]
    assert "expected recipes, a group of them such as sft, adapters or runs" in queue.log(2).read_text()
    began = [job.began or 0.0 for job in queue.jobs]
    assert began == sorted(began)
    queue.close()
    assert left._child is not None and left._child.wait() == 0


def test_a_queue_in_the_folder_of_runs_is_nobodys(tmp_path: Path) -> None:
    """Whoever made the folder wrote it."""
    planted = tmp_path / ".queue" / "jobs.json"
    planted.parent.mkdir()
    job = asdict(QueuedCommand(1, "ls", ("ls", "recipes"), "x"))
    planted.write_text(json.dumps({"jobs": [job, {**job, "number": 2, "state": "running", "pid": os.getpid()}]}))
    queue = JobQueue(tmp_path)
    queue.go_on()
    assert queue.jobs == [] and queue.trouble == "" and not state_folder(tmp_path).is_relative_to(tmp_path / ".queue")
    queue.close()


FOREIGN = {
    "another beginning": {"born": 1.0},
    "no beginning": {"born": None},
    "other words": {},
    "no process": {"pid": None},
    "no such process": {"pid": 2**22 + 1},
    "a pid that is none": {"pid": -1},
    "a pid beyond all": {"pid": 2**70},
}


@pytest.mark.parametrize("facts", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("state", ["running", "stopping"])
def test_no_process_is_ended_or_waited_for_that_is_not_the_jobs(
    tmp_path: Path, facts: dict[str, Any], state: str
) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        own = {"pid": sleeper.pid, "born": psutil.Process(sleeper.pid).create_time(), "state": state, **facts}
        job = asdict(QueuedCommand(1, "run", ("run", "x"), "x"))
        (state_folder(tmp_path) / "jobs.json").write_text(json.dumps([{**job, **own}]))
        queue = JobQueue(tmp_path)
        queue.stop(1)
        queue.go_on()
        assert _states(queue) == ["failed"] and queue.trouble == "" and sleeper.poll() is None
        queue.close()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_job_of_an_earlier_server_is_known_and_stopped(tmp_path: Path) -> None:
    words = ("run", "x")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-m", "workbench.cli", *words])
    try:
        started = psutil.Process(process.pid)
        while not started.cmdline():  # its words come a moment after its beginning
            time.sleep(0.01)
        job = QueuedCommand(1, "run", words, "x", "running", process.pid, started.create_time())
        (state_folder(tmp_path) / "jobs.json").write_text(json.dumps([asdict(job)]))
        queue = JobQueue(tmp_path)
        queue.go_on()
        assert _states(queue) == ["running"] and queue.stop(1) and process.wait(10) == -15
        queue.go_on()
        assert _states(queue) == ["failed"]
        queue.close()
    finally:
        process.kill()
        process.wait()


DAMAGED = ["", "{", "[" * 100_000, "{}", '{"jobs": []}', "[1]", '[{"number": "x"}]', '[{"number": 1}]', "\x00", "null"]
DAMAGED += ['[{"number": 1, "verb": "run", "words": 3, "run": "x"}]', '"\\ud800"']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_queue_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = state_folder(tmp_path) / "jobs.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        queue = JobQueue(tmp_path)
    assert queue.jobs == [] and "damaged" in caplog.text and path.with_suffix(".damaged").read_text() == text
    queue.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_queue_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    state_folder(tmp_path).chmod(mode)
    with pytest.raises(ConfigError, match="others may write in it"):
        JobQueue(tmp_path)
