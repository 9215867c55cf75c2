"""Full fine-tuning: every weight of the backbone trains; what is saved is a stock Hugging Face model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from workbench.adapters.method import HALF_OR_FULL, Method, MethodInfo, register

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register
class Full(Method):
    """No adapter: all weights of the backbone are trained."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "full": MethodInfo(
            trains="every weight",
            paper="-",
            weights=HALF_OR_FULL,
            why_weights="quantised weights have no gradient",
        )
    }
    method: Literal["full"] = "full"

    def modules(self, model: PreTrainedModel) -> list[str]:
        """An empty list: all modules train, and none is named."""
        return []
