"""Printing of what `workbench data` found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.recipes.data_report import DataReport
from workbench.report import data_page

_out = Console(highlight=False, soft_wrap=False)


def show(report: DataReport) -> None:
    """Lengths, what each rule flags, a verdict, and where the page and the flags are."""
    findings, config = report.findings, report.config.data
    lengths = Table("rows", "unit", "in all", "median", "95 %", "99 %", "longest", "cut", box=None)
    for column in lengths.columns[2:]:
        column.justify = "right"
    for row in data_page.length_rows(findings, config):
        lengths.add_row(*map(Text, row))
    if lengths.row_count:
        _out.print(lengths)
    flagged = Table("flagged by", *(each.read.title for each in findings), "share")
    flagged.columns[0].no_wrap = True
    for column in flagged.columns[1:]:
        column.justify = "right"
    for rule in data_page.rules(findings):
        flagged.add_row(*map(Text, (rule.name, *rule.counts, rule.share)))
    if flagged.row_count:
        _out.print(flagged)
    _out.print(data_page.verdict(findings), markup=False)
    for note in (note for each in findings for note in each.notes):
        _out.print(note, markup=False)
    _out.print(f"\nPage: {report.page}    Flags: {report.flags}", markup=False)
