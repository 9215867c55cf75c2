"""Training rows that are nearest to a row, as a page shows them beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workbench.report.run_record import RunRecord

LONGEST = 160
"""Characters of a neighbour's text or name."""


class Neighbour(NamedTuple):
    """A training row that is like another row."""

    place: str
    text: str
    """Its whole text but for the end, or the name of its picture."""
    label: str
    similarity: str
    """Cosine similarity of features by the frozen backbone."""


def of_rows(run: RunRecord) -> Mapping[str, list[Neighbour]]:
    """The neighbours of each row that has some, by its place, the nearest first."""
    neighbours_by_row: dict[str, list[Neighbour]] = {}
    for each in () if run.neighbours.empty else run.neighbours.itertuples():
        text = each.text if len(each.text) <= LONGEST else each.text[:LONGEST] + "…"
        neighbours_by_row.setdefault(each.row, []).append(
            Neighbour(each.neighbour, text, each.label, f"{each.similarity:.2f}")
        )
    return neighbours_by_row


def among(run: RunRecord) -> str:
    """The rows that neighbours were looked for among, in words."""
    rows = "rows of other folds" if run.crossvalidates else "training rows"
    looked, of = (run.probe.get(key, 0) for key in ("compared", "rows"))
    return f"{rows} ({looked:,} of {of:,} were looked at)" if looked < of else rows
