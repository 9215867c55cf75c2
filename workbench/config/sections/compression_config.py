"""Section `distributed.compression`: fewer bytes for what travels between devices, by each engine's own means."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt, field_validator, model_validator

from workbench.schema import Section, Unit

_GONE = {
    "int8": "there are no int8 sums any more. Write gradients=powersgd or gradients=bfloat16, or with zero=3 int4",
    "onebit": "DeepSpeed has no 1-bit optimizers any more (scripts/launch/FRAMEWORKS.md). Write gradients=powersgd",
}


class CompressionConfig(Section):
    """Gradients and weights in fewer bits while they travel; off by default, and then every bit is as without.

    A device keeps float32 masters. How far a loss curve is from that of one device was measured:
    scripts/launch/README.md.
    """

    gradients: Literal["none", "bfloat16", "float16", "powersgd", "int4"] = "none"
    """What gradients travel as. bfloat16 or float16: by DDP's communication hooks, or as FSDP2 and DeepSpeed reduce.
    powersgd, with zero=0: two thin matrices in the place of each (Vogels et al. 2019), by DDP's hook; what they leave
    out is added to the next step's gradients (error feedback). int4, with zero=3 of DeepSpeed: qgZ of ZeRO++."""
    weights: Literal["none", "int8"] = "none"
    """What weights travel as, with zero=3 of DeepSpeed. int8: qwZ of ZeRO++ (Wang et al. 2023)."""
    rank: Annotated[PositiveInt, Unit("columns")] = 1
    """Columns of powersgd's matrices: more are more exact and take more bytes."""
    warm_up: Annotated[int, Unit("steps")] = 100
    """Steps at the start in which powersgd sends gradients as they are, 2 or more; torch advises 10 % of all steps."""

    @property
    def is_on(self) -> bool:
        """Whether anything travels in fewer bits."""
        return self.gradients != "none" or self.weights != "none"

    @field_validator("gradients", mode="before")
    @classmethod
    def _still_there(cls, value: object) -> object:
        if isinstance(value, str) and value in _GONE:
            raise ValueError(f"{_GONE[value]}.")
        return value

    @model_validator(mode="after")
    def _of_something(self) -> CompressionConfig:
        fields = type(self).model_fields
        idle = [name for name in ("rank", "warm_up") if getattr(self, name) != fields[name].default]
        if idle and self.gradients != "powersgd":
            names = " and ".join(idle)
            raise ValueError(f"{names} would change nothing without gradients=powersgd. Write that, or leave it out.")
        if self.warm_up < 2:
            raise ValueError(f"warm_up={self.warm_up}: PowerSGD begins after 2 steps or more. Write warm_up=2.")
        return self
