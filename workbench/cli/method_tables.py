"""Tables of `workbench ls adapters`: what each method trains, its size on a backbone, and what is not offered."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.adapters import METHODS, NOT_OFFERED
from workbench.adapters.method import WEIGHTS
from workbench.models.adapter_sizes import SizeTable

_out = Console(highlight=False, soft_wrap=False)


def methods(known: SizeTable) -> None:
    """Print a table of methods: description, size on one backbone, and reasons where one does not apply."""
    from workbench.runs import units

    descriptions = Table("method", "what trains", "paper", box=None)
    title = Text(f"\nOn {known.model.id}, {known.parameters:,} parameters")
    sizes = Table("method", box=None, title=title, title_justify="left")
    for column in ("trainable", "share", "file"):
        sizes.add_column(column, justify="right")
    sizes.add_column("merges")
    sizes.add_column("weights")
    refused = Table("method", "does not work here", box=None)
    for name, size in known.sizes.items():
        about = METHODS[name].about[name]
        descriptions.add_row(*map(Text, (name, about.trains, about.paper)))
        if isinstance(size, str):
            refused.add_row(Text(name), Text(size))
            continue
        numbers = (f"{size.trainable:,}", units.percent(size.share), units.size(size.file_bytes))
        formats = "all" if about.weights == WEIGHTS else " ".join(about.weights)
        sizes.add_row(*map(Text, (name, *numbers, "no" if about.no_merge else "yes", formats)))
    absent = Table("method", "PEFT's, and not offered", box=None)
    for name, reason in NOT_OFFERED.items() if len(known.sizes) > 1 else ():
        absent.add_row(Text(name), Text(reason))
    tables = [table for table in (refused, absent) if table.row_count]
    _out.print(descriptions, sizes, *(part for table in tables for part in (Text(), table)))


def methods_json(sizes: SizeTable) -> None:
    """The same as one JSON object on standard output."""
    rows = {}
    for name, size in sizes.sizes.items():
        what = {"refusal": size} if isinstance(size, str) else {**size._asdict(), "share": size.share}
        rows[name] = asdict(METHODS[name].about[name]) | what
    table = {"model": sizes.model.id, "parameters": sizes.parameters, "methods": rows, "not_offered": NOT_OFFERED}
    print(json.dumps(table, indent=1))
