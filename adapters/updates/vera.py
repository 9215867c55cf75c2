"""VeRA and PVeRA: one pair of random matrices for all layers, and two vectors for each, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import MethodInfo, Sample, register
from workbench.adapters.target_modules import OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@register
class Vera(OnLinear):
    """W + diag(b) B diag(d) A, where A and B are random, frozen and shared by all layers; b is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "vera": MethodInfo(
            "two vectors a layer, around shared random matrices", "Kopiczko et al. 2023, arXiv:2310.11454"
        ),
    }
    tuner: ClassVar[str] = "VeraConfig"
    method: Literal["vera"] = "vera"
    rank: Annotated[PositiveInt, Unit("ranks")] = 256
    """Rows of A, columns of B, and length of each d."""
    initial: float = Field(default=0.1, gt=0)
    """Initial value of every number of d."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The random matrices are saved, since generators differ by machine.
        return dict(
            r=self.rank,
            d_initial=self.initial,
            vera_dropout=self.dropout,
            projection_prng_key=drawn_seed(),
            save_projection=True,
        )


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
    tuner: ClassVar[str] = "PveraConfig"
    method: Literal["pvera"] = "pvera"
    rank: Annotated[PositiveInt, Unit("ranks")] = 256
    """Numbers of z, and columns of B."""
    initial: float = Field(default=0.1, gt=0)
    """Initial value of every number of d."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The random matrices are saved, since generators differ by machine.
        return dict(
            r=self.rank,
            d_initial=self.initial,
            pvera_dropout=self.dropout,
            projection_prng_key=drawn_seed(),
            save_projection=True,
        )

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Give each layer numbers of its own to draw."""
        from workbench.adapters.row_dropout import draw_noise_by_row

        draw_noise_by_row(model)
