"""Which curves of a run, or of several, are drawn, and the sentence that stands under each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from workbench.report import crossval_section
from workbench.report.plots import POINTS, STEP, Axis, Floats, Plot, Series, draw, floats, lines, thin
from workbench.report.run_record import OPENED, RunRecord, averaged, rounds
from workbench.runs import units


def of_run(run: RunRecord) -> list[Plot]:
    """The plots of one run; a plot without data says so by its empty drawing."""
    step, metrics = floats(run.metrics["step"]), run.metrics
    plots = [_members(run) if run.crossvalidates else _loss(run)]
    if OPENED in metrics:
        share = floats(metrics[OPENED])
        # A self-paced curriculum has all rows open in its first pass, and closes some again.
        for_good = step[1 + np.flatnonzero(share < 1).max(initial=-1) :]
        end = f"All are open from step {int(for_good[0]):,} on." if len(for_good) else "Not all are open at the end."
        axis, caption = (
            Axis("share of the rows", from_zero=True, marks=(1.0,)),
            f"Each step samples the open rows. {end}",
        )
        series = [Series("open", step, share)]
        plots.append(draw("Rows open by data.curriculum", series, x=STEP, y=axis, caption=caption))

    rate = metrics["learning_rate"]
    caption = f"Peak {rate.max():.2g} at step {int(metrics['step'][rate.idxmax()]):,}." if rate.notna().any() else ""
    series = [Series("learning rate", step, floats(rate))]
    plots.append(draw("Learning rate", series, x=STEP, y=Axis(from_zero=True), caption=caption))

    norm, marks = metrics["grad_norm"], tuple[float, ...]()
    caption = f"Median {units.number(norm.median())}." if norm.notna().any() else ""
    if run.clipped:
        marks = (float(run.config["train"]["max_grad_norm"]),)
        caption += f" Scaled down to {marks[0]:g} (dashed) in {units.percent(run.clipped)} of the steps."
    series = [Series("each step", step, floats(norm), "faint"), Series("smoothed", step, _smooth(norm))]
    plots.append(draw("Gradient norm", series, x=STEP, y=Axis(from_zero=True, marks=marks), caption=caption))

    if not run.crossvalidates:
        speed, unit = metrics["tokens_per_second"] / run.tokens_of_unit, f"{run.unit_of_length} per second"
        caption = f"Median {speed.median():,.0f} {unit}." if speed.notna().any() else ""
        series = [Series("each step", step, floats(speed), "faint"), Series("smoothed", step, _smooth(speed))]
        plots.append(draw("Throughput", series, x=STEP, y=Axis(unit, "count", from_zero=True), caption=caption))

    peak = metrics["peak_bytes"]
    where = "GPU" if run.manifest.get("hardware", {}).get("device") == "cuda" else "resident"
    caption = f"At most {units.size(peak.max())} of {where} memory." if peak.notna().any() else ""
    series, axis = [Series("peak memory", step, floats(peak))], Axis(ticks="size", from_zero=True)
    plots.append(draw("Peak memory so far", series, x=STEP, y=axis, caption=caption))
    return plots if run.equally_long else [*plots, _lengths(run)]  # all pictures are cut into as many patches


def of_runs(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Plot]:
    """The runs' losses over each other: against tokens seen and against time."""
    training, held_out = [], []
    for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
        tokens = run.metrics["tokens"].fillna(0).cumsum()
        training.append(Series(name, floats(tokens), _smooth(run.metrics["loss"]), colour=colour))
        held_out.append(Series(name, *_held_out(run, "elapsed_s"), "marked", colour))
    loss = Axis(" or ".join(dict.fromkeys(run.unit for run in runs)))
    smoothed = "Each line is smoothed over 5 % of its run, 5 steps at least."
    from_zero = "The point at 0 is the backbone before training."
    tokens_seen, time = Axis("tokens seen", "count"), Axis("training time", "duration")
    return [
        draw("Training loss against tokens", training, x=tokens_seen, y=loss, caption=smoothed, wide=True),
        draw("Held-out loss against time", held_out, x=time, y=loss, caption=from_zero, wide=True),
    ]


def of_costs(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Plot]:
    """Score of each student, and of its teachers, against the time that it takes for one row; none without two."""
    score = next((found for run in runs if run.costs and (found := crossval_section.main_score(run))), "")
    points = dict[tuple[float, float], str]()
    for run, name in zip(runs, names, strict=True):
        for who, when, title in (("student", "after", name), ("teacher", "teacher", "teacher")):
            costs, value = run.costs.get(who, {}), run.scores.get(when, {}).get(score)
            seconds = costs.get("first_token_s", costs.get("seconds_1"))
            if seconds is not None and value is not None:
                points[1000 * seconds, value] = title
    if len(points) < 2:
        return []
    colours = {title: colour for colour, title in enumerate(dict.fromkeys(points.values()))}
    series = [Series(title, floats([x]), floats([y]), "points", colours[title]) for (x, y), title in points.items()]
    writes = any("first_token_s" in run.costs.get("student", {}) for run in runs)
    x = Axis("ms to the first token" if writes else "ms for a row", from_zero=True)
    return [draw("Score against time of one row", series, x=x, y=Axis(score.replace("_", " ")), wide=True).once_each()]


def of_mixture(run: RunRecord) -> list[Plot]:
    """Share and excess loss of each source in each step; none where no shares of a mixture were learnt."""
    names = run.named("mix_share")
    if not names:
        return []
    means = ", ".join(f"{name} {units.percent(run.metrics[f'mix_share[{name}]'].mean())}" for name in names)
    return [
        draw(
            "Share of each source",
            lines(run.metrics, "mix_share", names),
            x=STEP,
            y=Axis("share of the rows", from_zero=True),
            caption=f"Mean over the run: {means}.",
        ),
        draw(
            "Loss of each source above its reference",
            lines(run.metrics, "excess_loss", run.named("excess_loss")),
            x=STEP,
            y=Axis(run.unit, marks=(0.0,)),
            caption="Over the rows of the last window. Shares of the upper lines rise against those of the lower ones.",
        ),
    ]


def _loss(run: RunRecord) -> Plot:
    step, loss, smooth = floats(run.metrics["step"]), floats(run.metrics["loss"]), _smooth(run.metrics["loss"])
    best, caption = run.best_step, ""
    if np.isfinite(smooth).any():
        finite = smooth[np.isfinite(smooth)]
        caption = f"Training loss from {units.number(finite[0])} to {units.number(finite[-1])} (smoothed)."
    if best:
        caption += f" Lowest held-out loss {units.number(best[1])} at step {best[0]:,}, circled."
    series = [
        Series("training loss, each step", step, loss, "faint", 0),
        Series("smoothed", step, smooth, "line", 0),
        Series("held-out loss", *_held_out(run, "step"), "marked", 1),
        *(
            Series(f"held-out loss, {name}", *_held_out(run, "step", name), "line", 2 + number)
            for number, name in enumerate(run.held_out_sets)
        ),
    ]
    return draw("Loss", series, x=STEP, y=Axis(run.unit), caption=caption.strip(), ring=best or (), wide=True)


def _members(run: RunRecord) -> Plot:
    """The loss of each adapter, thin, and the mean of each round."""
    each, means = [], []
    for colour, (name, members) in enumerate(rounds(run.members).items()):
        for metrics in members:
            x, y = thin(floats(metrics["step"]), _smooth(metrics["loss"]), points=max(40, 2 * POINTS // len(members)))
            each.append(Series("each adapter", x, y, "faint", colour))
        mean = averaged(members)
        means.append(Series(f"mean, {name}", floats(mean["step"]), _smooth(mean["loss"]), "line", colour))
        watched = mean.dropna(subset=["held_out_loss"])
        x, y = floats(watched["step"]), floats(watched["held_out_loss"])
        means.append(Series(f"own fold, mean, {name}", x, y, "marked", colour))
    caption = f"Training loss of {len(run.members):,} adapters, smoothed"
    caption += "; points are the loss on their own fold." if any(len(one.x) for one in means[1::2]) else "."
    plot = draw("Loss of the adapters", [*each, *means], x=STEP, y=Axis(run.unit), caption=caption, wide=True)
    # One entry of the legend stands for all thin lines.
    return replace(plot, legend=(*each[:1], *(one for one in plot.legend if one.style != "faint")))


def _lengths(run: RunRecord) -> Plot:
    series, captions = [], []
    for colour, (name, label) in enumerate((("train", "train"), ("held_out", "held-out"))):
        split = run.manifest.get("data", {}).get(name) or {}
        if split.get("counts"):
            edges, counts = np.array(split["lengths"], dtype=float), np.array(split["counts"], dtype=float)
            # A density, so that splits of different size and binning lie on each other.
            series.append(Series(label, edges, counts / (counts.sum() * np.diff(edges)), "bars", colour))
            captions.append(f"{label} {split['rows']:,} rows, {units.count(split['tokens'])} tokens")
    longest = max((one.x[-1] for one in series), default=0)
    limit = run.config.get("data", {}).get("max_tokens")
    marks = (float(limit),) if limit and limit <= 1.1 * longest else ()
    caption = "; ".join(captions).capitalize() + ("." if captions else "")
    caption += f" Longer ones are cut at {limit:,} tokens (dashed)." if marks else ""
    x, y = Axis("tokens in an example", "count", marks=marks), Axis("share of examples", "none", from_zero=True)
    return draw("Example lengths", series, x=x, y=y, caption=caption, wide=True)


def _held_out(run: RunRecord, against: str, one: str = "") -> tuple[Floats, Floats]:
    """Held-out loss of all sets, or of `one`, against a column of the metrics; the first point is before training."""
    which = f"[{one}]" if one else ""
    at, loss = floats(run.held_out[against]), floats(run.held_out[f"held_out_loss{which}"])
    before = run.scores.get("before", {}).get(f"loss{which}")
    if before is None or run.metrics.empty:
        return at, loss
    return np.concatenate([[0.0], at]), np.concatenate([[before], loss])


def _smooth(values: pd.Series) -> Floats:
    """The centred mean over 5 % of the run, 5 steps at least; unlike a trailing one it does not lag."""
    window = max(5, len(values) // 20) | 1
    return floats(values.rolling(window, center=True, min_periods=1).mean())
