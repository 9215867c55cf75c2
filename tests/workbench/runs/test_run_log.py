"""A run keeps what its console says, once, wherever it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from tests.stopping import stop_after
from workbench.errors import ConfigError, Stopped
from workbench.runs import run_log
from workbench.runs.run_log import RunLog

SHORT = ["data.limit=24", "data.held_out=0.2", "train.steps=4", "batch.size=4", "data.max_tokens=64"]
SHORT += ["evaluate.every=2", "evaluate.answers=0", "evaluate.samples=0", "save.every=2"]


def _lines(folder: Path) -> list[str]:
    return (folder / run_log.NAME).read_text().splitlines()


def test_lines_wait_for_the_directory_and_are_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog()
    log.write("before")
    log.open(tmp_path)
    log.write("a bar \x1b[2K\rof \x07progress\nbelow it")
    assert _lines(tmp_path) == ["before", "a bar [2Kof progress", "below it"], "without being closed"
    log.close()
    log.write("after the end")
    run_log.add(tmp_path, "its outcome  \n\n")
    assert _lines(tmp_path)[3:] == ["its outcome"]


def test_the_newest_lines_are_kept_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST", 1000)
    log = RunLog()
    log.open(tmp_path)
    for number in range(400):
        log.write(f"line {number}")
        assert (tmp_path / run_log.NAME).stat().st_size <= 1000
    first, *rest = _lines(tmp_path)
    assert first == "(older lines were dropped)" and len(rest) > 40
    assert rest == [f"line {number}" for number in range(400 - len(rest), 400)], "whole lines, the newest"


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    log = RunLog()
    log.open(tmp_path / "not there")
    log.write("a sentence")
    log.end(ValueError("a crash"))
    log.close()


def test_a_mistake_is_told_in_its_words_and_a_crash_with_its_traceback(tmp_path: Path) -> None:
    log = RunLog()
    log.open(tmp_path)
    for error in (ConfigError("rank: write 8."), Stopped("Stopped."), KeyError("lost")):
        try:
            raise error
        except (ConfigError, Stopped, KeyError) as raised:
            log.end(raised)
    lines = _lines(tmp_path)
    assert lines[:3] == ["Error: rank: write 8.", "Stopped.", "Traceback (most recent call last):"]
    assert lines[-1] == "KeyError: 'lost'"


PRINTS = """
import os, sys
from pathlib import Path
from workbench.runs.run_log import RunLog, add
print("read", flush=True)
log = RunLog()
log.open(Path(sys.argv[1]))
print("Run directory", file=sys.stderr)
log.write("Run directory")
print("a table", flush=True)
add(Path(sys.argv[1]), "a table")
os.write(2, b"words of a library\\n")
"""


def test_the_log_takes_the_place_of_the_file_that_a_queue_keeps(tmp_path: Path) -> None:
    printed, run = tmp_path / "7.log", tmp_path / "run"
    run.mkdir()
    (run / run_log.NAME).write_text("of an earlier process\n")
    with printed.open("wb") as out:
        environment = {**os.environ, run_log.CONSOLE: str(printed)}
        subprocess.run([sys.executable, "-c", PRINTS, str(run)], stdout=out, stderr=out, env=environment, check=True)
    assert _lines(run) == ["of an earlier process", "read", "Run directory", "a table", "words of a library"]
    assert not printed.exists(), "each line is kept once"


def test_a_file_that_is_not_its_console_stays(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("mine\n")
    environment = {**os.environ, run_log.CONSOLE: str(other)}
    command = [sys.executable, "-c", PRINTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert other.read_text() == "mine\n" and done.stdout == "read\na table\n"
    assert _lines(tmp_path) == ["Run directory", "a table"]


def test_a_run_keeps_what_it_says_and_goes_on_with_it(
    tmp_path: Path, stories: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words, out = [f"model.id={stories}", *SHORT], tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        workbench.run("sft/quickstart", words, out=out)
    lines = _lines(out)
    told = capfd.readouterr()
    assert told.out == "" and [line for line in told.err.splitlines() if line.startswith(("step", "Run"))] == [
        line for line in lines if line.startswith(("step", "Run"))
    ]
    assert (
        lines[0] == f"Run directory: {out}"
        and lines[-1] == f"Continue with: workbench run {out}/config.yaml --out {out} --resume"
    )
    workbench.run("sft/quickstart", words, out=out, resume=True, quiet=True)
    more = _lines(out)
    assert more[: len(lines)] == lines and more[len(lines)] == lines[0]
    assert any(line.startswith("step 4/4  loss ") for line in more[len(lines) :]), "also where nothing is shown"


def test_what_ends_a_run_stands_in_its_log_and_not_in_that_of_the_next(tmp_path: Path, stories: str) -> None:
    words, out = [f"model.id={stories}", *SHORT, "data.on_bad_row=refuse"], tmp_path / "run"
    (tmp_path / "rows.jsonl").write_text('{"thing": 1}\n' * 30)
    with pytest.raises(workbench.errors.WorkbenchError) as refused:
        workbench.run("sft/quickstart", [*words, f"data.train={tmp_path / 'rows.jsonl'}"], out=out, quiet=True)
    assert f"Error: {refused.value}" in (out / run_log.NAME).read_text()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("workbench.recipes.tasks.sft.text_run.prepare", lambda *_, **__: 1 / 0)
        workbench.run("sft/quickstart", words, out=out, quiet=True)
    lines = _lines(out)
    assert "thing" not in "".join(lines) and lines[-1] == "ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in lines
