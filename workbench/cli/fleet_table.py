"""Outcome of a fleet for a terminal: its members, each a run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text


def parts(run: Path) -> Iterator[Table | str]:
    """Yield a table of the members, and sentences on them."""
    from workbench.report import fleet_section

    fleet = fleet_section.read(run)
    assert fleet is not None, "a fleet has members"
    table = Table(title="Members, each on held-out rows of its own")
    for name in fleet.columns:
        table.add_column(name, justify="left" if name == "member" else "right")
    for row in fleet.members:
        table.add_row(*map(Text, row))
    yield table
    yield from fleet.notes
    first = next((row[0] for row in fleet.members if (run / "members" / row[0] / "adapter").exists()), "NAME")
    yield f"\nReport: {run / 'report.html'}    Runs: {run / 'members'}"
    yield f"Next: workbench evaluate {run / 'members' / first} data.test=FILE"
