"""The layers of activated LoRA, in any precision, whose dropout is by row.

Legend: B rows, T tokens of a row, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import ALoraLinearVariant
from torch import Tensor, nn


class ActivatedUpdate(ALoraLinearVariant):
    """PEFT's own, which adds to the layer's outputs in place, and drops among the tokens that it has picked."""

    @staticmethod
    def forward(
        module: Any,
        active_adapter: str,
        x: Tensor,
        result: Tensor,
        *,
        alora_offsets: list[int | None] | None = None,
        **_: Any,
    ) -> Tensor:
        """The outputs `result` (B, T, O) and the update of the last `alora_offsets` tokens of each row.

        Args:
            x: Inputs (B, T, I) of the layer; or (B * T, I), as OPT's are, with such a result.
            alora_offsets: From the first token of the invocation to the end of the row, padding included; None where
                there is no invocation. In a pass that goes on from a cache it may be more than the tokens.
        """
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        x = module.lora_dropout[active_adapter](x.to(down.weight.dtype))
        update_BTO = up(down(x)) * module.scaling[active_adapter]
        offsets = [0] * len(result) if alora_offsets is None else [each or 0 for each in alora_offsets]
        tokens = result[..., 0].numel() // len(offsets)
        before_B = tokens - torch.tensor(offsets, device=result.device)
        acts_BT = torch.arange(tokens, device=result.device) >= before_B[:, None]
        acts = acts_BT.view(*result.shape[:-1], 1)
        return torch.where(acts, result + update_BTO.to(result.dtype), result)


def activate(module: nn.Module) -> None:
    """Give a LoRA layer of PEFT's, where it is an activated one, the update of ours."""
    if isinstance(module, LoraLayer):
        for name, variant in module.lora_variant.items():
            if type(variant) is ALoraLinearVariant:
                module.lora_variant[name] = ActivatedUpdate()
