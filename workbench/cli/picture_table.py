"""Tables of `check` on pictures: what they are, what becomes of them, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from workbench.data.labelled.labelled_data import LabelledSet
    from workbench.recipes.labels.picture_checks import PictureFindings


def parts(findings: PictureFindings, splits: Mapping[str, LabelledSet]) -> list[RenderableType]:
    """Facts on the training pictures, some of them with their labels, and the sizes of the splits."""
    facts = Table.grid(padding=(0, 2))
    for name, sentence in findings.facts:
        facts.add_row(Text(name, style="bold"), Text(sentence))
    shown = Table(Column("such as", overflow="fold"), "label", box=None)
    for name, label in findings.examples:
        shown.add_row(Text(name), Text(label, style="bold green"))
    rows = Table("split", box=None)
    for column in ("rows", "left out"):
        rows.add_column(column, justify="right")
    for name, split in splits.items():
        rows.add_row(name, f"{len(split):,}", f"{len(split.skipped):,}")
    return [facts, Text(), shown, Text(), rows, Text()]
