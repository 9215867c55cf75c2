"""Weights rounded as an export in 4 bits stores them, for training that knows it (Jacob et al. 2018).

The grid is that of MatMulNBits as `onnx_quantisers` writes it: of BLOCK numbers the least and the greatest, 0 among
them, are 15 steps apart. Torch's own fake quantisation rounds, and lets gradients pass where nothing is cut off.
torchao's fake quantiser of groups places zero between two steps (its tinygemm grid), which no such file can store.

Legend: O outputs, I inputs, G blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

BLOCK = 32
"""Numbers of a column of weights that share a scale in 4 bits."""
HIGHEST = 15


def rounded(weight_OI: Tensor) -> Tensor:
    """The weights as the file holds them, in their own precision; gradients pass straight through."""
    blocks_GB = F.pad(weight_OI.float(), (0, -weight_OI.shape[1] % BLOCK)).reshape(-1, BLOCK)
    low_G, high_G = (each.detach() for each in (blocks_GB.amin(1).clamp_max(0), blocks_GB.amax(1).clamp_min(0)))
    scale_G = (high_G - low_G) / HIGHEST
    scale_G = torch.where(scale_G > 0, scale_G, 1.0)
    zero_G = (-low_G / scale_G).round().clamp(0, HIGHEST).int()
    found_GB = torch.fake_quantize_per_channel_affine(blocks_GB, scale_G, zero_G, 0, 0, HIGHEST)
    return found_GB.view(len(weight_OI), -1)[:, : weight_OI.shape[1]].to(weight_OI.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies by rounded weights; its parameters are the plain layer's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, rounded(self.weight), self.bias)


class RoundedConv1D(Conv1D):
    """The same of GPT-2's layer, whose weight is (I, O)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, rounded(self.weight.T), self.bias)


ROUNDED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RoundedLinear, Conv1D: RoundedConv1D}


def install(model: nn.Module) -> int:
    """Let all plain linear layers of a model multiply by rounded weights; returns how many there are."""
    layers = [each for each in model.modules() if type(each) in ROUNDED]
    for layer in layers:
        layer.__class__ = ROUNDED[type(layer)]
    return len(layers)
