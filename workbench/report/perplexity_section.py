"""The part of a page on data that tells how likely the backbone finds the rows: most and least surprising ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.data.text.quality.survey import Findings
from workbench.runs import units

SHOWN = 8
"""Rows at each end."""


LONGEST = 350
"""Characters that are shown of the beginning of a row, and of its end."""


class SurprisingRow(NamedTuple):
    """A row at one end."""

    place: str
    perplexity: str
    text: str


class Surprise(NamedTuple):
    """The perplexities of one source."""

    title: str
    read: str
    """Rows that the backbone read, of all."""
    quantiles: tuple[str, ...]
    """At 5, 50 and 95 per cent of the rows."""
    most: tuple[SurprisingRow, ...]
    least: tuple[SurprisingRow, ...]


def surprises(findings: Sequence[Findings]) -> list[Surprise]:
    """The perplexities of each source of which the backbone read rows."""
    return [_surprise(each) for each in findings if each.read.perplexities]


def _surprise(findings: Findings) -> Surprise:
    known = findings.read.perplexities
    ordered = sorted(known, key=lambda number: (known[number], number))
    ends = min(SHOWN, len(ordered) // 2 or 1)
    return Surprise(
        title=findings.read.title,
        read=f"{len(known):,} of {len(findings.read.rows):,}",
        quantiles=tuple(map(units.number, np.quantile(list(known.values()), [0.05, 0.5, 0.95]).tolist())),
        most=tuple(_row(findings, number) for number in reversed(ordered[-ends:])),
        least=tuple(_row(findings, number) for number in ordered[:ends]),
    )


def _row(findings: Findings, number: int) -> SurprisingRow:
    row = findings.read.rows[number]
    return SurprisingRow(row.place, units.number(findings.read.perplexities[number]), ends(row.text))


def ends(text: str, longest: int = LONGEST) -> str:
    """The beginning and the end of a long text, of `longest` characters each: prompts stand first, answers last."""
    return text if len(text) <= 2 * longest else f"{text[:longest].rstrip()} … {text[-longest:].lstrip()}"
