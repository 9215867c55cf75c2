"""A plan as a person reads it: tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from workbench.planning.plan import Plan
from workbench.runs import units


def parts(plan: Plan) -> Iterator[Table | Text | str]:
    """Tables of a plan: memory, where it lies, the alternatives, and whether it fits."""
    yield from (_bytes(plan), Text())
    if plan.devices > 1 or plan.distributed.zero != 0:
        yield from (_timeline(plan), Text())
    if len(plan.tried) > 1:
        yield from (_tried(plan), Text())
    dry_run, batch, time = plan.dry_run, units.count(plan.tokens_per_device), ""
    if plan.seconds is not None:
        whole = units.duration(plan.once + plan.seconds * plan.steps)
        before = f" with {units.duration(plan.once)} before the first" if plan.once else ""
        time = f", {_step(plan.seconds)} a step{_interval(plan)}, {whole} in all{before}"
    yield (
        f"{plan.size.trainable:,} of {plan.size.total:,} parameters train ({plan.weights} weights); the adapter's "
        f"file has {units.size(plan.size.file_bytes)}.\n{plan.steps:,} steps, {dry_run.micro_batches} passes of at "
        f"most {batch} tokens each; {dry_run.flops_per_token / 1e6:,.1f} MFLOP a token{time}."
    )
    verdict = "Fits" if plan.fits else "Does not fit"
    where = f"{plan.device}, zero={plan.distributed.zero}" if plan.devices > 1 else plan.device
    needed = f"{units.size(plan.needed)} of {units.size(plan.memory)} on {where}"
    yield f"{verdict}: {needed}. {' '.join(plan.notes)}".rstrip()
    if plan.members is not None:
        yield plan.members.sentence


def _bytes(plan: Plan) -> Table:
    """Table of the bytes of one device at the peak."""
    each = f" on each of {plan.devices} devices" if plan.devices > 1 else ""
    table = Table(f"bytes{each} at the peak of training", "", box=None)
    table.columns[1].justify = "right"
    for name, size in plan.at_peak.items():
        table.add_row(name, units.size(size))
    table.add_row("together", units.size(sum(plan.at_peak.values())), end_section=True)
    table.add_row("an evaluation", units.size(plan.evaluation))
    if plan.offloaded:
        table.add_row("inputs of blocks in the host's memory", units.size(plan.offloaded))
    if plan.process:
        table.add_row("Python and its libraries", units.size(plan.process))
    return table


def _timeline(plan: Plan) -> Table:
    """Table of what each part of a step keeps on the device and outside of it."""
    table = Table("in", "on each device", box=None)
    places = ["device"]
    for place, where, size in (("host", "in the host's memory", plan.host), ("disk", "on disk", plan.disk)):
        if size:
            places.append(place)
            table.add_column(f"{where} for each ({units.size(size * plan.devices)} in all)")
    for moment, held in plan.timeline.items():
        cells: list[dict[str, int]] = [vars(held)[place] for place in places]
        table.add_row(
            moment, *(", ".join(f"{name} {units.size(size)}" for name, size in each.items()) for each in cells)
        )
    return table


def _tried(plan: Plan) -> Table:
    """The ways that were compared, in their order."""
    table = Table("tried", "tokens a pass", "memory", "a step", "", box=None)
    for column in table.columns[1:4]:
        column.justify = "right"
    for way in plan.tried:
        taken = plan.fits and (way.tokens, way.needed, way.seconds) == (
            plan.tokens_per_device,
            plan.needed,
            plan.seconds,
        )
        verdict = "taken" if taken else "fits" if way.fits else "does not fit"
        cells = (f"{way.tokens:,}", units.size(way.needed), _step(way.seconds), verdict)
        table.add_row(Text(way.way), *cells, style="bold" if taken else None)
    return table


def _interval(plan: Plan) -> str:
    return "" if plan.interval is None else f" ({_step(plan.interval[0])} to {_step(plan.interval[1])})"


def _step(seconds: float) -> str:
    return units.duration(seconds) if seconds >= 1 else f"{units.number(1000 * seconds)} ms"
