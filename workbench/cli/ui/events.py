"""Server-sent events of a page: runs, jobs, rows of metrics and lines of logs as they come.

The id of an event says how much of each curve and log was sent, so that a client that was cut off goes on from there:
it sends the id back as `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.cli.ui.job_queue import JobQueue
from workbench.cli.ui.run_folder import RunFolder
from workbench.errors import WorkbenchError
from workbench.runs import run_log

LOOK_S = 0.5
"""Seconds between two looks at the files."""
_ALIVE_S = 15.0
_LOG_BYTES = 2**18
"""Bytes of the end of a log that are sent at first."""


@dataclass(frozen=True)
class Watched:
    """Everything that a page shows."""

    curves: Sequence[tuple[str, str]] = ()
    """Runs and their members, "" for the run itself."""
    log: int | None = None
    """A job whose log is shown."""
    run: str | None = None
    """A run whose log is shown."""


@dataclass
class EventSource:
    """One page's events."""

    runs: RunFolder
    queue: JobQueue
    watched: Watched
    closing: Callable[[], bool]
    """Whether the server ends."""
    positions: dict[str, str] = field(default_factory=dict)
    """How much of each curve was sent, and of the log."""
    _sent: dict[str, str] = field(default_factory=dict)

    async def stream(self) -> AsyncIterator[str]:
        """Yield events until the server ends."""
        quiet = 0.0
        while not self.closing():
            new_events = await asyncio.to_thread(self.news)
            for event in new_events:
                yield event
            quiet = 0.0 if new_events else quiet + LOOK_S
            if quiet >= _ALIVE_S:
                quiet = 0.0
                yield ": here\n\n"
            await asyncio.sleep(LOOK_S)

    def news(self) -> list[str]:
        """Events for everything that is new since the last look."""
        events = [self._changed("runs", self.runs.summaries())]
        events.append(self._changed("jobs", [asdict(job) for job in self.queue.jobs]))
        events.append(self._changed("trouble", self.queue.trouble))
        events += [self._rows(run, curve) for run, curve in self.watched.curves]
        events += [self._files(run) for run in dict.fromkeys(run for run, _ in self.watched.curves)]
        if self.watched.log is not None:
            events.append(self._log(self.queue.log(self.watched.log)))
        elif self.watched.run is not None and (run := self.runs.run(self.watched.run)) is not None:
            events.append(self._log(run / run_log.NAME))
        return [event for event in events if event]

    def _changed(self, name: str, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        if self._sent.get(name) == text:
            return ""
        self._sent[name] = text
        return self._event(name, text)

    def _rows(self, run: str, curve: str) -> str:
        path = self.runs.metric_path(run, curve)
        if path is None:
            return ""
        key = f"{run}/{curve}"
        try:
            file = self.runs.metrics.of(path)
        except (WorkbenchError, OSError) as error:
            return self._changed(f"fault {key}", {"run": run, "curve": curve, "error": str(error)})
        goes_on, columns = file.after(self.positions.get(key))
        if self.positions.get(key) == file.position:
            return ""
        self.positions[key] = file.position
        rows = {"run": run, "curve": curve, "goes_on": goes_on, "columns": columns}
        return self._event("rows", json.dumps(rows, ensure_ascii=False))

    def _files(self, run: str) -> str:
        """A run's files besides metrics, where they have changed."""
        if self.runs.run(run) is None:
            return ""
        marks = self.runs.marks(run)
        return self._changed(f"files {run}", {"run": run, **marks}) if marks or f"files {run}" in self._sent else ""

    def _log(self, path: Path) -> str:
        inode, _, offset = self.positions.get("log", "").partition(".")
        try:
            with path.open("rb") as file:
                now = os.fstat(file.fileno())
                goes_on = inode == f"{now.st_ino:x}" and int(offset) <= now.st_size
                first = int(offset) if goes_on else max(0, now.st_size - _LOG_BYTES)
                file.seek(first)
                text = file.read(now.st_size - first)
        except (OSError, ValueError):
            return ""
        if goes_on and not text:
            return ""
        self.positions["log"] = f"{now.st_ino:x}.{first + len(text)}"
        value = {"text": text.decode(errors="replace"), "goes_on": goes_on}
        return self._event("log", json.dumps(value, ensure_ascii=False))

    def _event(self, name: str, text: str) -> str:
        return f"id: {json.dumps(self.positions)}\nevent: {name.partition(' ')[0]}\ndata: {text}\n\n"


def positions(header: str | None) -> dict[str, str]:
    """Positions that a client has, by its own account; none where that is malformed."""
    try:
        parsed = json.loads(header or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in parsed.items()} if isinstance(parsed, dict) else {}
