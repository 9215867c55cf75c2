"""Printing of what `workbench lr` found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from workbench.recipes import rate_finder
from workbench.recipes.rate_finder import Tried
from workbench.training.optim.rate_choice import RateChoice, TriedRate

_out = Console(highlight=False, soft_wrap=False)


def show(tried: Tried) -> None:
    """A line for each rate, the suggestion with its rule and its doubts, and where table and plot are."""
    choice = tried.choice
    table = Table("learning rate", f"loss of the last {choice.late} steps", "above the lowest", "", box=None)
    for column in table.columns[:3]:
        column.justify = "right"
    for each in choice.tried:
        table.add_row(*_line(each, choice))
    _out.print(table)
    for sentence in rate_finder.sentences(tried):
        _out.print(sentence, markup=False)
    _out.print(f"Plot: {tried.folder / rate_finder.PLOT}    Table: {tried.folder / rate_finder.TABLE}", markup=False)


def _line(each: TriedRate, choice: RateChoice) -> tuple[str, str, str, str]:
    if each.mean is None or each.excess is None:
        return f"{each.rate:g}", "", "", f"exploded after step {len(each.losses)}"
    apart = "" if each is choice.best else f"{each.excess:.4f} ± {each.error:.4f}"
    alike = choice.lowest.rate <= each.rate <= choice.highest.rate
    return f"{each.rate:g}", f"{each.mean:.4f}", apart, "lowest" if each is choice.best else "alike" if alike else ""
