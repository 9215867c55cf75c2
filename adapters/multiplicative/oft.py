"""Orthogonal fine-tuning: rotations in front of linear layers, on HF PEFT's OFT and BOFT tuners."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, MethodInfo, register
from workbench.adapters.target_modules import OnLinear
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


class Orthogonal(OnLinear):
    """W R, where R is a rotation built from blocks of `block` neighbouring inputs; it is the identity at the start."""

    changes_transposed: ClassVar[bool] = False
    block: Annotated[PositiveInt, Unit("inputs")] = 32
    """Inputs that one rotation turns; it divides the inputs of every target."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rotations that are left out while training."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that do not divide the inputs, beside layers of kinds that PEFT does not rotate."""
        if reason := super().refusal(model):
            return reason
        return self._misfit({path: inputs for path, (inputs, _) in self.sizes(model).items()})

    @property
    def _mixed(self) -> int:
        """Number of inputs that are rotated together; it has to divide the inputs of every target."""
        return self.block

    def _misfit(self, inputs: dict[str, int]) -> str | None:
        common = math.gcd(*inputs.values())
        if common % self._mixed == 0:
            return None
        path = next(path for path, width in inputs.items() if width % self._mixed)
        more = self._mixed // self.block
        able = [size for size in range(2, min(common, 256) + 1) if common % (size * more) == 0]
        return (
            f"{path} has {inputs[path]} inputs, which {self._mixed} does not divide. "
            f"Write adapter.block as one of {able}."
        )


@register
class Oft(Orthogonal):
    """One rotation for each block of inputs."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "oft": MethodInfo("a rotation of the inputs of linear layers", "Qiu et al. 2023, arXiv:2306.07280"),
    }
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

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's OFTConfig for this backbone."""
        from peft import OFTConfig

        return OFTConfig(
            task_type=anatomy.task(model),
            oft_block_size=self.block,
            num_cayley_neumann_terms=self.terms,
            block_share=self.shared,
            target_modules=self.modules(model),
            modules_to_save=beside.heads or None,
        )


@register
class Boft(Orthogonal):
    """Several layers of block rotations with the inputs shuffled in between, and a factor for each output.

    PEFT holds a square matrix of the inputs for each layer and factor, in float32: for small backbones.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "boft": MethodInfo("a product of rotations, and output factors", "Liu et al. 2023, arXiv:2311.06243"),
    }
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

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's BOFTConfig for this backbone."""
        from peft import BOFTConfig

        from workbench.adapters.multiplicative import boft_kernels  # noqa: F401

        return BOFTConfig(
            task_type=anatomy.task(model),
            boft_block_size=self.block,
            boft_n_butterfly_factor=self.factors,
            boft_dropout=self.dropout,
            target_modules=self.modules(model),
            modules_to_save=beside.heads or None,
        )

    def decays(self, parameter: str) -> bool:
        """No weight decay on the scale of an output: a factor of 0 would remove the output."""
        return ".boft_s." not in parameter

    @property
    def _mixed(self) -> int:
        more: int = 2 ** (self.factors - 1)
        return self.block * more
