"""Terminal output of a run: progress, sentences, and a clean stop on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from workbench.runs import units
from workbench.runs.run_log import RunLog

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminal:
    """A callback that shows progress; SIGTERM or Ctrl-C makes the run finish its step, save and end.

    Args:
        quiet: Print nothing.
        log: Gets all sentences, and the progress lines that are printed without a terminal.
    """

    def __init__(self, *, quiet: bool = False, log: RunLog | None = None) -> None:
        self._log = log
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]:.3f}  held-out {task.fields[held_out]}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s  left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task: TaskID | None = None
        self._held_out = "-"
        self._stop = False
        self._done = 0
        """Last step that was shown."""
        self._first: tuple[int, float] | None = None
        """Number of the first step that was shown, and seconds of training after it."""
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._request_stop) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._progress.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Update the progress bar; without a terminal, print a line for every twentieth of the run."""
        if record["step"] <= self._done:  # another training, or another member of a bank
            self._first, self._held_out = None, "-"
        self._done = record["step"]
        if "held_out_loss" in record:
            self._held_out = "-" if record["held_out_loss"] is None else f"{record['held_out_loss']:.3f}"
        fields = {"loss": record["loss"], "speed": record["tokens_per_second"], "held_out": self._held_out}
        if self.console.is_terminal:
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task("", total=total, completed=record["step"] - 1, **fields)
            self._progress.update(self._task, total=total, completed=record["step"], **fields)
        if record["step"] % max(1, total // 20) == 0 or "held_out_loss" in record or record["step"] == total:
            line = (
                f"step {record['step']}/{total}  loss {record['loss']:.3f}  held-out {self._held_out}  "
                f"{record['tokens_per_second']:,.0f} tokens/s  {record['elapsed_s']:.0f} s{self._left(record, total)}"
            )
            if not self.console.is_terminal:
                self.console.print(line, soft_wrap=True)
            if self._log is not None:
                self._log.write(line)
        if record["step"] == total and self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None

    def _left(self, record: dict[str, Any], total: int) -> str:
        """Time left, by the pace of this process so far; empty after its first step, which is slower than others."""
        here = (record["step"], record["elapsed_s"])
        self._first = self._first or here
        steps, seconds = here[0] - self._first[0], here[1] - self._first[1]
        if not steps or here[0] >= total:
            return ""
        return f"  about {units.duration(seconds / steps * (total - here[0]))} left"

    def say(self, text: str) -> None:
        """Print a sentence above the progress bar."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)
        if self._log is not None:
            self._log.write(text)

    def stop_requested(self) -> bool:
        """Whether a signal asked the run to end."""
        return self._stop

    def _request_stop(self, number: int, _: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self.say("Stopping: what is done is being saved. Once more to stop at once.")
