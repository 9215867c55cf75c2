"""Causal attention of an 8 B Llama's heads on a GPU: time forward and backward, by cuDNN and by flash attention.

    python scripts/bench/gpu_attention.py

For a shape that comes for the first time in this process, and for the same shape afterwards (median of ROUNDS).
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KEYS, WIDTH = 32, 8, 128
SHAPES = ((8, 2048), (2, 8192), (64, 509), (64, 441), (16, 310), (16, 367))
"""Rows and their tokens."""
ROUNDS = 20
KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def main() -> None:
    _milliseconds((4, 128), SDPBackend.FLASH_ATTENTION)
    _milliseconds((4, 128), SDPBackend.CUDNN_ATTENTION)
    print("| rows of tokens | kernel | first, ms | afterwards, ms |\n|---|---|---|---|")
    for shape in SHAPES:
        for name, kernel in KERNELS.items():
            first = _milliseconds(shape, kernel)
            later = median(_milliseconds(shape, kernel) for _ in range(ROUNDS))
            print(f"| {shape[0]} of {shape[1]:,} | {name} | {first:.2f} | {later:.2f} |")


def _milliseconds(shape: tuple[int, int], kernel: SDPBackend) -> float:
    query, key, value = (_heads(shape, heads) for heads in (HEADS, KEYS, KEYS))
    torch.cuda.synchronize()
    began = time.perf_counter()
    with sdpa_kernel(kernel):
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def _heads(shape: tuple[int, int], heads: int) -> Tensor:
    rows, tokens = shape
    return torch.randn(rows, tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()


if __name__ == "__main__":
    main()
