"""Progress is a line in place on a terminal, and whole lines with the time left in a file."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from workbench.cli.console import Terminal
from workbench.runs import run_log
from workbench.runs.run_log import RunLog


def _record(step: int, *, seconds: float) -> dict[str, float]:
    return {"step": step, "loss": 2.0, "tokens_per_second": 100.0, "elapsed_s": seconds}


def _terminal(*, interactive: bool, log: RunLog | None = None) -> tuple[Terminal, io.StringIO]:
    """A terminal, or a file, of 80 columns."""
    terminal, out = Terminal(log=log), io.StringIO()
    terminal.console.file = out
    terminal.console._force_terminal = interactive
    terminal.console.width = 80
    return terminal, out


def _trained(terminal: Terminal, steps: int) -> None:
    for step in range(1, steps + 1):
        terminal.step(_record(step, seconds=10.0 + 2 * step), total=steps)


def test_a_file_gets_whole_lines_with_the_time_left() -> None:
    terminal, out = _terminal(interactive=False)
    with terminal:
        terminal.say("A sentence " + "that is long " * 10)
        for _ in range(2):  # as rounds of a cross-validation do
            _trained(terminal, 4)
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 2 * 4 and "\x1b" not in out.getvalue() and all(lines)
    for first in (1, 5):
        assert "left" not in lines[first]
        assert [line.rpartition("about ")[2] for line in lines[first + 1 : first + 3]] == ["4.0 s left", "2.0 s left"]
        assert lines[first + 3].startswith("step 4/4") and "left" not in lines[first + 3]


def test_a_loss_and_a_pace_are_those_of_the_training_that_is_shown() -> None:
    terminal, out = _terminal(interactive=False)
    with terminal:
        terminal.step(_record(7, seconds=70.0), total=8)
        terminal.step({**_record(8, seconds=80.0), "held_out_loss": 7.5}, total=8)
        terminal.step(_record(1, seconds=1.0), total=4)  # of another member, which has joined
        terminal.step(_record(2, seconds=2.0), total=4)
        terminal.step({**_record(3, seconds=3.0), "held_out_loss": None}, total=4)
    held_out = [line.split("held-out ")[1].split()[0] for line in out.getvalue().splitlines()]
    assert held_out == ["-", "7.500", "-", "-", "-"]
    assert "about 2.0 s left" in out.getvalue().splitlines()[3]


def test_a_terminal_gets_one_line_for_each_training() -> None:
    terminal, out = _terminal(interactive=True)
    with terminal:
        for _ in range(2):
            _trained(terminal, 40)
    assert out.getvalue().count("\n") <= 4 and "40/40" in out.getvalue()
    assert Console(file=io.StringIO()).is_terminal is False


@pytest.mark.parametrize("interactive", [True, False])
def test_a_log_gets_the_lines_of_a_file_wherever_progress_is_shown(interactive: bool, tmp_path: Path) -> None:
    log = RunLog()
    terminal, _ = _terminal(interactive=interactive, log=log)
    log.open(tmp_path)
    with terminal:
        terminal.say("A sentence " + "that is long " * 10)
        _trained(terminal, 40)
    plain, out = _terminal(interactive=False)
    with plain:
        plain.say("A sentence " + "that is long " * 10)
        _trained(plain, 40)
    ends = [line.rstrip() for line in out.getvalue().splitlines()]
    assert (tmp_path / run_log.NAME).read_text().splitlines() == ends and len(ends) == 21


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_an_end_and_says_what_is_true_in_every_phase(number: signal.Signals) -> None:
    terminal, out = _terminal(interactive=False)
    with terminal:
        signal.raise_signal(number)
        assert terminal.stop_requested() and "what is done is being saved" in out.getvalue()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
