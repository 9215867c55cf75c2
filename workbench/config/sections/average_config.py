"""Section `average`: whether the values of several steps are averaged, and which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from workbench.schema import ConsistentSection, Unit

_METHODS_OF: Mapping[str, tuple[str, ...]] = {
    "decay": ("ema",),
    "start": ("swa", "rna", "lawa"),
    "every": ("swa", "rna", "lawa"),
    "k": ("rna", "lawa"),
    "ridge": ("rna",),
    "device": ("ema", "swa", "lawa", "rna"),
}
"""The methods that each setting is for."""


class AverageConfig(ConsistentSection):
    """An average of the trained values along the run. Its held-out loss is measured beside theirs; the better ships."""

    method: Literal["none", "ema", "swa", "lawa", "rna"] = "none"
    """`ema`: all steps, with weights that fall with age (Polyak & Juditsky 1992); `swa`: the samples of the run's last
    part, all alike (Izmailov et al. 2018); `lawa`: the latest `k` samples, all alike (Kaddour 2022); `rna`: the latest
    `k` samples, weighted so that their steps add up to least, which goes beyond them (Scieur et al. 2016)."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that a step of `ema` keeps, so that it looks back about 1 / (1 - decay) steps; step t of the
    run keeps never more than t / (9 + t), so that a short run is not averaged with its first values."""
    start: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the run before the first sample; null: 0.75 for `swa`, 0 for `lawa` and `rna`."""
    every: Annotated[
        Annotated[int, Field(gt=0, strict=True)] | Annotated[float, Field(gt=0, lt=1)],
        Unit("steps, or share of the run"),
    ] = 0.01
    """Steps, or share of the run, between two samples; the values of the last step are always one."""
    k: Annotated[int, Field(ge=2), Unit("samples")] = 5
    """Samples that `lawa` and `rna` read; each takes the memory of the trained values."""
    ridge: PositiveFloat = 1e-3
    """Regularisation of `rna`, relative to the largest product of steps: the larger, the more alike are the weights."""
    device: Literal["same", "cpu"] = "same"
    """Where the average is kept: beside the trained values, or in the memory of the CPU, which costs a transfer of each
    sample."""

    @property
    def begin(self) -> float:
        """`start`, or what it is by default for the method."""
        if self.start is not None:
            return self.start
        return 0.75 if self.method == "swa" else 0.0

    def _contradictions(self) -> Iterator[str]:
        for name, methods in _METHODS_OF.items():
            if self.differs(name) and self.method not in methods:
                known = " and ".join([", ".join(methods[:-1]), methods[-1]] if methods[1:] else methods)
                yield (
                    f"{name} is for {known}, not for {self.method}. "
                    f"Write average.method={methods[-1]}, or leave average.{name} out."
                )
