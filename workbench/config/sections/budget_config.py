"""Section `budget`: when a run ends, besides `train.steps` and `train.epochs`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from workbench.schema import ConsistentSection, Unit

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile("".join(rf"(?:(\d+\.?\d*){unit})?" for unit in _UNITS), re.ASCII)


def _seconds(value: Any) -> Any:
    """`1h30m` or `90m` to seconds; a number as it is."""
    if value == "slurm" or not isinstance(value, (str, bool)):
        return value
    matched = _DURATION.fullmatch(str(value).replace(" ", ""))
    if matched is None or not any(matched.groups()):
        raise ValueError(f"{value!r} is no time. Write 90m, 1h30m, 45s, or a number of seconds.")
    return sum(float(part) * unit for part, unit in zip(matched.groups(), _UNITS.values(), strict=True) if part)


class BudgetConfig(ConsistentSection):
    """Limits of a run. The one that is used up first ends it, and the learning rate ends with it."""

    time: Annotated[
        PositiveFloat | Literal["slurm"] | None,
        BeforeValidator(_seconds, json_schema_input_type=PositiveFloat | str | None),
        Unit("seconds"),
    ] = None
    """Wall clock from the start of the command to its end, reports and scores included: 90m, 1h30m, or seconds.

    `slurm`: until the end of the job that it runs in. How fast the machine is decides how many steps that is, so such
    a run is repeated exactly only by the number of steps that it took.
    """
    tokens: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Tokens that are read in training, without padding. Why: runs with as many tokens compare on any machine, which
    those of one time do not."""
    energy: Annotated[PositiveFloat | None, Unit("watt-hours")] = None
    """Watt-hours, at `power`."""
    power: Annotated[PositiveFloat | None, Unit("watts")] = None
    """Watts that the machine draws."""
    money: PositiveFloat | None = None
    """Most that the run may cost, at `price`."""
    price: PositiveFloat | None = None
    """Cost of an hour, in the currency of `money`."""

    def _contradictions(self) -> Iterator[str]:
        for amount, rate, unit in (("energy", "power", "watts"), ("money", "price", "a price of an hour")):
            given, per = getattr(self, amount), getattr(self, rate)
            if given is not None and per is None:
                yield f"{amount} {given:g} needs a rate. Write budget.{rate} as well ({unit}), or budget.time."
            if per is not None and given is None:
                yield f"{rate} {per:g} limits nothing by itself. Write budget.{amount} as well, or leave it out."

    @property
    def seconds(self) -> float | None:
        """The shortest wall clock that time, energy and money allow; None where nothing limits it, or only Slurm."""
        limits = [self.time] if isinstance(self.time, float) else []
        limits += [3600 * self.energy / self.power] if self.energy and self.power else []
        limits += [3600 * self.money / self.price] if self.money and self.price else []
        return min(limits, default=None)

    @property
    def timed(self) -> bool:
        """Whether wall clock ends the run."""
        return self.time is not None or self.seconds is not None

    @property
    def unlimited(self) -> bool:
        """Whether nothing here ends the run."""
        return not self.timed and self.tokens is None
