"""Section `distributed.compression`: fewer bytes for what travels between devices, and what that may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from workbench.schema import Section, Unit


class CompressionConfig(Section):
    """Gradients and weights as codes of few bits while they travel; off by default, and then every bit is as without.

    A device keeps float32 masters and adds up in float32. How far a loss curve then is from that of one device was
    measured: scripts/launch/README.md.
    """

    gradients: Literal["none", "int8", "onebit"] = "none"
    """Codes of gradients. int8: of a value, in blocks (qgZ of ZeRO++, Wang et al. 2023). onebit, with zero=0: its sign,
    and the mean size of a block; with optimizer.name=adamw 1-bit Adam (Tang et al. 2021), with sgd 1-bit SGD (Seide et
    al. 2014). With zero=0 what a code leaves out is kept and added to the next step's gradients (error feedback)."""
    weights: Literal["none", "int8"] = "none"
    """Codes of the weights that devices send each other, with engine=fsdp2: int8, in blocks (qwZ of ZeRO++)."""
    warm_up: Annotated[NonNegativeInt, Unit("steps")] = 100
    """Steps at the start in which everything travels as it is. 1-bit Adam keeps the second moments that it has learnt
    by their end; the paper warms up for 15 to 25 % of all steps."""
    block: Annotated[int, Field(ge=8, le=65536, multiple_of=8), Unit("values")] = 256
    """Values that share a scale, of 4 bytes: fewer are more exact and take more bytes."""

    @property
    def is_on(self) -> bool:
        """Whether anything travels as codes."""
        return self.gradients != "none" or self.weights != "none"

    @model_validator(mode="after")
    def _of_something(self) -> CompressionConfig:
        fields = type(self).model_fields
        idle = [name for name in ("block", "warm_up") if getattr(self, name) != fields[name].default]
        if idle and not self.is_on:
            raise ValueError(
                f"{' and '.join(idle)} would change nothing: neither gradients nor weights are compressed. "
                f"Write gradients=int8, or leave {' and '.join(idle)} out."
            )
        return self
