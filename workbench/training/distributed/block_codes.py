"""Codes of few bits for float32 values, a block of neighbours at a time: bytes that travel in the place of values.

Legend: C chunks, N values of each, a multiple of the block; B bytes of their codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SCALE_BYTES = 4
"""A block's scale is float32."""
_LEVELS = 127
_BITS = 8
Kind = Literal["int8", "onebit"]


@dataclass(frozen=True)
class BlockCode:
    """A code by blocks. What is not finite stays so in the whole block, so that a loss that explodes is found out.

    int8: round(x / s) with s = max |x| / 127 in the block, so that no value is off by more than s / 2 (Wang et al.
    2023, arXiv:2306.10209). onebit: sign(x) times the mean |x| of the block, with sign(0) = 1 (Zheng et al. 2019,
    arXiv:1905.10936, section 3.3).
    """

    kind: Kind
    block: int
    """Values that share a scale; a multiple of 8."""

    def nbytes(self, count: int) -> int:
        """Bytes of the codes of so many values, whole blocks."""
        return (count if self.kind == "int8" else count // _BITS) + SCALE_BYTES * (count // self.block)

    def encode(self, values_CN: Tensor) -> Tensor:
        """Codes (C, B), uint8, of each chunk: its values', then its scales'."""
        blocks_CKb = values_CN.unflatten(1, (-1, self.block))
        if self.kind == "int8":
            scales_CK = blocks_CKb.abs().amax(2) / _LEVELS
            levels_CKb = blocks_CKb * torch.where(scales_CK > 0, 1 / scales_CK, 0.0)[..., None]
            codes_CN = levels_CKb.round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8).flatten(1).view(torch.uint8)
        else:
            scales_CK = blocks_CKb.abs().mean(2)
            codes_CN = _packed(values_CN >= 0)
        return torch.cat([codes_CN, scales_CK.view(torch.uint8)], dim=1)

    def decode(self, codes_CB: Tensor) -> Tensor:
        """Values (C, N), float32."""
        scales = codes_CB.shape[1] * SCALE_BYTES // self.nbytes(self.block)
        values, scale_codes = codes_CB.split([codes_CB.shape[1] - scales, scales], dim=1)
        scales_CK = scale_codes.clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
        units_CN = values.view(torch.int8).float() if self.kind == "int8" else _unpacked(values).float().mul_(2).sub_(1)
        decoded_CKb: Tensor = units_CN.unflatten(1, (-1, self.block)).mul_(scales_CK[..., None])
        return decoded_CKb.flatten(1)


def _powers(device: torch.device) -> Tensor:
    return 1 << torch.arange(_BITS, dtype=torch.uint8, device=device)


def _packed(flags_CN: Tensor) -> Tensor:
    """Eight flags in a byte."""
    flags_CBb: Tensor = flags_CN.unflatten(1, (-1, _BITS))
    return (flags_CBb * _powers(flags_CN.device)).sum(2, dtype=torch.uint8)


def _unpacked(codes_CB: Tensor) -> Tensor:
    return (codes_CB[..., None] & _powers(codes_CB.device)).ne_(0).flatten(1)
