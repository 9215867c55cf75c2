"""A plan as a person reads it: tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from workbench.planning.plan import Plan
from workbench.runs import units


def parts(found: Plan) -> Iterator[Table | Text | str]:
    """Tables of a plan: memory, where it lies, the alternatives, and whether it fits."""
    yield from (_bytes(found), Text())
    if found.devices > 1 or found.distributed.zero != 0:
        yield from (_timeline(found), Text())
    if len(found.tried) > 1:
        yield from (_tried(found), Text())
    dry_run, batch, time = found.dry_run, units.count(found.tokens_per_device), ""
    if found.seconds is not None:
        time = (
            f", {_step(found.seconds)} a step{_interval(found)}, {units.duration(found.seconds * found.steps)} in all"
        )
    yield (
        f"{found.size.trainable:,} of {found.size.total:,} parameters train ({found.weights} weights); the adapter's "
        f"file has {units.size(found.size.file_bytes)}.\n{found.steps:,} steps, {dry_run.micro_batches} passes of at "
        f"most {batch} tokens each; {dry_run.flops_per_token / 1e6:,.1f} MFLOP a token{time}."
    )
    verdict = "Fits" if found.fits else "Does not fit"
    where = f"{found.device}, zero={found.distributed.zero}" if found.devices > 1 else found.device
    needed = f"{units.size(found.needed)} of {units.size(found.memory)} on {where}"
    yield f"{verdict}: {needed}. {' '.join(found.notes)}".rstrip()


def _bytes(found: Plan) -> Table:
    """Table of the bytes of one device at the peak."""
    each = f" on each of {found.devices} devices" if found.devices > 1 else ""
    table = Table(f"bytes{each} at the peak of training", "", box=None)
    table.columns[1].justify = "right"
    for name, size in found.at_peak.items():
        table.add_row(name, units.size(size))
    table.add_row("together", units.size(sum(found.at_peak.values())), end_section=True)
    table.add_row("an evaluation", units.size(found.evaluation))
    if found.process:
        table.add_row("Python and its libraries", units.size(found.process))
    return table


def _timeline(found: Plan) -> Table:
    """Table of what each part of a step keeps on the device and outside of it."""
    table = Table("in", "on each device", box=None)
    places = ["device"]
    for place, where, size in (("host", "in the host's memory", found.host), ("disk", "on disk", found.disk)):
        if size:
            places.append(place)
            table.add_column(f"{where} for each ({units.size(size * found.devices)} in all)")
    for moment, held in found.timeline.items():
        cells: list[dict[str, int]] = [vars(held)[place] for place in places]
        table.add_row(
            moment, *(", ".join(f"{name} {units.size(size)}" for name, size in each.items()) for each in cells)
        )
    return table


def _tried(found: Plan) -> Table:
    """The ways that were compared, in their order."""
    table = Table("tried", "tokens a pass", "memory", "a step", "", box=None)
    for column in table.columns[1:4]:
        column.justify = "right"
    for way in found.tried:
        taken = found.fits and (way.tokens, way.needed, way.seconds) == (
            found.tokens_per_device,
            found.needed,
            found.seconds,
        )
        verdict = "taken" if taken else "fits" if way.fits else "does not fit"
        cells = (f"{way.tokens:,}", units.size(way.needed), _step(way.seconds), verdict)
        table.add_row(Text(way.way), *cells, style="bold" if taken else None)
    return table


def _interval(found: Plan) -> str:
    return "" if found.interval is None else f" ({_step(found.interval[0])} to {_step(found.interval[1])})"


def _step(seconds: float) -> str:
    return units.duration(seconds) if seconds >= 1 else f"{units.number(1000 * seconds)} ms"
