"""Win rates of a run against others, in a file of its directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.runs import files

FILE = "win_rates.json"
KEY = "contests"
NAMED = ("against", "by", "prompts")
"""Values by which a contest is known: the other run, what judged, and the files of prompts."""


def read(run: Path) -> list[dict[str, Any]]:
    """The contests of a run directory, each with NAMED and its scores; oldest first."""
    return list(files.read_json(run / FILE).get(KEY) or [])


def keep(run: Path, contest: Mapping[str, Any]) -> None:
    """Add a contest, in place of an earlier one of the same name."""
    others = [each for each in read(run) if any(each.get(name) != contest[name] for name in NAMED)]
    files.write_json(run / FILE, {KEY: [*others, dict(contest)]})
