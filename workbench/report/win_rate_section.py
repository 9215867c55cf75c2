"""How often a run's answers beat those of other runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.runs import units, win_rate_file


def read(run: Path) -> Sequence[Mapping[str, str]]:
    """Rows of the table of a run directory; empty where it was compared with none."""
    return [shown(each) for each in win_rate_file.read(run)]


def shown(contest: Mapping[str, Any]) -> dict[str, str]:
    """A contest in words."""
    low, high = (units.percent(contest[f"win_rate_{end}"]) for end in ("low", "high"))
    return {
        "against": str(contest["against"]),
        "by": str(contest["by"]),
        "prompts": f"{contest['count']:,} of {', '.join(contest['prompts'])}",
        "wins": units.percent(contest["win_rate"]),
        "interval": f"{low} to {high}",
        "ties": units.percent(contest["ties"]),
        "longer": units.percent(contest["longer"]) if "longer" in contest else units.NOTHING,
    }
