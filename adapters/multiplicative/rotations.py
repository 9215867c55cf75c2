"""HRA and RoAd: reflections of a layer's inputs, rotations of its outputs, on HF PEFT's tuners."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import PositiveInt, field_validator

from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, MethodInfo, register
from workbench.adapters.target_modules import OnLayers
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


@register
class Hra(OnLayers):
    """W times a product of Householder reflections; they cancel in pairs at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "hra": MethodInfo("a product of reflections of the inputs", "Yuan et al. 2024, arXiv:2405.17484",
                          weights=HALF_OR_FULL, why_weights="it multiplies the stored weights"),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    changes_transposed: ClassVar[bool] = False
    method: Literal["hra"] = "hra"
    rank: Annotated[PositiveInt, Unit("reflections")] = 8
    """Reflections, an even number."""

    @field_validator("rank")
    @classmethod
    def _in_pairs(cls, rank: int) -> int:
        if rank % 2:
            raise ValueError(f"reflections cancel in pairs at the start. Write {rank + 1}.")
        return rank

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's HRAConfig for this backbone."""
        from peft import HRAConfig

        return HRAConfig(**self.common(model, beside), r=self.rank)

    def decays(self, parameter: str) -> bool:
        """No weight decay: the length of a reflection's normal means nothing."""
        return False


@register
class Road(OnLayers):
    """Turns and stretches pairs of outputs; angles are 0 and factors 1 at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "road": MethodInfo("rotations and scales of pairs of outputs", "Liao and Monz 2024, arXiv:2409.00119"),
    }
    changes_transposed: ClassVar[bool] = False
    method: Literal["road"] = "road"
    variant: Literal[1, 2, 4] = 1
    """Angles and factors of a pair: 1 for both outputs, 1 for each, or 2 for each, which is no rotation any more."""
    group: Annotated[PositiveInt | None, Unit("outputs")] = None
    """Outputs within which pairs are made, of one half with the other: an even number that divides the outputs of every
    target. null: the largest that does, 64 at most."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse groups that do not divide the outputs of a layer, or have no halves."""
        if reason := super().refusal(model):
            return reason
        able = self._able(model)
        if not able:
            return "some layers have an odd number of outputs. Write adapter.targets without them."
        if self.group is not None and self.group not in able:
            return f"adapter.group={self.group} does not divide the outputs of all layers. Write one of {able}."
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's RoadConfig for this backbone."""
        from peft import RoadConfig

        group = self.group or max(size for size in self._able(model) if size <= 64)
        return RoadConfig(**self.common(model, beside), variant=f"road_{self.variant}", group_size=group)

    def decays(self, parameter: str) -> bool:
        """No weight decay: a factor of 0 would remove the output."""
        return False

    def _able(self, model: PreTrainedModel) -> list[int]:
        common = math.gcd(*(outputs for _, outputs in self.sizes(model).values()))
        return [size for size in range(2, common + 1, 2) if common % size == 0]
