"""Line plots and histograms as SVG text that stands inside a page and takes its colours from the page's CSS."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullFormatter
from numpy.typing import NDArray

from workbench.runs import units

if TYPE_CHECKING:
    import pandas as pd

POINTS = 1000
"""Most points of a line."""
COLOURS = 8
"""How many `--series-N` colours the page's CSS defines."""

Floats = NDArray[np.float64]
Style = Literal["line", "faint", "marked", "points", "bars"]

# Drawn in these exact colours, which the page's CSS variables then replace: one SVG serves light and dark.
_SENTINELS = {"#010203": "--ink", "#010204": "--grid", "#010205": "--surface"}
_SENTINELS |= {f"#0102{16 + index:02x}": f"--series-{index}" for index in range(COLOURS)}
_INK, _GRID, _SURFACE, *_SERIES = _SENTINELS
_HOURS = (3600, 7200, 21600, 43200)


def settings(*, ink: str, grid: str) -> dict[Any, Any]:
    """Settings of matplotlib for drawings in these colours."""
    return {
        "svg.fonttype": "none",  # real text: small, searchable, in the page's font
        "text.parse_math": False,  # a run may be called cheap_$5
        "font.size": 8,
        "text.color": ink,
        "axes.edgecolor": grid,
        "axes.labelcolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.5,
        "xtick.color": grid,
        "ytick.color": grid,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "ytick.left": False,
        "lines.solid_capstyle": "round",
    }


_RC = settings(ink=_INK, grid=_GRID)


def palette() -> dict[str, str]:
    """The light colours of a page by the names of its CSS variables, for pictures outside of a page."""
    css = resources.files("workbench.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+);", css[: css.index("}")]))


@dataclass(frozen=True)
class Series:
    """One line (or, with style `bars`, one histogram: `x` then holds one edge more than `y`)."""

    label: str
    x: Floats
    y: Floats
    style: Style = "line"
    colour: int = 0

    @property
    def swatch(self) -> int:
        """Which of the page's series colours this one has."""
        return self.colour % COLOURS

    @property
    def stroke(self) -> str:
        """Tells lines of the same colour apart, as CSS and matplotlib both call it."""
        return ("solid", "dashed", "dotted")[self.colour // COLOURS % 3]


def floats(values: Any) -> Floats:
    """A column as an array."""
    return np.asarray(values, dtype=np.float64)


def lines(metrics: pd.DataFrame, measure: str, names: Iterable[str], style: Style = "line") -> list[Series]:
    """A line for each of a measure's columns, such as `reward[mean]`, over the steps."""
    step = floats(metrics["step"])
    return [
        Series(name, step, floats(metrics[f"{measure}[{name}]"]), style, colour) for colour, name in enumerate(names)
    ]


@dataclass(frozen=True)
class Plot:
    """A figure of a page: the drawing and the words that stand for it."""

    title: str
    svg: str
    """Empty where there is nothing to draw yet."""
    legend: tuple[Series, ...] = ()
    caption: str = ""
    wide: bool = False

    def once_each(self) -> Plot:
        """The same with a legend that names lines of the same name once."""
        legend = tuple({one.label: one for one in self.legend}.values())
        return replace(self, legend=legend if len(legend) > 1 else ())


@dataclass(frozen=True)
class Axis:
    """An axis: its label, the format of its ticks, and whether it starts at 0."""

    label: str = ""
    ticks: Literal["number", "count", "size", "duration", "none"] = "number"
    from_zero: bool = False
    marks: tuple[float, ...] = ()
    """Values that get a dashed line across the plot."""
    logarithmic: tuple[float, ...] = ()
    """Values that get a tick, on an axis that is then logarithmic."""
    names: tuple[str, ...] = ()
    """Names that stand at 0, 1, 2, ... instead of numbers."""


STEP = Axis("step", "count")


def draw(
    title: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    caption: str = "",
    ring: Sequence[float] = (),
    wide: bool = False,
) -> Plot:
    """A plot of the series that hold a finite value; `ring` is a point (x, y) that is circled."""
    shown = [one for one in series if np.isfinite(one.y).any()]
    if not shown:
        return Plot(title, svg="", caption=caption, wide=wide)
    svg = _drawn(title, shown, x, y, ring=ring, wide=wide)
    return Plot(title, svg=svg, legend=tuple(shown) if len(shown) > 1 else (), caption=caption, wide=wide)


def _drawn(title: str, shown: Sequence[Series], x: Axis, y: Axis, *, ring: Sequence[float], wide: bool) -> str:
    """The picture itself, as SVG."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(9, 3.1) if wide else (4.4, 2.3), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for one in shown:
            _draw_series(axes, one)
        if len(ring):
            axes.plot(*ring, "o", markersize=9, markerfacecolor="none", markeredgecolor=_INK, markeredgewidth=1)
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        axes.margins(x=0.02)
        axes.grid(visible=False, axis="both" if y.ticks == "none" else "x")
        values = np.concatenate([one.y[np.isfinite(one.y)] for one in shown])
        if values.min() > 0 and values.max() > 20 * np.median(values):
            # One exploding step must not flatten the rest of the curve.
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif y.from_zero:
            axes.set_ylim(0, 1.06 * max(values.max(), 1e-12))
        if x.logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(x.logarithmic))
            axes.xaxis.set_minor_formatter(NullFormatter())
        for axis, wanted in ((axes.xaxis, x), (axes.yaxis, y)):
            if wanted.names:
                axis.set_major_locator(FixedLocator(range(len(wanted.names))))
            elif wanted.ticks == "duration":
                longest = axis.get_data_interval()[1]
                # A round number of seconds, minutes or hours, for six ticks at most.
                steps = [*(unit * factor for unit in (1, 60) for factor in (1, 2, 5, 10, 15, 30)), *_HOURS]
                days = 86400 * max(1, round(longest / 86400 / 6))
                axis.set_major_locator(MultipleLocator(next((step for step in steps if longest / step <= 6), days)))
            elif axis.get_scale() == "linear":
                whole = wanted.ticks == "count"  # one tick is enough, where another one would be no whole number
                axis.set_major_locator(MaxNLocator(nbins=6, integer=whole, min_n_ticks=2 - whole))
            axis.set_major_formatter(_formatter(wanted))
        for marks, line in ((x.marks, axes.axvline), (y.marks, axes.axhline)):
            for value in marks:
                line(value, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        # The <svg> element alone, without the ids, metadata and fixed size that cannot stand twice in a page.
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": title}):
            empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :].strip()
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<svg[^>]*(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", svg, count=1)
        svg = re.sub(r'<g id="[^"]*"', "<g", svg)
        svg = re.sub(r" font-family: [^;]*;", "", svg)
        svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
        svg = re.sub(r"\s*\n\s*", " ", svg).replace("xlink:href", "href")
        for colour, variable in _SENTINELS.items():
            svg = svg.replace(colour, f"var({variable})")
        return svg


def thin(x: Floats, y: Floats, *, points: int = POINTS) -> tuple[Floats, Floats]:
    """At most `points` points of a line, in order: the lowest and the highest of each stretch, and both ends."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(y) <= points:
        return x, y
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), points // 2 - 1):
        kept |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    order = sorted(kept)
    return x[order], y[order]


def _draw_series(axes: Any, series: Series) -> None:
    colour = _SERIES[series.swatch]
    if series.style == "bars":
        axes.stairs(series.y, series.x, fill=True, color=colour, alpha=0.25)
        axes.stairs(series.y, series.x, color=colour, linewidth=1.2)
        return
    x, y = thin(series.x, series.y)
    if series.style in ("marked", "points") or len(y) == 1:
        style = "none" if series.style == "points" else series.stroke
        dots = {"marker": "o", "markersize": 4.5, "markeredgecolor": _SURFACE}
        axes.plot(x, y, linestyle=style, color=colour, linewidth=1.2, **dots)
    elif series.style == "faint":
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.4)
    else:
        axes.plot(x, y, linestyle=series.stroke, color=colour, linewidth=1.5)


def _formatter(axis: Axis) -> Any:
    if axis.ticks == "none":
        return NullFormatter()
    if axis.names:
        return FuncFormatter(lambda value, _: axis.names[round(value)] if 0 <= round(value) < len(axis.names) else "")
    shown = {"number": "{:.4g}".format, "count": units.count, "size": units.size, "duration": units.duration}[
        axis.ticks
    ]
    return FuncFormatter(lambda value, _: shown(value).replace(".0 ", " "))
