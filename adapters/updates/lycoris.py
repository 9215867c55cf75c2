"""LoHa and LoKr: updates of a higher rank than LoRA's from products of small matrices, on HF PEFT's LyCORIS tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import WEIGHTS, MethodInfo, register
from workbench.adapters.target_modules import OnLayers
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_FOUR_BITS = tuple(name for name in WEIGHTS if name not in ("nf4", "fp4"))
UNSHAPED = "PEFT takes its shape from that of the stored weights, which 4-bit ones have lost"


class Lycoris(OnLayers):
    """W + alpha / rank * a product, computed as a whole matrix in each pass."""

    changes_convolutions: ClassVar[bool] = True
    changes_transposed: ClassVar[bool] = False

    rank: Annotated[PositiveInt, Unit("ranks")] = 8
    """Rank of the matrices that are multiplied."""
    alpha: float = Field(default=8.0, gt=0)
    """Scale of the update is alpha / rank."""


@register
class LoHa(Lycoris):
    """The update is (B1 A1) * (B2 A2), element by element: its rank may be rank squared. B2 is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "loha": MethodInfo("an element-wise product of two low-rank matrices", "Hyeon-Woo et al. 2021, "
                           "arXiv:2108.06098", weights=NOT_FOUR_BITS, why_weights=UNSHAPED),
    }  # fmt: skip
    tuner: ClassVar[str] = "LoHaConfig"
    method: Literal["loha"] = "loha"

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, alpha=self.alpha)


@register
class LoKr(Lycoris):
    """The update is C kron (B A), C a small matrix: zero at the start. Both are as square as the sizes allow."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "lokr": MethodInfo("a Kronecker product of a small and a low-rank matrix", "Yeh et al. 2023, "
                           "arXiv:2309.14859", weights=NOT_FOUR_BITS, why_weights=UNSHAPED),
    }  # fmt: skip
    tuner: ClassVar[str] = "LoKrConfig"
    method: Literal["lokr"] = "lokr"
    both: bool = False
    """Whether C, too, is a product of low-rank matrices where that is smaller."""
    factor: Annotated[PositiveInt | None, Unit("columns")] = None
    """Width of C, where it divides the sizes of a layer; null: the divisor nearest to the square root."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(
            r=self.rank,
            alpha=self.alpha,
            decompose_both=self.both,
            decompose_factor=-1 if self.factor is None else self.factor,
        )
