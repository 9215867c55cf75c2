"""Runs that are asked to stop."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.cli.console import Terminal
from workbench.runs.run_directory import Run


def stop_after(patch: pytest.MonkeyPatch, step: int = 1) -> None:
    """From the end of a step on somebody asks for an end; scoring before it is not disturbed."""
    done: list[int] = []
    log = Run.log

    def logged(self: Run, record: Any) -> None:
        done.append(record["step"])
        log(self, record)

    patch.setattr(Run, "log", logged)
    patch.setattr(Terminal, "stop_requested", lambda _: bool(done) and max(done) >= step)
