"""Single weights that train in place: SHiRA and Super-Tuning, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, MethodInfo, Sample, register
from workbench.adapters.target_modules import OnLayers, OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
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

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse more values than a layer has weights."""
        if reason := super().refusal(model):
            return reason
        for path, (inputs, outputs) in self.sizes(model).items():
            if (most := inputs * outputs // (inputs + outputs)) < self.rank:
                return f"{path} has only {inputs * outputs:,} weights. Write adapter.rank={most} or less."
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's ShiraConfig for this backbone; the places follow from the run's seed, and are saved."""
        from peft import ShiraConfig

        config = ShiraConfig(**self.common(model, beside), r=self.rank, random_seed=drawn_seed())
        if model.device.type == "meta":
            config.mask_fn = None  # type: ignore[assignment]  # what has no values has no places
        return config

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Without values, as many places as there will be: what is saved is known from shapes."""
        import torch
        from peft.tuners.shira.layer import ShiraLayer

        for layer in (module for module in model.modules() if isinstance(module, ShiraLayer)):
            count = layer.shira_weight["default"].numel()
            if layer.shira_weight["default"].is_meta:
                layer.shira_indices["default"] = torch.empty(2, count, dtype=torch.int32, device="meta")


@register
class SuperTuning(OnLinear):
    """W + a sparse matrix with values where W is largest, and with `rank` a low-rank update, too; zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "super": MethodInfo("the largest weights, and a low-rank update beside them", "Ilin et al. 2026, "
                            "arXiv:2607.09287", weights=HALF_OR_FULL,
                            why_weights="it looks for the largest weights"),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    method: Literal["super"] = "super"
    share: float = Field(default=0.01, gt=0, lt=1)
    """Share of a layer's weights that train."""
    largest: bool = True
    """Whether the largest weights train, or the smallest."""
    rank: Annotated[PositiveInt | None, Unit("ranks")] = None
    """Rank of the low-rank update beside them, with scale 2 (the paper's Supra); null: there is none."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the low-rank update's inputs that is dropped while training."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a share that leaves no weight of a layer."""
        if reason := super().refusal(model) or self.too_few(model, self.share):
            return reason
        if self.dropout and self.rank is None:
            return "single weights drop no inputs. Write adapter.dropout=0, or adapter.rank for a low-rank update."
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's SupertuningConfig for this backbone; the places are saved."""
        from peft import SupertuningConfig

        return SupertuningConfig(
            **self.common(model, beside),
            sparsity=1 - self.share,
            select_top=self.largest,
            r=self.rank,
            lora_dropout=self.dropout,
        )
