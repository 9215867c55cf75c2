"""LoRA's matrices from a few shared numbers: VB-LoRA and Uni-LoRA, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import HALF_OR_FULL, MethodInfo, register
from workbench.adapters.target_modules import OnLinear, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED = "all layers share what trains"
RANDOM = "both matrices of each layer are made of shared random numbers"


@register
class VbLora(OnLinear):
    """W + B A, cut into short vectors, each a mixture of the few likeliest of a bank that all layers share."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "vb-lora": MethodInfo("a bank of vectors for all layers, and choices among them", "Li et al. 2024, "
                              "arXiv:2405.15179", starts_elsewhere=RANDOM, no_freezing=SHARED),
    }  # fmt: skip
    tuner: ClassVar[str] = "VBLoRAConfig"
    method: Literal["vb-lora"] = "vb-lora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 4
    """Rank of B A."""
    vectors: Annotated[PositiveInt, Unit("vectors")] = 256
    """Vectors in the bank."""
    length: Annotated[PositiveInt | None, Unit("numbers")] = None
    """Numbers of a vector; it divides inputs and outputs of every target. null: the largest that does, 256 at most."""
    mixed: Annotated[PositiveInt, Unit("vectors")] = 2
    """Vectors of a mixture."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse vectors that do not divide the sizes of a layer, and mixtures of more than there are."""
        if self.mixed > self.vectors:
            return f"a bank of {self.vectors} has no {self.mixed} to mix. Write adapter.mixed={self.vectors} or less."
        return self.indivisible("length", self.length or 1, self.common_divisor(model))

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        common = self.common_divisor(model)
        longest = max(size for size in range(1, min(common, 256) + 1) if common % size == 0)
        return dict(
            r=self.rank,
            num_vectors=self.vectors,
            vector_length=self.length or longest,
            topk=self.mixed,
            vblora_dropout=self.dropout,
        )


@register
class UniLora(OnLinear):
    """W + B A, where each number of A and B is one of a single vector for the whole backbone, chosen at random."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "uni-lora": MethodInfo("one vector for the whole backbone", "Li et al. 2025, arXiv:2506.00799",
                               starts_elsewhere=RANDOM, no_freezing=SHARED, weights=HALF_OR_FULL,
                               why_weights="PEFT rounds its scales to integers over quantised ones"),
    }  # fmt: skip
    made_of_values: ClassVar[bool] = True
    tuner: ClassVar[str] = "UniLoraConfig"
    method: Literal["uni-lora"] = "uni-lora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 4
    """Rank of B A."""
    numbers: Annotated[PositiveInt, Unit("numbers")] = 256
    """Length of the vector: all that trains."""
    initial: float = Field(default=0.02, gt=0)
    """Largest size of its numbers at the start."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The choices are saved, since generators differ by machine.
        return dict(
            r=self.rank,
            theta_d_length=self.numbers,
            init_theta_d_bound=self.initial,
            unilora_dropout=self.dropout,
            proj_seed=drawn_seed(),
            save_indices=True,
        )
