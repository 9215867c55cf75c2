"""Runs against the first of a comparison, on the rows that both have."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.evaluation import paired_rows
from workbench.evaluation.paired_rows import PairedScore
from workbench.report.run_record import RunRecord
from workbench.runs import units

COLUMNS = ("run", "score", "rows", "first", "this", "change", "95 %", "p")
NOTE = (
    "The same held-out rows of both runs: Student's 95 % interval of their mean difference, and p by the exact test of "
    "McNemar where a row is right or wrong, else by the paired t-test."
)
MANY = " p is of one comparison: of {count}, a small one comes by chance more often than it says."
_LEAST = 1e-4
"""Probability below which its size says nothing more."""


def paired(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """A row for each score of each run but the first, as `COLUMNS` has it; none where the rows are not the same."""
    first, *others = records
    return tuple(
        _shown(name, score)
        for other, name in zip(others, names[1:], strict=True)
        for score in paired_rows.compare(first.predictions, other.predictions)
    )


def note(rows: Sequence[Sequence[str]]) -> str:
    """The sentence below the table."""
    return NOTE + (MANY.format(count=len(rows)) if len(rows) > 2 else "")


def _shown(name: str, score: PairedScore) -> tuple[str, ...]:
    chance = units.NOTHING
    if score.p is not None:
        chance = f"{score.p:.4f}" if score.p >= _LEAST else f"< {_LEAST}"
    low, high = score.interval or (None, None)
    bounds = units.NOTHING if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
    means = f"{score.first:.4f}", f"{score.second:.4f}", f"{score.difference:+.4f}"
    return (name, score.name.replace("_", " "), f"{score.rows:,}", *means, bounds, chance)
