"""Full fine-tuning: every weight of the backbone trains; what is saved is a stock Hugging Face model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from workbench.adapters import anatomy
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
    sparsity: float | None = Field(default=None, gt=0, lt=1)
    """Share of the weights of each layer in the blocks that become zero before the first step, the smallest, and stay
    so (Han et al. 2015, arXiv:1506.02626); with recipe distill a sparse student of its dense teacher. null: none."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse to prune what is no layer."""
        if self.sparsity is None:
            return None
        if anatomy.fused_experts(model):
            return (
                "adapter.sparsity prunes layers, and the experts of this mixture stand in one parameter. "
                "Leave adapter.sparsity out, or take a dense backbone."
            )
        return None if self._layers(model) else "adapter.sparsity finds no layers in blocks. Leave it out."

    def modules(self, model: PreTrainedModel) -> list[str]:
        """An empty list: all modules train, and none is named."""
        return []

    def release(self, model: PreTrainedModel) -> None:
        """Let every weight train, but those that are pruned, and towers, which rows of text do not run."""
        model.requires_grad_(True)
        for each in anatomy.towers(model):
            each.requires_grad_(False)
        if self.sparsity is None:
            return
        import torch

        # A pruned value gets no gradient, so that nothing but the weights has to be kept: an optimizer that moves each
        # value by its own gradients leaves it at zero, and so do weight decay and averages.
        for path in self._layers(model):
            weight = model.get_submodule(path).get_parameter("weight")
            with torch.no_grad():
                count = int(self.sparsity * weight.numel())
                weight.view(-1)[torch.topk(weight.abs().flatten(), count, largest=False).indices] = 0.0
            weight.register_hook(lambda gradient, weight=weight: gradient * (weight != 0))

    def _layers(self, model: PreTrainedModel) -> list[str]:
        """Paths of the linear layers in the blocks, or of the convolutions where there are none."""
        return anatomy.linear_modules(model) or anatomy.convolutions(model)
