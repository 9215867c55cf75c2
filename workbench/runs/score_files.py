"""Scores in a run directory besides those of its held-out rows: tasks of lm-eval, and win rates against other runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.runs import files

SCORES, TASKS, COSTS, FREEZING, DRAFTS = "scores.json", "tasks", "costs", "freezing", "drafts"
"""File with the scores of rows, and its keys with those of tasks, the costs of a student and its teacher, the steps
before and after layers froze, and how a student drafts for its teacher."""
WIN_RATES, CONTESTS = "win_rates.json", "contests"
NAMED = ("against", "by", "prompts")
"""Values that identify a contest: the other run, what judged, and the files of prompts."""


def is_bound(name: str) -> bool:
    """Whether a score is a bound of the 95 % interval of another one."""
    return name.partition("[")[0].endswith(("_low", "_high"))


def read_tasks(run: Path) -> dict[str, Any]:
    """The tasks that a run was asked: `shots`, `limit` and `rows`; empty where it was asked none."""
    asked = files.read_json(run / SCORES).get(TASKS)
    return dict(asked) if isinstance(asked, Mapping) else {}


def keep(run: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write an entry of that name into scores.json, in place of an earlier one."""
    files.write_json(run / SCORES, {**files.read_json(run / SCORES), name: dict(found)})


def of_rows(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of rows alone: before, after and the others by their names."""
    return {name: each for name, each in scores.items() if name not in (TASKS, COSTS, FREEZING, DRAFTS)}


def read_win_rates(run: Path) -> list[dict[str, Any]]:
    """The contests of a run directory, each with NAMED and its scores; oldest first."""
    return list(files.read_json(run / WIN_RATES).get(CONTESTS) or [])


def keep_win_rate(run: Path, contest: Mapping[str, Any]) -> None:
    """Add a contest, in place of an earlier one of the same name."""
    others = [each for each in read_win_rates(run) if any(each.get(name) != contest[name] for name in NAMED)]
    files.write_json(run / WIN_RATES, {CONTESTS: [*others, dict(contest)]})
