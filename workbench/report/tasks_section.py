"""Tasks of lm-eval that a run was asked, before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.runs import task_scores, units


@dataclass(frozen=True)
class TaskTable:
    """Rows of the table, and the sentence below it."""

    rows: Sequence[Mapping[str, str]]
    note: str


def read(run: Path) -> TaskTable | None:
    """The tasks of a run directory; None where it was asked none."""
    results = task_scores.read(run)
    if not results:
        return None
    limit = f"The first {results['limit']:,} documents of each task. " if results["limit"] else ""
    note = f"{limit}The same documents before and after; Student's 95 % interval of their mean difference."
    return TaskTable([shown(row) for row in results["rows"]], note)


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of these scores in words."""
    low, high = row["low"], row["high"]
    return {
        "task": str(row["task"]),
        "metric": str(row["metric"]),
        "documents": units.NOTHING if row["documents"] is None else f"{row['documents']:,}",
        "before": f"{row['before']:.4f}",
        "after": f"{row['after']:.4f}",
        "difference": f"{row['difference']:+.4f}",
        "interval": units.NOTHING if low is None else f"{low:+.4f} to {high:+.4f}",
    }
