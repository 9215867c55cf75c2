"""Commands run one at a time and in order, also those of a server that is gone."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from workbench.cli.ui.job_queue import JobQueue

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
        here = tmp_path / ".queue" / f"{trains}.log"
        here.write_text("Loading torch ...\n")
        assert queue.log(trains) == here
        here.unlink()  # as the run does that takes its place
        assert queue.log(trains) == tmp_path / "first" / "log.txt"
        assert queue.log(scores) == tmp_path / ".queue" / f"{scores}.log"
    queue.close()


@pytest.mark.slow
def test_a_job_that_fails_before_its_run_has_a_directory_keeps_its_own_log(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    number = queue.add("run", ("no/recipe", "--out", str(tmp_path / "first")), run="first").number
    _until(queue, lambda: _states(queue) == ["failed"])
    assert queue.log(number).parent == tmp_path / ".queue" and "no/recipe" in queue.log(number).read_text()
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
    assert "expected recipes, adapters or runs" in queue.log(2).read_text()
    began = [job.began or 0.0 for job in queue.jobs]
    assert began == sorted(began)
    queue.close()
    assert left._child is not None and left._child.wait() == 0
