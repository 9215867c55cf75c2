"""Sparse fine-tuning of weights that a rule chooses: FISH mask and LT-SFT, on HF PEFT's tuner of single weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, MethodInfo, RowLosses, Sample, register
from workbench.adapters.target_modules import OnLayers
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

ROWS = 64
"""Training rows whose gradients are looked at, where `adapter.rows` does not say."""


@register
class SparseTuning(OnLayers):
    """W + a sparse matrix with values at places that a rule chooses; all are zero at the start.

    Each layer gets the same share of its weights, where the papers compare the weights of all layers: so a stock PEFT
    loads what is saved. Until the places are chosen, and in a plan, they are those of the largest weights.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "sparse": MethodInfo(
            "single weights that a rule chooses",
            "Sung et al. 2021, arXiv:2111.09839; Ansell et al. 2022, arXiv:2110.07560",
            weights=HALF_OR_FULL,
            why_weights="it compares single weights",
        ),
    }
    without_looking: ClassVar[str] = "adapter.by=magnitude, or adapter.method=lora"
    changes_transposed: ClassVar[bool] = False
    method: Literal["sparse"] = "sparse"
    by: Literal["fisher", "gradient", "movement", "magnitude"] = "fisher"
    """Which weights train: those of most Fisher information (the sum of squared gradients of single rows, FISH mask),
    of the largest gradient of these rows together, those that moved furthest in a full training before (LT-SFT), or
    the largest."""
    share: float = Field(default=0.01, gt=0, lt=1)
    """Share of a layer's weights that train."""
    rows: Annotated[PositiveInt | None, Unit("rows")] = None
    """Training rows whose gradients `fisher` and `gradient` read before the first step; null: 64, or all there are."""
    trained: Path | None = None
    """A run of adapter.method=full, or the folder of a model that it saved, from the same backbone, for `movement`."""

    @model_validator(mode="after")
    def _fits(self) -> SparseTuning:
        if self.by == "movement" and self.trained is None:
            raise ValueError(
                "by=movement compares with a model that has trained whole. Write adapter.trained=RUN, a run of "
                "adapter.method=full, or adapter.by=fisher."
            )
        if self.by != "movement" and self.trained is not None:
            raise ValueError(f"trained is for by=movement, not for by={self.by}. Leave adapter.trained out.")
        if self.by in ("movement", "magnitude") and self.rows is not None:
            raise ValueError(f"by={self.by} reads no rows. Leave adapter.rows out, or write adapter.by=fisher.")
        return self

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a share that leaves no weight of a layer, and a trained model that is not there."""
        if reason := super().refusal(model) or self.too_few(model, self.share):
            return reason
        if self.trained is not None and not any(self._folder.glob("*.safetensors")):
            return (
                f"adapter.trained={self.trained} holds no model. Write a run of adapter.method=full, such as "
                "adapter.trained=runs/full, or the folder of a saved model."
            )
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's SupertuningConfig for this backbone; the places are saved."""
        from peft import SupertuningConfig

        return SupertuningConfig(**self.common(model, beside), sparsity=1 - self.share)

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Choose what moved furthest in the full training."""
        if self.by == "movement" and model.device.type != "meta":
            from workbench.adapters.weights.sparse_places import moved_furthest

            moved_furthest(model, self._folder)

    def choose(self, model: PeftModel, losses: RowLosses) -> None:
        """Choose by the gradients of single rows."""
        if self.looks:
            from workbench.adapters.weights.sparse_places import of_largest_gradients

            of_largest_gradients(model, losses, squared=self.by == "fisher")

    @property
    def looks(self) -> int:
        """Training rows that are looked at before the first step."""
        return (self.rows or ROWS) if self.by in ("fisher", "gradient") else 0

    def chosen(self, model: PeftModel) -> dict[str, Tensor]:
        """The places in each layer."""
        from workbench.adapters.weights.sparse_places import places

        return places(model)

    @property
    def _folder(self) -> Path:
        assert self.trained is not None
        run = self.trained / "adapter"
        return run if run.is_dir() else self.trained
