"""Plots of a mixture whose shares were learnt: where they went, and what drove them."""

from __future__ import annotations

from workbench.report.plots import Axis, Plot, draw, lines
from workbench.report.run_record import RunRecord
from workbench.runs import units

_STEP = Axis("step", "count")


def plots(run: RunRecord) -> list[Plot]:
    """Share and excess loss of each source in each step; none where nothing was learnt."""
    names = run.named("mix_share")
    if not names:
        return []
    shares = [run.metrics[f"mix_share[{name}]"] for name in names]
    means = ", ".join(f"{name} {units.percent(each.mean())}" for name, each in zip(names, shares, strict=True))
    return [
        draw(
            "Share of each source",
            lines(run.metrics, "mix_share", names),
            x=_STEP,
            y=Axis("share of the rows", from_zero=True),
            caption=f"Mean over the run: {means}.",
        ),
        draw(
            "Loss of each source above its reference",
            lines(run.metrics, "excess_loss", run.named("excess_loss")),
            x=_STEP,
            y=Axis(run.unit, marks=(0.0,)),
            caption="Over the rows of the last window. Shares of the upper lines rise against those of the lower ones.",
        ),
    ]
