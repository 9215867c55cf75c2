"""Scores of lm-eval's tasks in a run's scores.json, beside those of its held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.runs import files

KEY = "tasks"
FILE = "scores.json"


def read(run: Path) -> dict[str, Any]:
    """The tasks that a run was asked: `shots`, `limit` and `rows`; empty where it was asked none."""
    asked = files.read_json(run / FILE).get(KEY)
    return dict(asked) if isinstance(asked, Mapping) else {}


def keep(run: Path, asked: Mapping[str, Any]) -> None:
    """Write tasks into scores.json, in place of those of before."""
    files.write_json(run / FILE, {**files.read_json(run / FILE), KEY: dict(asked)})


def without(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of rows alone: before, after and the others by their names."""
    return {name: of_rows for name, of_rows in scores.items() if name != KEY}
