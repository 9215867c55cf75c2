"""Output of `workbench explain`: settings, as a person reads them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

import typer

from workbench.config import reference
from workbench.config.reference import NamedChoice, SettingReference


def show(settings: Sequence[SettingReference], words: str) -> None:
    """A setting in full; of several a line each."""
    exact = [each for each in settings if each.key == words and not each.is_section]
    if exact or len(settings) == 1:
        for setting in exact or settings:
            _whole(setting)
        return
    heads = [
        _cut(each.key + (f" = {each.default}" if each.default and not each.is_section else ""), 48) for each in settings
    ]
    for head, setting in zip(heads, settings, strict=True):
        typer.echo(_cut(f"{head:{max(map(len, heads))}}  {setting.meaning}", _width()))
    typer.echo("One of them in full: workbench explain KEY")


def show_choices(chosen: Sequence[NamedChoice]) -> None:
    """The sections that a name chooses, such as a method, and the keys that they have."""
    for choice in chosen:
        typer.echo(f"{choice.key}={choice.name}")
        _paragraph("  meaning    ", choice.meaning)
        if choice.papers:
            _paragraph("  paper      ", "; ".join(choice.papers))
        heads = [f"{each.key}" + (f" = {each.default}" if each.default else "") for each in choice.settings]
        for head, setting in zip(heads, choice.settings, strict=True):
            typer.echo(_cut(f"  {head:{max(map(len, heads))}}  {setting.meaning}", _width()))


def show_sections() -> None:
    """All sections, and the keys that stand in none."""
    top_level = [each for each in reference.settings() if "." not in each.key]
    show(top_level, "")


def _whole(setting: SettingReference) -> None:
    typer.echo(setting.key)
    lines = {
        "values": setting.values,
        "unit": setting.unit,
        "default": setting.default or "none: it must be written",
        "meaning": setting.meaning,
        "why": setting.why,
        "paper": "; ".join(setting.papers),
        "only with": ", ".join(setting.of),
    }
    for name, text in lines.items():
        if text:
            _paragraph(f"  {name:10} ", text)
    choices = reference.choices(setting.key)
    for name, text in choices.items():
        _paragraph(f"    {name:{max(map(len, choices))}}  ", text)


def _paragraph(head: str, text: str) -> None:
    typer.echo(textwrap.fill(text, _width(), initial_indent=head, subsequent_indent=" " * len(head)))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _width() -> int:
    return max(60, shutil.get_terminal_size((120, 24)).columns)
