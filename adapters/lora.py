"""LoRA, rank-stabilised LoRA and DoRA, all on HF PEFT's LoRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import About, Beside, Method, register
from workbench.adapters.targets import Targets, resolve

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


@register
class Lora(Method):
    """W + scale * B A, with A (rank, in) random and B (out, rank) zero: the identity at the start."""

    about: ClassVar[dict[str, About]] = {
        "lora": About("a low-rank update of linear layers", "Hu et al. 2021, arXiv:2106.09685", token_rows=True),
        "rslora": About("lora, scaled by alpha / sqrt(rank)", "Kalajdzievski 2023, arXiv:2312.03732", token_rows=True),
        "dora": About("lora of the direction, and each output's magnitude", "Liu et al. 2024, arXiv:2402.09353",
                      token_rows=True),
    }  # fmt: skip
    method: Literal["lora", "rslora", "dora"] = "lora"
    """lora (scale alpha / rank), rslora (scale alpha / sqrt(rank)) or dora (adds a magnitude for each output)."""
    rank: PositiveInt = 16
    """Rank of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank (alpha / sqrt(rank) for rslora)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""
    targets: Targets = "all-linear"
    """Which linear layers get an update: a role, or a list of module names such as [q_proj, v_proj]."""

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers that get an update."""
        return resolve(model, self.targets)

    def to_peft(self, model: PreTrainedModel, beside: Beside) -> PeftConfig:
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
