"""Runs against the first of a comparison, on the rows that both have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.evaluation import held_out_losses, paired_rows
from workbench.evaluation.paired_rows import PairedScore
from workbench.report.run_record import RunRecord
from workbench.runs import units

COLUMNS = ("run", "score", "rows", "first", "this", "change", "95 %", "p")
NOTE = (
    "The same held-out rows of both runs: Student's 95 % interval of their mean difference, and p by the exact test of "
    "McNemar where a row is right or wrong, else by the paired t-test; the loss in nats per token by the ratio "
    "estimator over rows."
)
MANY = " p is of one comparison: of {count}, a small one comes by chance more often than it says."
_LEAST = 1e-4
"""Probability below which its size says nothing more."""


class PairedRuns(NamedTuple):
    """Scores of all runs but the first, each against the first on the same rows."""

    rows: tuple[tuple[str, ...], ...]
    """A row for each score, as `COLUMNS` has it; none where the rows are not the same."""
    notes: tuple[str, ...]
    """Runs whose losses are not compared so, and why; and where they are those of some rows."""


def paired(records: Sequence[RunRecord], names: Sequence[str]) -> PairedRuns:
    """Compare each run with the first, row by row."""
    first, *others = records
    rows, notes = list[tuple[str, ...]](), list[str]()
    losses = held_out_losses.read(first.folder)
    for other, name in zip(others, names[1:], strict=True):
        own = held_out_losses.read(other.folder)
        if losses is not None and own is not None:
            score = held_out_losses.compare(losses, own)
            if isinstance(score, str):
                notes.append(f"{names[0]} and {name}: no paired difference of the loss, for {score}.")
            else:
                rows.append(_shown(name, score))
                if score.rows < own.rows:
                    notes.append(f"{name}: the paired loss is of {score.rows:,} rows of {own.rows:,}, evenly spaced.")
        elif losses is not None or own is not None:
            without = names[0] if losses is None else name
            notes.append(f"{names[0]} and {name}: no paired difference of the loss, for {without} keeps none of rows.")
        rows += [_shown(name, score) for score in paired_rows.compare(first.predictions, other.predictions)]
    return PairedRuns(tuple(rows), tuple(notes))


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
