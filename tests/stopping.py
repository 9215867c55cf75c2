"""Runs that are asked to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.cli.console import Terminal
from workbench.runs import metrics_log


def stop_after(patch: pytest.MonkeyPatch, step: int = 1) -> None:
    """From the end of a step on somebody asks for an end; scoring before it is not disturbed."""
    done: list[int] = []
    append = metrics_log.append

    def logged(path: Path, records: Any) -> None:
        if path.name == metrics_log.METRICS:
            done.extend(record["step"] for record in records)
        append(path, records)

    patch.setattr(metrics_log, "append", logged)
    patch.setattr(Terminal, "stop_requested", lambda _: bool(done) and max(done) >= step)
