"""LoRA, rank-stabilised LoRA and DoRA, all on HF PEFT's LoRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from workbench.schema import Section

if TYPE_CHECKING:
    from peft import PeftConfig


class Lora(Section):
    """W + scale * B A, with A (rank, in) random and B (out, rank) zero: the identity at the start."""

    method: Literal["lora", "rslora", "dora"] = "lora"
    """lora (Hu et al. 2021), rslora (scale alpha / sqrt(rank), Kalajdzievski 2023) or dora (Liu et al. 2024)."""
    rank: PositiveInt = 16
    """Rank of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank (alpha / sqrt(rank) for rslora)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""
    targets: Literal["attention", "mlp", "all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Which linear layers get an update: a role, or a list of module names such as [q_proj, v_proj]."""

    def to_peft(self, *, targets: list[str], token_rows: dict[str, list[int]] | None) -> PeftConfig:
        """The PEFT configuration for the module names in `targets`; `token_rows` are trained beside it."""
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides it; its annotation says int
            lora_dropout=self.dropout,
            target_modules=targets,
            use_rslora=self.method == "rslora",
            use_dora=self.method == "dora",
            trainable_token_indices=token_rows,
        )
