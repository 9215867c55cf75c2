"""VeRA: one pair of random matrices for all layers, and two vectors for each, on HF PEFT's VeRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import ExtraParameters, MethodInfo, register
from workbench.adapters.target_modules import OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


@register
class Vera(OnLinear):
    """W + diag(b) B diag(d) A, where A and B are random, frozen and shared by all layers; b is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "vera": MethodInfo(
            "two vectors a layer, around shared random matrices", "Kopiczko et al. 2023, arXiv:2310.11454"
        ),
    }
    method: Literal["vera"] = "vera"
    rank: Annotated[PositiveInt, Unit("ranks")] = 256
    """Rows of A, columns of B, and length of each d."""
    initial: float = Field(default=0.1, gt=0)
    """Initial value of every number of d."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's VeraConfig for this backbone; the random matrices are saved, since generators differ by machine."""
        from peft import VeraConfig

        return VeraConfig(
            **self.common(model, beside),
            r=self.rank,
            d_initial=self.initial,
            vera_dropout=self.dropout,
            projection_prng_key=drawn_seed(),
            save_projection=True,
        )
