"""Printed result of `sample`."""

from __future__ import annotations

from pathlib import Path

import typer

from workbench.recipes.answers.sample import SampledRows


def show(sampled: SampledRows, out: Path) -> None:
    """Print how good answers are, and what may show that a reward is served and not its purpose."""
    best = "" if sampled.best is None else f", of the best to each prompt that ended by itself {sampled.best:.3f}"
    typer.echo(
        f"{sampled.rows:,} rows in {out}, from {sampled.answers:,} answers to {sampled.prompts:,} prompts; "
        f"{sampled.finished:.0%} ended by themselves."
    )
    typer.echo(f"Mean reward {sampled.reward:.3f}{best}.")
    signals = sampled.signals
    if "best_words" in signals:
        typer.echo(
            f"The best answers have {signals['best_words']:.1f} words, all {signals['words']:.1f}; of their runs of "
            f"four words they repeat {signals['best_repetition']:.1%}, all {signals['repetition']:.1%}."
        )
    if "length_correlation" in signals:
        typer.echo(f"Rank correlation of length and reward: {signals['length_correlation']:+.2f}.")
    for reason in sampled.left_out[:20]:
        typer.echo(f"left out: {reason}", err=True)
