"""Single weights that train in place: SHiRA, Super-Tuning, FISH mask and LT-SFT, on HF PEFT's tuners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters import anatomy
from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, MethodInfo, RowLosses, Sample, register
from workbench.adapters.target_modules import OnLayers, OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel


@register
class Shira(OnLayers):
    """W + a sparse matrix with values at random places; all are zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "shira": MethodInfo("single weights at random places", "Bhardwaj et al. 2024, arXiv:2406.13175"),
    }
    changes_transposed: ClassVar[bool] = False
    method: Literal["shira"] = "shira"
    rank: Annotated[PositiveInt, Unit("ranks")] = 16
    """As many weights of a layer train as LoRA of this rank has parameters: rank * (inputs + outputs)."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse more values than a layer has weights."""
        for path, (inputs, outputs) in self.sizes(model).items():
            if (most := inputs * outputs // (inputs + outputs)) < self.rank:
                return f"{path} has only {inputs * outputs:,} weights. Write adapter.rank={most} or less."
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's ShiraConfig for this backbone; the places follow from the run's seed, and are saved."""
        from peft import ShiraConfig

        config = ShiraConfig(**self.common(model, beside), r=self.rank, random_seed=drawn_seed())
        if anatomy.without_values(next(model.parameters())):
            config.mask_fn = None  # type: ignore[assignment]  # what has no values has no places
        return config

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Without values, as many places as there will be: what is saved is known from shapes."""
        import torch
        from peft.tuners.shira.layer import ShiraLayer

        for layer in (module for module in model.modules() if isinstance(module, ShiraLayer)):
            weight = layer.shira_weight["default"]
            if anatomy.without_values(weight):
                layer.shira_indices["default"] = torch.empty(2, len(weight), dtype=torch.int32, device=weight.device)


@register
class SuperTuning(OnLinear):
    """W + a sparse matrix with values where W is largest, and with `rank` a low-rank update, too; zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "super": MethodInfo("the largest weights, and a low-rank update beside them", "Ilin et al. 2026, "
                            "arXiv:2607.09287", weights=HALF_OR_FULL,
                            why_weights="it looks for the largest weights"),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "SupertuningConfig"
    method: Literal["super"] = "super"
    share: float = Field(default=0.01, gt=0, lt=1)
    """Share of a layer's weights that train."""
    largest: bool = True
    """Whether the largest weights train, or the smallest."""
    rank: Annotated[PositiveInt | None, Unit("ranks")] = None
    """Rank of the low-rank update beside them, with scale 2 (the paper's Supra); null: there is none."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the low-rank update's inputs that is dropped while training."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse a share that leaves no weight of a layer."""
        if reason := self.too_few(model, self.share):
            return reason
        if self.dropout and self.rank is None:
            return "single weights drop no inputs. Write adapter.dropout=0, or adapter.rank for a low-rank update."
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The places are saved.
        return dict(sparsity=1 - self.share, select_top=self.largest, r=self.rank, lora_dropout=self.dropout)


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
    tuner: ClassVar[str] = "SupertuningConfig"
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

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse a share that leaves no weight of a layer, and a trained model that is not there."""
        if reason := self.too_few(model, self.share):
            return reason
        if self.trained is not None and not any(self._folder.glob("*.safetensors")):
            return (
                f"adapter.trained={self.trained} holds no model. Write adapter.trained=RUN, a run of full "
                "fine-tuning, or the folder of a saved model."
            )
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The places are saved.
        return dict(sparsity=1 - self.share)

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
