"""LoRA, rank-stabilised LoRA, DoRA and LoRA+, all on HF PEFT's LoRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, MethodInfo, register
from workbench.adapters.target_modules import OnLinear

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

Decomposition = Literal["auto", "exact", "randomised"]


class LowRank(OnLinear):
    """W + scale * B A, with A (rank, in) and B (out, rank): what all LoRA methods have in common."""

    rank: PositiveInt = 16
    """Rank of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank (alpha / sqrt(rank) for rslora)."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> LoraConfig:
        """PEFT's LoraConfig for this backbone."""
        from peft import LoraConfig

        return LoraConfig(
            task_type=anatomy.task(model),
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides it; its annotation says int
            lora_dropout=self.dropout,
            target_modules=self.modules(model),
            modules_to_save=beside.heads or None,
            use_rslora=self.method == "rslora",
            use_dora=self.method == "dora",
            trainable_token_indices=beside.token_rows,
        )


@register
class Lora(LowRank):
    """A starts at random and B at zero: the identity at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "lora": MethodInfo("a low-rank update of linear layers", "Hu et al. 2021, arXiv:2106.09685", token_rows=True),
        "rslora": MethodInfo(
            "lora, scaled by alpha / sqrt(rank)", "Kalajdzievski 2023, arXiv:2312.03732", token_rows=True
        ),
        "dora": MethodInfo("lora of the direction, and each output's magnitude", "Liu et al. 2024, arXiv:2402.09353",
                      token_rows=True),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    method: Literal["lora", "rslora", "dora"] = "lora"
    """lora (scale alpha / rank), rslora (scale alpha / sqrt(rank)) or dora (adds a magnitude for each output)."""


@register
class LoraPlus(LowRank):
    """LoRA whose B learns faster than its A."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "lora+": MethodInfo("lora, with a higher learning rate for B", "Hayou et al. 2024, arXiv:2402.12354",
                       token_rows=True),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    method: Literal["lora+"] = "lora+"
    rate_ratio: float = Field(default=16.0, ge=1)
    """Learning rate of B divided by that of A, which is train.learning_rate."""

    def rate_factor(self, parameter: str) -> float:
        """The ratio for B, 1 for A and for what trains beside."""
        return self.rate_ratio if ".lora_B." in parameter else 1.0
