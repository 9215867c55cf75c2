"""PVeRA: VeRA that learns how sure it is, on HF PEFT's PVeRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import ExtraParameters, MethodInfo, Sample, register
from workbench.adapters.target_modules import OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel


@register
class Pvera(OnLinear):
    """W + diag(b) B z with z normal, its mean and log-variance diag(d) A x; z is drawn in training, else the mean.

    What is drawn is a function of the seed, the step, the row and the layer. b is zero at the start.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "pvera": MethodInfo(
            "vera, with noise of a size that it learns", "Fillioux et al. 2025, arXiv:2512.07703", draws=True
        ),
    }
    method: Literal["pvera"] = "pvera"
    rank: Annotated[PositiveInt, Unit("ranks")] = 256
    """Numbers of z, and columns of B."""
    initial: float = Field(default=0.1, gt=0)
    """Initial value of every number of d."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PveraConfig for this backbone; the random matrices are saved, since generators differ by machine."""
        from peft import PveraConfig

        return PveraConfig(
            **self.common(model, beside),
            r=self.rank,
            d_initial=self.initial,
            pvera_dropout=self.dropout,
            projection_prng_key=drawn_seed(),
            save_projection=True,
        )

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Give each layer numbers of its own to draw."""
        from workbench.adapters.updates.pvera_noise import draw_by_row

        draw_by_row(model)
