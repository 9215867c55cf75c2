"""Section `schedule`: how the learning rate moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from workbench.schema import ConsistentSection, Unit

FEW = 10
"""Steps below which an adapter hardly moves."""


class ScheduleConfig(ConsistentSection):
    """Learning rate over the run, as a factor on train.learning_rate."""

    name: Literal[
        "linear", "cosine", "polynomial", "rex", "inverse_sqrt", "one_cycle", "wsd", "constant", "plateau"
    ] = "linear"
    """Shape after warm-up; `wsd` is warm-up, stable, decay; `plateau` falls where the held-out loss no longer does.
    `workbench check RECIPE --plot FILE.png` draws it. Why: a rate that falls to 0 in a line is as good as other shapes
    or better where the length of a run is known (Defazio et al. 2023, arXiv:2310.07831)."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the run in which the learning rate rises to its peak: linearly, in `one_cycle` by half a cosine.

    `one_cycle` is usually given 0.3. Why: the first steps of Adam rest on few gradients, and vary most (Liu et al.
    2020, arXiv:1908.03265)."""
    start: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate that the warm-up begins with, as a share of the peak; `one_cycle` is usually given 0.04."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the run that `wsd` falls in, at its end."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """How `wsd` falls; `sqrt` is fast at first: 1 minus the root of the share of the fall that is done."""
    power: PositiveFloat | None = None
    """Exponent of `polynomial`, which is 2 unless said otherwise; 1 is `linear`."""
    cycles: Annotated[PositiveInt, Unit("cycles")] = 1
    """Times that `cosine` falls, each time from the peak (SGDR, Loshchilov & Hutter 2017)."""
    cycle_growth: Annotated[float, Field(ge=1)] = 1.0
    """Length of a cycle of `cosine` through that of the one before it."""
    patience: Annotated[PositiveInt | None, Unit("evaluations")] = None
    """Evaluations without a lower held-out loss after which `plateau` falls; null: 2."""
    drop: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor that `plateau` falls by each time; null: 0.5."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate at the end, as a share of the peak; `inverse_sqrt` stays above it."""

    @property
    def waits(self) -> int:
        """Evaluations without gain after which `plateau` falls."""
        return 2 if self.patience is None else self.patience

    @property
    def dropped(self) -> float:
        """Factor by which `plateau` multiplies a rate."""
        return 0.5 if self.drop is None else self.drop

    def about_short(self, steps: int) -> list[str]:
        """Sentences on a run of so many steps, where these are too few to learn, or to warm up."""
        told, number = [], "1 step" if steps == 1 else f"{steps} steps"
        if steps < FEW:
            told.append(f"The run has only {number}, in which an adapter hardly moves. Write train.steps=100, or more.")
        if 0 < self.warmup * steps < 1:
            told.append(
                f"schedule.warmup={self.warmup:g} of {number} is less than one step, so that the rate begins at "
                f"its peak. Write train.steps={math.ceil(1 / self.warmup)}, or schedule.warmup=0."
            )
        return told

    def misfits(self, *, folds: bool, evaluates: bool, timed: bool, patience: int | None) -> Iterator[str]:
        """Contradictions with the rest of a run, one sentence for each.

        Args:
            folds: Whether the held-out rows are folds.
            evaluates: Whether held-out losses are measured while it trains.
            timed: Whether a clock ends it.
            patience: `evaluate.patience`.
        """
        if self.name != "plateau":
            return
        if not evaluates:
            yield (
                "schedule.name=plateau follows held-out losses, and evaluate.every=null measures none. "
                "Write evaluate.every=0.1."
            )
        if timed:
            yield (
                "schedule.name=plateau counts evaluations, and a budget of time leaves them out where it is short. "
                "Write schedule.name=linear, which ends with the budget, or train.steps and no budget."
            )
        if folds:
            yield (
                "schedule.name=plateau would follow the rows that the out-of-fold score is measured on. "
                "Write schedule.name=linear."
            )
        if patience is not None and patience <= self.waits:
            yield (
                f"evaluate.patience={patience} ends the run before schedule.patience={self.waits} lowers its rate. "
                f"Write evaluate.patience={2 * self.waits + 1}, or a smaller schedule.patience."
            )

    def _contradictions(self) -> Iterator[str]:
        name, warmup, start, floor = self.name, self.warmup, self.start, self.floor
        if name == "wsd" and warmup + self.decay > 1:
            yield f"warmup {warmup} and decay {self.decay} together exceed the run; make them sum to 1 or less."
        if name != "wsd" and (self.decay, self.decay_shape) != (0.2, "linear"):
            yield f"decay and decay_shape are for wsd, not for {name}. Write schedule.name=wsd, or leave them out."
        if name != "polynomial" and self.power is not None:
            yield f"power is for polynomial, not for {name}. Write schedule.name=polynomial, or leave power out."
        if name != "plateau" and (self.patience, self.drop) != (None, None):
            yield f"patience and drop are for plateau, not for {name}. Write schedule.name=plateau, or leave them out."
        if name != "cosine" and self.cycles > 1:
            yield f"cycles are for cosine, not for {name}. Write schedule.name=cosine, or leave cycles out."
        if self.cycles == 1 and self.cycle_growth != 1:
            yield "cycle_growth is for several cycles. Write schedule.cycles=3, or leave cycle_growth out."
        if name == "constant" and floor:
            yield f"constant never falls to floor {floor}. Leave schedule.floor out, or write schedule.name=cosine."
        if name in ("inverse_sqrt", "one_cycle") and not warmup:
            yield f"{name} needs a warm-up. Write schedule.warmup={0.3 if name == 'one_cycle' else 0.05}."
        elif start and not warmup:
            yield f"start {start} is where a warm-up begins. Write schedule.warmup=0.05, or leave schedule.start out."
        if name == "one_cycle" and floor > start:
            yield f"one_cycle never ends above start {start}. Write schedule.start={floor}, or lower schedule.floor."
