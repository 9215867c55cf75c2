"""Pictures of learning rates before a run starts, as .png or .svg files.

`workbench check RECIPE --plot FILE` draws how the rate moves, which layers train when, and when the run evaluates and
saves. A search for a learning rate draws the late losses against the rates, and the loss of each rate along its steps.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.errors import ConfigError
from workbench.report.plots import COLOURS, Floats, palette, settings
from workbench.runs import files
from workbench.training.optim.optimizers import peak_rate
from workbench.training.optim.rate_choice import RateChoice
from workbench.training.optim.schedules import factor, falls_from, moments

SUFFIXES = (".png", ".svg")
"""File formats that can be written."""
DOTS = 80
"""Most steps whose own learning rates are dots on the curve."""
PERCENT = 100
FINE = 10_000
"""Parts of a run whose steps nobody knows, to find where something periodic happens."""
FREEZE_COLUMNS = 1800
"""Most steps of a freezing policy that are drawn, as many as the picture has pixels; of a longer run, evenly spaced."""
FREEZE_LABELS = 8
"""Most blocks that are named beside the panel of layers."""
MEMORY = 0.8
"""How much of a smoothed loss of a search is kept from one step to the next."""


def require_new(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a file that could not be written, before the work that comes first.

    Raises:
        ConfigError: another suffix than `suffixes`, or the file exists.
        FileError: its folder cannot be written to.
    """
    if path.suffix not in suffixes:
        raise ConfigError(f"--plot {path}: this plot is a {' or '.join(suffixes)} file. Write --plot plot.png")
    if path.exists():
        raise ConfigError(f"--plot {path}: the file exists already. Name another file, or delete it first.")
    files.require_writable(path)


def write_schedule(path: Path, config: RunConfig, *, steps: int | None, blocks: int | None = None) -> None:
    """Draw the learning rate of a run, which layers train when, and when it evaluates and saves, to a new file.

    Args:
        steps: Of the run, if nothing ends it earlier; None where nobody knows. A run that a budget may end is drawn by
            the share that is done, which is how its learning rate moves.
        blocks: Of the backbone, without which no freezing can be drawn.
    """
    require_new(path)
    files.write_bytes(path, draw_schedule(config, steps=steps, blocks=blocks, format=path.suffix[1:]))


def draw_schedule(config: RunConfig, *, steps: int | None, blocks: int | None = None, format: str = "png") -> bytes:
    """The file that `write_schedule` writes."""
    colours, buffer = palette(), io.BytesIO()
    with matplotlib.rc_context({**settings(ink=colours["ink"], grid=colours["grid"]), "svg.hashsalt": "schedule"}):
        figure = _draw(config, Span(steps if config.budget.unlimited else None), colours, blocks=blocks)
        # Without the date, so that the same schedule is the same file.
        metadata = {"Date": None} if format == "svg" else {}
        figure.savefig(buffer, format=format, dpi=200, metadata=metadata)
    return buffer.getvalue()


class Span(NamedTuple):
    """The run from left to right: in steps, or in percent where nobody knows how many steps that are."""

    steps: int | None

    @property
    def end(self) -> int:
        """The right end of the picture."""
        return PERCENT if self.steps is None else self.steps

    def place(self, share: float) -> str:
        """Where a share of the run is, in words."""
        if self.steps is None:
            return f"at {_percent(share)} of the run"
        step = share * self.steps
        return f"at step {step:,.0f}" if step >= 10 else f"at step {step:.2g}"

    def moments(self, every: int | float | None) -> set[float]:
        """Where something periodic happens; of what counts steps that nobody knows, only the last time."""
        if self.steps is not None:
            return {float(step) for step in moments(every, self.steps)}
        return {PERCENT * step / FINE for step in moments(FINE if isinstance(every, int) else every, FINE)}


def _draw(config: RunConfig, span: Span, colours: dict[str, str], *, blocks: int | None = None) -> Figure:
    policy = config.freeze
    heights = {"curve": 1.0, "strip": 0.17}
    if policy.policy != "none":
        unknown = blocks is None or _unknown(policy, span, blocks)
        heights = {"curve": 1.0, "layers": 0.02 if unknown else min(1.0, 0.3 + 0.03 * (blocks or 0)), "strip": 0.17}
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1, hspace=0.02)
    inches = 4.4 / 1.17 * sum(heights.values()) + 0.6 * ("layers" in heights)  # its title
    figure = Figure(figsize=(9, inches), layout=layout, facecolor=colours["surface"])
    drawn = figure.subplots(len(heights), sharex=True, height_ratios=list(heights.values()))
    panels = dict(zip(heights, drawn, strict=True))
    for axes in panels.values():
        axes.set_facecolor("none")
        axes.grid(visible=False, axis="x")
    curve = panels["curve"]
    curve.spines["bottom"].set_visible(False)
    schedule, peak = config.schedule, peak_rate(config)
    # Its corners are among the points.
    progress = np.union1d(np.linspace(0, 1, 1001), [schedule.warmup, falls_from(schedule)])
    rates = [peak * factor(each, schedule) for each in progress]
    curve.fill_between(progress * span.end, rates, color=colours["series-0"], alpha=0.1, linewidth=0)
    curve.plot(progress * span.end, rates, color=colours["series-0"], linewidth=2, clip_on=False, zorder=3)
    if span.steps is not None and span.steps <= DOTS:
        middles = np.arange(span.steps) + 0.5
        dots = [peak * factor(each / span.steps, schedule) for each in middles]
        look = {"color": colours["series-0"], "markersize": 5, "markeredgecolor": colours["surface"], "zorder": 4}
        curve.plot(middles, dots, "o", **look)
    end = f"ends at\n{_rate(rates[-1], peak)}"
    curve.annotate(
        end, (span.end, rates[-1]), (8, 0), textcoords="offset points", va="center", color=colours["series-0"]
    )
    if schedule.floor:
        curve.axhline(peak * schedule.floor, color=colours["soft"], linewidth=0.8, linestyle=(0, (1, 3)))
    curve.set_ylim(0, 1.2 * peak)
    curve.yaxis.set_major_locator(FixedLocator([peak * quarter / 4 for quarter in range(5)]))
    curve.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _rate(value, peak)))
    _draw_phases(curve, config, span, colours)
    if "layers" in panels:
        axes, subtitle = panels["layers"], _unknown(policy, span, blocks)
        if subtitle is None:
            assert blocks is not None
            layer_rates = freezing(policy, steps=span.steps or FINE, blocks=blocks, seed=config.seed)
            draw_freezing(axes, layer_rates, steps=span.end, colours=colours)
            subtitle = f"{_percent(frozen_share(layer_rates))} of the layer-steps are frozen"
        else:
            axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(bottom=False, labelbottom=False)
        _title(axes, f"Freezing: {policy.policy}", subtitle, colours)
    _draw_moments(panels["strip"], config, span, colours)
    curve.set_xlim(0, span.end)
    curve.tick_params(bottom=False, labelbottom=False)
    _title(curve, f"Learning rate: {config.schedule.name}", _description(config, span), colours)
    return figure


def _unknown(policy: FreezeConfig, span: Span, blocks: int | None) -> str | None:
    """Why nobody knows which layers train when, in words; None where it can be drawn."""
    if policy.thaws and span.steps is None:
        return "changes with the number of steps, and a budget decides how many there are"
    return why_no_freezing(policy, blocks)


def _title(axes: Any, title: str, subtitle: str, colours: dict[str, str]) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22)
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(subtitle, (0, 1), (0, 6), **above, color=colours["soft"], fontsize=9)


def _draw_phases(axes: Any, config: RunConfig, span: Span, colours: dict[str, str]) -> None:
    """Tints of the warm-up and of the decay, and where one ends and the other begins."""
    rises, falls = config.schedule.warmup, falls_from(config.schedule)
    if rises > 0:
        axes.axvspan(0, rises * span.end, color=colours["series-1"], alpha=0.07, linewidth=0)
    if falls < 1:
        axes.axvspan(falls * span.end, span.end, color=colours["series-2"], alpha=0.07, linewidth=0)
    if 0 < rises == falls:
        _draw_edge(axes, rises, span, "warm-up ends and decay begins", colours["soft"], height=0.92)
        return
    if rises > 0:
        _draw_edge(axes, rises, span, "warm-up ends", colours["series-1"], height=0.96)
    if 0 < falls < 1:
        _draw_edge(axes, falls, span, "decay begins", colours["series-2"], height=0.89)


def _draw_edge(axes: Any, at: float, span: Span, what: str, colour: str, *, height: float) -> None:
    """Draw a dashed line at a share of the run, labelled on the side where there is room."""
    axes.axvline(at * span.end, ymax=height + 0.03, color=colour, linewidth=1, linestyle=(0, (4, 3)))
    offset, side = ((6, 0), "left") if at < 0.6 else ((-6, 0), "right")
    place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "ha": side, "va": "center"}
    axes.annotate(f"{what} {span.place(at)}", (at * span.end, height), offset, color=colour, **place)


def _draw_moments(axes: Any, config: RunConfig, span: Span, colours: dict[str, str]) -> None:
    """A row of ticks for the evaluations, and one for the checkpoints."""
    evaluations, saves = span.moments(config.evaluate.every), span.moments(config.save.every) | {float(span.end)}
    for row, at, colour in ((1, evaluations, "series-3"), (0, saves, "series-5")):
        # Ticks that would melt into a bar become hairlines.
        width = min(2.0, max(0.3, 300 / max(1, len(at))))
        axes.vlines(sorted(at), row - 0.32, row + 0.32, color=colours[colour], linewidth=width, clip_on=False)
    place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
    for row, every, colour in ((1, config.evaluate.every, "series-3"), (0, config.save.every, "series-5")):
        label = "only before and after training" if row == 1 and every is None else None
        if span.steps is None and isinstance(every, int):
            label = f"every {every:,} steps, and at the end"
        if label is not None:
            axes.annotate(label, (0, row), (10, 0), **place, color=colours[colour], backgroundcolor=colours["surface"])
    axes.set_ylim(-0.6, 1.6)
    axes.set_yticks([0, 1], ["save", "evaluate"])
    if span.steps is None:
        axes.set_xlabel("percent of the run, whose budget decides how many steps that are")
    else:
        axes.set_xlabel("steps done; a dot is the learning rate of one step" if span.steps <= DOTS else "steps done")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _description(config: RunConfig, span: Span) -> str:
    schedule, peak = config.schedule, peak_rate(config)
    parts = ["until the budget is used up" if span.steps is None else f"{span.steps:,} steps"]
    parts += [f"peak {_rate(peak, peak)}"]
    parts += [f"warm-up in {_percent(schedule.warmup)} of the run"] if schedule.warmup else []
    parts += [f"from {_percent(schedule.start)} of the peak"] if schedule.start else []
    parts += ["falls where the held-out loss stalls"] if schedule.name == "plateau" else []
    parts += [f"{schedule.decay_shape} decay in {_percent(schedule.decay)}"] if schedule.name == "wsd" else []
    parts += [f"floor at {_percent(schedule.floor)} of the peak"] if schedule.floor else []
    return ", ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _rate(value: float, peak: float) -> str:
    """A learning rate in the power of ten of the peak, so that ticks can be compared: 0.5e-4, 1e-4, 1.5e-4."""
    power = math.floor(math.log10(peak))
    if power >= -2 or value < peak / 1000:
        return f"{value:.3g}"
    return f"{value / 10**power:.3g}e{power}"


def freezing(policy: FreezeConfig, *, steps: int, blocks: int, seed: int) -> Floats:
    """Factor on the learning rate of each layer in each step, for a policy that measures nothing.

    Returns:
        (layers, steps), of at most FREEZE_COLUMNS steps; NaN where a layer is frozen.
    """
    columns = []
    for step in np.linspace(0, steps - 1, min(steps, FREEZE_COLUMNS)).round():
        plan = policy.plan(Moment(int(step), step / steps, seed), blocks=blocks)
        columns.append(np.where(plan.trains, plan.rates, np.nan))
    factors: Floats = np.array(columns).T
    return factors


def why_no_freezing(policy: FreezeConfig, blocks: int | None) -> str | None:
    """Why the plan cannot be drawn; None where it can."""
    if policy.observes is not None:
        return f"decided while training, from {policy.observes} measured every {policy.interval:,} steps"
    return "the blocks of this backbone are not known" if blocks is None else None


def draw_freezing(axes: Any, frozen: Floats, *, steps: int, colours: dict[str, str]) -> None:
    """Rows from the embeddings up to the head: deep where the rate is high, pale where it is low, grey where frozen.

    Args:
        frozen: As `freezing` gives them.
    """
    highest = np.nanmax(frozen)
    axes.imshow(
        _shades(frozen / highest, colours),
        extent=(0, steps, -0.5, len(frozen) - 0.5),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
    for border in np.arange(len(frozen) - 1) + 0.5:
        axes.axhline(border, color=colours["surface"], linewidth=min(1.5, 20 / len(frozen)))
    axes.set_ylim(-0.5, len(frozen) - 0.5)
    # Evenly spaced blocks; none so near to the head that its label would overlap.
    stride = -(-(len(frozen) - 2) // FREEZE_LABELS)
    named = range(stride, len(frozen) - stride, stride)
    axes.yaxis.set_major_locator(FixedLocator([0, *named, len(frozen) - 1]))
    axes.set_yticklabels(["embeddings", *(f"block {number}" for number in named), "head"])
    axes.grid(visible=False)
    shown = [(1.0, "trains")] if np.nanmin(frozen) == highest else [(1.0, f"rate times {highest:.3g}"), (0.0, "near 0")]
    patches = [
        Patch(color=to_hex(_shades(np.array(strength), colours).tolist()), label=label) for strength, label in shown
    ]
    beside_title = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "ncols": 3, "frameon": False}
    small = {"handlelength": 1, "handleheight": 1, "fontsize": 9}
    axes.legend(handles=[*patches, Patch(color=colours["grid"], label="frozen")], **beside_title, **small)


def frozen_share(frozen: Floats) -> float:
    """Share of all layer-steps in which a layer is frozen."""
    return float(np.isnan(frozen).mean())


def _shades(strengths: Floats, colours: dict[str, str]) -> Floats:
    """Colours (.., 3) of strengths between 0 and 1."""
    pale, deep, frozen = (np.array(to_rgb(colours[name])) for name in ("surface", "series-0", "grid"))
    mix = (0.12 + 0.63 * np.nan_to_num(strengths))[..., None]
    shades: Floats = np.where(np.isnan(strengths)[..., None], frozen, (1 - mix) * pale + mix * deep)
    return shades


def write_search(path: Path, choice: RateChoice, *, suggested: float, configured: float) -> None:
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

        ended = [each for each in choice.tried if each.mean is not None]
        rates, means, errors = zip(*((each.rate, each.mean, each.error) for each in ended), strict=True)
        dots = {"color": colours["series-0"], "marker": "o", "markersize": 4, "linewidth": 1.2}
        left.set_xscale("log")
        left.errorbar(rates, means, yerr=errors, **dots)
        for each in choice.tried:
            if each.mean is None:
                left.axvline(each.rate, color=colours["series-3"], linewidth=1, linestyle=(0, (1, 2)))
        if choice.lowest.rate < choice.highest.rate:
            left.axvspan(choice.lowest.rate, choice.highest.rate, color=colours["series-1"], alpha=0.1, linewidth=0)
        left.axvline(suggested, color=colours["series-1"], linewidth=1.5)
        left.axvline(configured, color=colours["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
        ticks = [each.rate for each in choice.tried][:: 1 + len(choice.tried) // 8]
        left.xaxis.set_major_locator(FixedLocator(ticks))
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        left.xaxis.set_minor_formatter(NullFormatter())
        legend = "learning rate: line, suggested; shaded, alike; dashed, the recipe's; dotted, exploded"
        left.set_xlabel(legend, fontsize=7)
        left.set_ylabel(f"mean loss of the last {choice.late} steps")

        for number, each in enumerate(choice.tried):
            # Exponential means, with the bias of their beginning taken out.
            kept, weight, smoothed = 0.0, 0.0, []
            for loss in each.losses:
                kept, weight = MEMORY * kept + (1 - MEMORY) * loss, MEMORY * weight + 1 - MEMORY
                smoothed.append(kept / weight)
            style, width = ("solid", "dashed")[number // COLOURS % 2], 2.0 if each is choice.best else 1.0
            look = {"color": colours[f"series-{number % COLOURS}"], "linestyle": style, "linewidth": width}
            right.plot(np.arange(1, len(smoothed) + 1), smoothed, label=f"{each.rate:.3g}", **look)
        right.set_xlabel("step")
        right.set_ylabel("smoothed loss")
        right.legend(title="learning rate", fontsize=6, title_fontsize=7, frameon=False, ncols=2)

        for axes, tried in ((left, ended), (right, choice.tried)):
            # One exploding rate must not flatten the others.
            first = float(np.mean([each.losses[0] for each in tried if each.losses] or [1.0]))
            axes.set_ylim(top=min(axes.get_ylim()[1], 1.3 * first))
        format = path.suffix[1:]
        figure.savefig(buffer, format=format, dpi=200, metadata={"Date": None} if format == "svg" else {})
    files.write_bytes(path, buffer.getvalue())
