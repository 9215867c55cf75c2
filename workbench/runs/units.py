"""Numbers as people read them: 1.2 M, 3 min 12 s, 4.1 GB."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.errors import ConfigError

NOTHING = "-"
"""Stands where there is no number."""


def count(value: float | None) -> str:
    """Whole things with a decimal suffix: 812, 12.3 k, 1.2 M, 7.0 B."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return _scaled(value, ("", " k", " M", " B", " T"))


def size(value: float | None) -> str:
    """Bytes in decimal units: 812 bytes, 64.0 kB, 4.1 GB."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return _scaled(value, (" bytes", " kB", " MB", " GB", " TB"))


def byte_size(written: str | int, *, name: str) -> int:
    """Bytes of a size such as 24GB or 500MiB, or of a number of them; raises ConfigError for anything else.

    Args:
        name: Of the setting, for the message.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(written))
    except ValidationError:
        raise ConfigError(f"{name} {written}: expected a size such as 24GB or 500MiB.") from None


def duration(seconds: float | None) -> str:
    """The two largest units of a time: 4.2 s, 3 min 12 s, 5 h 2 min, 2 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if round(seconds) < 3600:
        return _two(round(seconds), 60, "min", "s")
    if round(seconds / 60) < 24 * 60:
        return _two(round(seconds / 60), 60, "h", "min")
    return _two(round(seconds / 3600), 24, "d", "h")


def step(seconds: float) -> str:
    """The time of a step, which may be short: 413 ms, 4.2 s."""
    return duration(seconds) if seconds >= 1 else f"{number(1000 * seconds)} ms"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage with two digits that count: 83 %, 2.4 %, 0.03 %."""
    if share is None or not math.isfinite(share):
        return NOTHING
    return f"{_digits(100 * share, 2)} %"


def number(value: float | None) -> str:
    """A measured value with three digits or more that count: 5,570, 262, 3.92, 0.214, 2.0e-05."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return _digits(value, 3)


def loss(value: float | None) -> str:
    """A loss with the digits that training moves: 1.2346."""
    return NOTHING if value is None else f"{value:.4f}"


def rounded(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores as files keep them, with six decimals."""
    return {name: round(value, 6) for name, value in scores.items()}


def signed(value: float) -> str:
    """A difference with its sign: +0.160, -1.65, and 0 without one."""
    return f"+{number(value)}" if value > 0 else number(value)


def _two(value: int, factor: int, large: str, small: str) -> str:
    whole, rest = divmod(value, factor)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def _scaled(value: float, suffixes: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.95 and power < len(suffixes) - 1:
        value /= 1000
        power += 1
    return f"{value:.1f}{suffixes[power]}" if power else f"{value:.0f}{suffixes[0]}"


def _digits(value: float, wanted: int) -> str:
    """`value` in plain notation with `wanted` significant digits, and never fewer than its whole part."""
    if value == 0:
        return "0"
    before_point = math.floor(math.log10(abs(value))) + 1
    # 0.214 keeps three decimals, not 0.2140: below 1 the digits are counted from the point, not from the 2,
    # unless that would leave nothing.
    decimals = max(0, wanted - max(before_point, 0))
    return f"{value:,.{max(decimals, 1 - before_point)}f}"
