"""MiSS: one small matrix for all shards of a layer's inputs, on HF PEFT's MiSS tuner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PositiveInt

from workbench.adapters.method import MethodInfo, register
from workbench.adapters.target_modules import OnLinear
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register
class Miss(OnLinear):
    """W + [D D ... D], with D (outputs, rank) beside itself as often as the inputs hold `rank`; zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "miss": MethodInfo("one matrix, shared by all shards of the inputs", "Kang and Yin 2024, arXiv:2409.15371"),
    }
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "MissConfig"
    method: Literal["miss"] = "miss"
    rank: Annotated[PositiveInt, Unit("inputs")] = 64
    """Inputs of a shard: columns of D. The last shard is filled up with zeros where it does not divide the inputs."""
    outputs: Annotated[PositiveInt | None, Unit("outputs")] = None
    """Columns of outputs that have numbers of their own and are repeated for the others, for fewer parameters; it
    divides the outputs of every target. null: each output has its own."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse shards that are larger than a layer, and repetitions that do not fit."""
        sizes = self.sizes(model)
        for path, (inputs, _) in sizes.items():
            if inputs < self.rank:
                return f"{path} has only {inputs} inputs. Write adapter.rank={inputs} or less."
        common = math.gcd(*(outputs for _, outputs in sizes.values()))
        if self.outputs is not None and common % self.outputs:
            return f"adapter.outputs={self.outputs} does not divide all layers' outputs. Write a divisor of {common}."
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(
            r=self.rank,
            miss_dropout=self.dropout,
            mini_r=self.outputs or 1,
            init_weights="mini" if self.outputs else True,
        )
