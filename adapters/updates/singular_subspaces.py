"""Training within the singular vectors of the weights: OSF, TinyLoRA and PSOFT, on HF PEFT's tuners.

The weights are decomposed when the adapter is made and again when it is loaded, so a backbone is not quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import HALF_OR_FULL, MethodInfo, register
from workbench.adapters.target_modules import OnLayers, OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECOMPOSES = "it decomposes the stored weights into singular parts"


@register
class Osf(OnLayers):
    """The small singular parts of W train as they are, with gradients orthogonal to the large ones, which stay.

    For tasks that come one after the other, without forgetting the first.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "osf": MethodInfo("the small singular parts of the weights", "Nayak et al. 2025, arXiv:2504.07097",
                          weights=HALF_OR_FULL, why_weights=DECOMPOSES),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "OSFConfig"
    method: Literal["osf"] = "osf"
    kept: float = Field(default=0.5, gt=0, lt=1)
    """Share of the singular directions, the largest ones, that stay as they are."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(effective_rank=self.kept)

    def decays(self, parameter: str) -> bool:
        """No weight decay: 0 would remove a part of the weights."""
        return False


@register
class TinyLora(OnLinear):
    """W + B R A, with A and B the leading singular parts of W and R a random, fixed projection of a few numbers."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "tinylora": MethodInfo("a few numbers a layer, within its leading singular parts", "Morris et al. 2026, "
                               "arXiv:2602.04118", weights=HALF_OR_FULL, why_weights=DECOMPOSES,
                               no_freezing="layers may share what trains"),
    }  # fmt: skip
    tuner: ClassVar[str] = "TinyLoraConfig"
    method: Literal["tinylora"] = "tinylora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 2
    """Singular parts."""
    numbers: Annotated[PositiveInt, Unit("numbers")] = 64
    """Numbers that train for each group of layers."""
    shared: float = Field(default=0.0, ge=0, le=1)
    """Degree of sharing: 0, each layer has its own numbers; 1, all have the same."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The projections are saved, since generators differ by machine.
        return dict(
            r=self.rank,
            u=self.numbers,
            weight_tying=self.shared,
            tinylora_dropout=self.dropout,
            projection_seed=drawn_seed(),
            save_projection=True,
        )


@register
class Psoft(OnLinear):
    """W + B (R - I) A, with A and B the leading singular parts of W and R a rotation between two scalings."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "psoft": MethodInfo("a rotation of the leading singular parts", "Wu et al. 2025, arXiv:2505.11235",
                            weights=HALF_OR_FULL, why_weights=DECOMPOSES),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "PsoftConfig"
    method: Literal["psoft"] = "psoft"
    rank: Annotated[PositiveInt, Unit("ranks")] = 32
    """Singular parts, among which R turns."""
    scaled: bool = True
    """Whether a vector scales before, and another after the rotation."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse more parts than a layer has."""
        for path, sizes in self.sizes(model).items():
            if min(sizes) < self.rank:
                return f"{path} is only {min(sizes)} wide. Write adapter.rank={min(sizes)} or less."
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(
            r=self.rank,
            psoft_alpha=self.rank,
            psoft_dropout=self.dropout,
            psoft_mag_a=self.scaled,
            psoft_mag_b=self.scaled,
        )
