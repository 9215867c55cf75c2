"""BOFT's block-diagonal products in torch, for which PEFT compiles CUDA code: several factors work on every device.

PEFT falls back to a single factor, which is another method, where it cannot compile; and it compiles at the first use.

Legend: Z factors, N blocks, B inputs of a block, I = N * B inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.boft import layer
from torch import Tensor
from torch.nn import functional as F


class BlockDiagonal:
    """Blocks on the diagonal of a matrix, and their gradient out of it, with the interface of PEFT's extension."""

    def forward(self, blocks_ZNBB: Tensor) -> list[Tensor]:
        Z, N, B, _ = blocks_ZNBB.shape
        spread_ZNBNB = blocks_ZNBB.new_zeros(Z, N, B, N, B)
        here = torch.arange(N, device=blocks_ZNBB.device)
        spread_ZNBNB[:, here, :, here] = blocks_ZNBB.transpose(0, 1)
        return [spread_ZNBNB.view(Z, N * B, N * B)]

    def backward(self, grad_ZII: Tensor, blocks_ZNBB: Tensor) -> list[Tensor]:
        Z, N, B, _ = blocks_ZNBB.shape
        here = torch.arange(N, device=blocks_ZNBB.device)
        return [grad_ZII.view(Z, N, B, N, B)[:, here, :, here].transpose(0, 1)]


_PERMUTATION: Any = layer.BOFTLayer.block_butterfly_perm


def _permute(self: layer.BOFTLayer, *arguments: int) -> Tensor:
    """PEFT's permutation (I,), which it computes from values also where there are none."""
    with torch.device("cpu"):
        order: Tensor = _PERMUTATION(self, *arguments)
    return order


def _matrix(_: layer.BOFTLayer, order_I: Tensor) -> Tensor:
    """The permutation's matrix (I, I); PEFT fills it row by row."""
    size = len(order_I)
    empty_II = torch.empty(size, size)
    return empty_II if empty_II.is_meta else F.one_hot(order_I, size).float()


layer._FBD_CUDA = BlockDiagonal()  # type: ignore[assignment]
layer.BOFTLayer.block_butterfly_perm = _permute  # type: ignore[method-assign]
layer.BOFTLayer.perm2mat = _matrix  # type: ignore[method-assign]
