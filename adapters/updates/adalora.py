"""AdaLoRA: updates that start with too many ranks and keep those that matter, on HF PEFT's AdaLoRA tuner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters.method import MethodInfo, Sample, TrainHook, register
from workbench.adapters.target_modules import OnLinear
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


@register
class AdaLora(OnLinear):
    """W + scale * B diag(E) A; while training, ranks are taken where they matter least. E is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "adalora": MethodInfo("a low-rank update of linear layers that shares out its ranks",
                         "Zhang et al. 2023, arXiv:2303.10512", plans_steps=True,
                         no_freezing="it shares out ranks among all layers", token_rows=True),
    }  # fmt: skip
    tuner: ClassVar[str] = "AdaLoraConfig"
    method: Literal["adalora"] = "adalora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 8
    """Ranks per layer at the end, on average over the layers."""
    initial_rank: Annotated[PositiveInt | None, Unit("ranks")] = None
    """Ranks of every layer at the start; null: one and a half times `rank`."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / initial rank."""
    before: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run's steps before the first rank goes."""
    after: float = Field(default=0.3, ge=0, lt=1)
    """Share of the run's steps after the last rank went."""
    interval: float = Field(default=0.01, ge=0, lt=1)
    """Share of the run's steps between two allocations of ranks to layers, at least one step."""
    orthogonality: float = Field(default=0.5, ge=0)
    """Weight of the penalty that keeps the rows of A, and the columns of B, orthonormal."""
    memory: float = Field(default=0.85, gt=0, lt=1)
    """Share of its former importance that a triplet keeps at each step: beta of the two moving averages."""

    @model_validator(mode="after")
    def _consistent(self) -> AdaLora:
        if self.before + self.after >= 1:
            raise ValueError("before and after leave no steps in which ranks go; make them sum to less than 1.")
        if self.first_rank < self.rank:
            raise ValueError(f"initial_rank {self.initial_rank} is below rank {self.rank}; ranks only go.")
        return self

    @property
    def first_rank(self) -> int:
        """Ranks of every layer at the start."""
        return math.ceil(1.5 * self.rank) if self.initial_rank is None else self.initial_rank

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # Without PEFT's schedule and penalty: `train_hook` has its own.
        return dict(
            target_r=self.rank,
            init_r=self.first_rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            total_step=1,
            orth_reg_weight=0.0,
        )

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Let the tuner ship only the ranks that are left in each layer."""
        from workbench.adapters.updates.rank_allocator import ReachedRanks

        model.base_model.__class__ = ReachedRanks

    def decays(self, parameter: str) -> bool:
        """No weight decay on the singular values, which are a vector stored as (rank, 1)."""
        return ".lora_E." not in parameter

    def train_hook(self, trainable: Mapping[str, nn.Parameter], *, steps: int | None) -> TrainHook:
        """The schedule that takes ranks."""
        from workbench.adapters.updates.rank_allocator import RankBudget, RankSchedule

        assert steps is not None, "configurations that do not know are refused"
        end = steps - round(self.after * steps)
        return RankSchedule(
            trainable,
            RankBudget(begin=min(round(self.before * steps), end - 1), end=end),
            rank=self.rank,
            interval=max(1, round(self.interval * steps)),
            orthogonality=self.orthogonality,
            memory=self.memory,
        )
