"""What a fork runs is what Python runs: words, files, folder, environment, how it ends, and who takes it along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import forked

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, os, signal, sys, time
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("SAID"), sys.path[0], sys.stdin.read())
atexit.register(print, "at exit")
exec(sys.argv[1])
"""
ENDS = {
    "pass": 0,
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit('a sentence')": 1,
    "raise ValueError('an error')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
}


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_says_and_ends_as_a_new_process_does(end: str, program: str, tmp_path: Path) -> None:
    done = [
        subprocess.run(
            [python, "-u", program, end],
            input="in",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "SAID": "a word"},
        )
        for python in (forked.python(), sys.executable)
    ]
    assert done[0].returncode == done[1].returncode == ENDS[end]
    assert done[0].stdout == done[1].stdout
    assert done[0].stderr.splitlines()[-1:] == done[1].stderr.splitlines()[-1:]


def test_the_command_line_is_beside_it(tmp_path: Path) -> None:
    commands = [[str(Path(forked.python()).parent / "workbench")], [sys.executable, "-m", "workbench.cli.verbs"]]
    done = [
        subprocess.run([*each, "run", "no.yaml"], capture_output=True, text=True, cwd=tmp_path) for each in commands
    ]
    assert done[0].returncode == done[1].returncode == 2
    assert done[0].stderr == done[1].stderr != ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_asked_takes_the_fork_along(number: signal.Signals, program: str) -> None:
    asking = subprocess.Popen(
        [forked.python(), "-u", program, "print(os.getpid()); time.sleep(60)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    asking.stdout.readline()
    child = psutil.Process(int(asking.stdout.readline()))
    asking.send_signal(number)
    asking.communicate(timeout=10)
    assert asking.returncode == -number
    end = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
