"""Which layers a run will train when, as a panel under its learning rate: `workbench check RECIPE --plot FILE`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator

from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.report.plots import Floats

COLUMNS = 1800
"""Most steps that are drawn, as many as the picture has pixels; of a longer run, evenly spaced ones."""
LABELS = 8
"""Most blocks that are named beside the panel."""


def rates(policy: FreezeConfig, *, steps: int, blocks: int, seed: int) -> Floats:
    """Factor on the learning rate of each layer (its row) in each step, or in COLUMNS of them; NaN where it is frozen.

    `policy` measures nothing.
    """
    columns = []
    for step in np.linspace(0, steps - 1, min(steps, COLUMNS)).round():
        plan = policy.plan(Moment(int(step), step / steps, seed), blocks=blocks)
        columns.append(np.where(plan.trains, plan.rates, np.nan))
    factors: Floats = np.array(columns).T
    return factors


def describe(policy: FreezeConfig, blocks: int | None) -> str | None:
    """Why the plan cannot be drawn, in words that stand in its place; None where it can."""
    if policy.observes is not None:
        return f"decided while training, from {policy.observes} measured every {policy.interval:,} steps"
    return "the blocks of this backbone are not known" if blocks is None else None


def draw(axes: Any, frozen: Floats, *, steps: int, colours: dict[str, str]) -> None:
    """Rows from the embeddings up to the head: deep where the rate is high, pale where it is low, grey where frozen.

    Args:
        frozen: As `rates` gives them.
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
    named = _named(len(frozen) - 2)
    axes.yaxis.set_major_locator(FixedLocator([0, *named, len(frozen) - 1]))
    axes.set_yticklabels(["embeddings", *(f"block {number}" for number in named), "head"])
    axes.grid(visible=False)
    axes.legend(handles=_key(frozen, colours), **_BESIDE_TITLE)


def frozen_share(frozen: Floats) -> float:
    """Share of all layer-steps in which a layer is frozen."""
    return float(np.isnan(frozen).mean())


_BESIDE_TITLE = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 3,
    "frameon": False,
    "borderaxespad": 0.2,
    "handlelength": 1,
    "handleheight": 1,
    "fontsize": 9,
}


def _key(frozen: Floats, colours: dict[str, str]) -> list[Patch]:
    """Legend of the shades."""
    highest = np.nanmax(frozen)
    shown = [(1.0, "trains")] if np.nanmin(frozen) == highest else [(1.0, f"rate times {highest:.3g}"), (0.0, "near 0")]
    patches = [
        Patch(color=to_hex(_shades(np.array(strength), colours).tolist()), label=label) for strength, label in shown
    ]
    return [*patches, Patch(color=colours["grid"], label="frozen")]


def _shades(strengths: Floats, colours: dict[str, str]) -> Floats:
    """Colours (.., 3) of strengths between 0 and 1."""
    pale, deep, frozen = (np.array(to_rgb(colours[name])) for name in ("surface", "series-0", "grid"))
    mix = (0.12 + 0.63 * np.nan_to_num(strengths))[..., None]
    shades: Floats = np.where(np.isnan(strengths)[..., None], frozen, (1 - mix) * pale + mix * deep)
    return shades


def _named(blocks: int) -> list[int]:
    """Numbers of blocks, evenly spaced, that get a label; none so near to the head that theirs would overlap."""
    stride = -(-blocks // LABELS)
    return list(range(stride, blocks + 2 - stride, stride))
