"""Picture of a search for a learning rate: late losses against rates, and the loss of each rate along its steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from workbench.report.plots import COLOURS, palette, settings
from workbench.runs import files
from workbench.training.optim.rate_choice import RateChoice

MEMORY = 0.8
"""How much of a smoothed loss is kept from one step to the next."""


def write(path: Path, choice: RateChoice, *, suggested: float, configured: float) -> None:
    """Draw a search into an .svg or .png file.

    Args:
        suggested: The rate for the whole run.
        configured: The recipe's own learning rate.
    """
    colours, buffer = palette(), io.BytesIO()
    with matplotlib.rc_context({**settings(ink=colours["ink"], grid=colours["grid"]), "svg.hashsalt": "rates"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor=colours["surface"])
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.set_facecolor("none")
        _draw_rates(left, choice, colours, suggested=suggested, configured=configured)
        _draw_steps(right, choice, colours)
        format = path.suffix[1:]
        figure.savefig(buffer, format=format, dpi=200, metadata={"Date": None} if format == "svg" else {})
    files.write_bytes(path, buffer.getvalue())


def _draw_rates(axes: Any, choice: RateChoice, colours: dict[str, str], *, suggested: float, configured: float) -> None:
    ended = [each for each in choice.tried if each.mean is not None]
    x, y = [each.rate for each in ended], [each.mean for each in ended]
    axes.set_xscale("log")
    axes.errorbar(
        x, y, yerr=[each.error for each in ended], color=colours["series-0"], marker="o", markersize=4, linewidth=1.2
    )
    for each in choice.tried:
        if each.mean is None:
            axes.axvline(each.rate, color=colours["series-3"], linewidth=1, linestyle=(0, (1, 2)))
    if choice.lowest.rate < choice.highest.rate:
        axes.axvspan(choice.lowest.rate, choice.highest.rate, color=colours["series-1"], alpha=0.1, linewidth=0)
    axes.axvline(suggested, color=colours["series-1"], linewidth=1.5)
    axes.axvline(configured, color=colours["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_locator(FixedLocator([each.rate for each in choice.tried][:: 1 + len(choice.tried) // 8]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("learning rate: line, suggested; shaded, alike; dashed, the recipe's; dotted, exploded", fontsize=7)
    axes.set_ylabel(f"mean loss of the last {choice.late} steps")
    _limit(axes, [each.losses for each in ended])


def _draw_steps(axes: Any, choice: RateChoice, colours: dict[str, str]) -> None:
    for number, each in enumerate(choice.tried):
        style = ("solid", "dashed")[number // COLOURS % 2]
        colour, width = colours[f"series-{number % COLOURS}"], 2.0 if each is choice.best else 1.0
        steps = np.arange(1, len(each.losses) + 1)
        axes.plot(steps, _smooth(each.losses), label=f"{each.rate:.3g}", color=colour, linestyle=style, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel("smoothed loss")
    axes.legend(title="learning rate", fontsize=6, title_fontsize=7, frameon=False, ncols=2)
    _limit(axes, [each.losses for each in choice.tried])


def _smooth(losses: tuple[float, ...]) -> list[float]:
    """Exponential means, with the bias of their beginning taken out."""
    kept, weight, smoothed = 0.0, 0.0, []
    for loss in losses:
        kept, weight = MEMORY * kept + (1 - MEMORY) * loss, MEMORY * weight + 1 - MEMORY
        smoothed.append(kept / weight)
    return smoothed


def _limit(axes: Any, losses: list[tuple[float, ...]]) -> None:
    """One exploding rate must not flatten the others."""
    first = float(np.mean([each[0] for each in losses if each] or [1.0]))
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.3 * first))
