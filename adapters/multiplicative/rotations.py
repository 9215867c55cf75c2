"""Rotations and reflections of what a layer reads or gives: OFT, BOFT, HRA and RoAd, on HF PEFT's tuners."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from workbench.adapters import anatomy
from workbench.adapters.method import HALF_OR_FULL, MethodInfo, register
from workbench.adapters.target_modules import OnLayers, OnLinear
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Orthogonal(OnLinear):
    """W R, where R is a rotation built from blocks of `block` neighbouring inputs; it is the identity at the start."""

    changes_transposed: ClassVar[bool] = False
    block: Annotated[PositiveInt, Unit("inputs")] = 32
    """Inputs that one rotation turns; it divides the inputs of every target."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rotations that are left out while training."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that do not divide the inputs."""
        inputs = {path: sizes[0] for path, sizes in self.sizes(model).items()}
        common, mixed = math.gcd(*inputs.values()), self._mixed
        if common % mixed == 0:
            return None
        path = next(path for path, width in inputs.items() if width % mixed)
        able = [size for size in range(2, min(common, 256) + 1) if common % (size * (mixed // self.block)) == 0]
        return f"{path} has {inputs[path]} inputs, which {mixed} does not divide. Write adapter.block as one of {able}."

    @property
    def _mixed(self) -> int:
        """Number of inputs that are rotated together; it has to divide the inputs of every target."""
        return self.block


@register
class Oft(Orthogonal):
    """One rotation for each block of inputs."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "oft": MethodInfo("a rotation of the inputs of linear layers", "Qiu et al. 2023, arXiv:2306.07280"),
    }
    tuner: ClassVar[str] = "OFTConfig"
    method: Literal["oft"] = "oft"
    terms: Annotated[PositiveInt, Unit("terms")] = 5
    """Terms of the Neumann series for the inverse in the Cayley transform; more are closer to a rotation."""
    shared: bool = False
    """Whether all blocks of a layer share one rotation."""

    @model_validator(mode="after")
    def _drops_nothing(self) -> Oft:
        if self.dropout:
            raise ValueError("PEFT's OFT never applies its dropout. Write adapter.dropout=0, or adapter.method=boft.")
        return self

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that convolve, whose linear layers read pictures as PEFT's rotation does not know them."""
        if anatomy.convolves(model):
            return (
                f"the blocks of {type(model).__name__} hold convolutions, beside which PEFT rotates nothing. "
                "Take adapter.method=lora."
            )
        return super().refusal(model)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(oft_block_size=self.block, num_cayley_neumann_terms=self.terms, block_share=self.shared)


@register
class Boft(Orthogonal):
    """Several layers of block rotations with the inputs shuffled in between, and a factor for each output.

    PEFT holds a square matrix of the inputs for each layer and factor, in float32: for small backbones.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "boft": MethodInfo("a product of rotations, and output factors", "Liu et al. 2023, arXiv:2311.06243"),
    }
    tuner: ClassVar[str] = "BOFTConfig"
    method: Literal["boft"] = "boft"
    block: Annotated[PositiveInt, Unit("inputs")] = 8
    """Inputs that one rotation turns; `block` times two to the power of `factors` - 1 divides every target's inputs."""
    factors: Annotated[PositiveInt, Unit("factors")] = 2
    """Layers of rotations; with each, twice as many inputs mix. Stock PEFT loads several only with a CUDA compiler."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that cannot be shuffled in pairs, and whatever rotations refuse."""
        if self.factors > 1 and self.block % 2:
            return f"adapter.block={self.block} is odd, and inputs are shuffled by half blocks. Write an even one."
        return super().refusal(model)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        from workbench.adapters.multiplicative import boft_kernels  # noqa: F401

        return dict(boft_block_size=self.block, boft_n_butterfly_factor=self.factors, boft_dropout=self.dropout)

    def decays(self, parameter: str) -> bool:
        """No weight decay on the scale of an output: a factor of 0 would remove the output."""
        return ".boft_s." not in parameter

    @property
    def _mixed(self) -> int:
        more: int = 2 ** (self.factors - 1)
        return self.block * more


@register
class Hra(OnLayers):
    """W times a product of Householder reflections; they cancel in pairs at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "hra": MethodInfo("a product of reflections of the inputs", "Yuan et al. 2024, arXiv:2405.17484",
                          weights=HALF_OR_FULL, why_weights="it multiplies the stored weights"),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "HRAConfig"
    method: Literal["hra"] = "hra"
    rank: Annotated[PositiveInt, Unit("reflections")] = 8
    """Reflections, an even number."""

    @field_validator("rank")
    @classmethod
    def _in_pairs(cls, rank: int) -> int:
        if rank % 2:
            raise ValueError(f"reflections cancel in pairs at the start. Write {rank + 1}.")
        return rank

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank)

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
    tuner: ClassVar[str] = "RoadConfig"
    method: Literal["road"] = "road"
    variant: Literal[1, 2, 4] = 1
    """Angles and factors of a pair: 1 for both outputs, 1 for each, or 2 for each, which is no rotation any more."""
    group: Annotated[PositiveInt | None, Unit("outputs")] = None
    """Outputs within which pairs are made, of one half with the other: an even number that divides the outputs of every
    target. null: the largest that does, 64 at most."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse groups that do not divide the outputs of a layer, or have no halves."""
        able = self._able(model)
        if not able:
            return "some layers have an odd number of outputs. Write adapter.targets without them."
        if self.group is not None and self.group not in able:
            return f"adapter.group={self.group} does not divide the outputs of all layers. Write one of {able}."
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        group = self.group or max(size for size in self._able(model) if size <= 64)
        return dict(variant=f"road_{self.variant}", group_size=group)

    def decays(self, parameter: str) -> bool:
        """No weight decay: a factor of 0 would remove the output."""
        return False

    def _able(self, model: PreTrainedModel) -> list[int]:
        common = math.gcd(*(outputs for _, outputs in self.sizes(model).values()))
        return [size for size in range(2, common + 1, 2) if common % size == 0]
