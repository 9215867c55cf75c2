"""Updates near LoRA's: GraLoRA, DeLoRA and RandLoRA, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters.method import HALF_OR_FULL, MethodInfo, register
from workbench.adapters.target_modules import OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register
class GraLora(OnLinear):
    """W + a grid of blocks, each with a low-rank update of its own: as many parameters as LoRA, of a higher rank."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "gralora": MethodInfo("a low-rank update for each block of a grid", "Jung et al. 2025, arXiv:2505.20355"),
    }
    tuner: ClassVar[str] = "GraloraConfig"
    method: Literal["gralora"] = "gralora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 32
    """Parameters are those of LoRA of this rank; `blocks` divides it."""
    alpha: float = Field(default=64.0, gt=0)
    """Scale of the update is alpha / rank."""
    blocks: Annotated[PositiveInt, Unit("blocks along each side")] = 2
    """Blocks along each side of a weight; they divide inputs and outputs of every target."""

    @model_validator(mode="after")
    def _divides(self) -> GraLora:
        if self.rank % self.blocks:
            raise ValueError(f"blocks={self.blocks} does not divide rank {self.rank}. Write a multiple as rank.")
        return self

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse grids that do not fit a layer."""
        return self.indivisible("blocks", self.blocks, self.common_divisor(model), most=64)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, alpha=self.alpha, gralora_k=self.blocks, gralora_dropout=self.dropout)


@register
class DeLora(OnLinear):
    """W + s / rank * a sum of rank-one updates of length one, each scaled by W's column norms; s is learnt.

    The length of the update is bound by s, so that a high learning rate does less harm. B is zero at the start.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "delora": MethodInfo("a low-rank update of bounded length, and the bound", "Bini et al. 2025, "
                             "arXiv:2503.18225", weights=HALF_OR_FULL, why_weights="it takes the weights' norms"),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "DeloraConfig"
    method: Literal["delora"] = "delora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 8
    """Rank of the update."""
    bound: PositiveInt = 15
    """Initial value of s, which trains."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, delora_lambda=self.bound, module_dropout=self.dropout)


@register
class RandLora(OnLinear):
    """W + a sum of random, frozen low-rank products with learnt scales: of full rank. The scales are zero at first."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "randlora": MethodInfo("scales of a sum of shared random matrices", "Albert et al. 2025, arXiv:2502.00987"),
    }
    tuner: ClassVar[str] = "RandLoraConfig"
    method: Literal["randlora"] = "randlora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 32
    """Rank of each product; a lower one has more products, and more parameters."""
    alpha: float | None = Field(default=None, gt=0)
    """Scale of the update is alpha / rank; null: 20 times the rank."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The matrices are saved, since generators differ by machine.
        return dict(
            r=self.rank,
            randlora_alpha=20 * self.rank if self.alpha is None else self.alpha,
            randlora_dropout=self.dropout,
            projection_prng_key=drawn_seed(),
            save_projection=True,
        )
