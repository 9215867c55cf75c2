"""FlashAttention 3 and 4 in place of the version that torch ships, where their packages are installed.

torch's own attention, of padded and of packed rows, dispatches to an implementation that can be replaced
(`torch.nn.attention.activate_flash_attention_impl`), so that nothing else here has to know. Each was written for one
generation of NVIDIA's cards. torch calls the interface a prototype: it is used only after a trial on the card itself.

Legend: T tokens of packed rows, H heads of queries, K of keys and values, D width of a head.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F

from workbench.models import attention_backend
from workbench.models.weight_formats import HALVES


class Newer(NamedTuple):
    """A version that replaces torch's."""

    title: str
    package: str
    generation: int
    """Major compute capability of the cards that it was written for."""


NEWER = {
    "FA3": Newer("FlashAttention 3", "flash_attn_interface", 9),  # Hopper: Shah et al. 2024, arXiv:2407.08608
    "FA4": Newer("FlashAttention 4", "flash_attn.cute", 10),  # Blackwell
}
"""By torch's name of the implementation."""
LEAST_LIKE = 0.02
"""Largest distance of outputs or gradients from float32's, as a share of their norm; rounding to bfloat16 is 0.004."""


def installed(package: str) -> bool:
    """Whether there is such a package, without importing more than its parents."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def activate(device: torch.device, compute: torch.dtype, *, dropout: bool) -> str | None:
    """Let torch compute attention by the newest version that is installed for this card.

    Args:
        dropout: Whether attention drops weights, which the newer versions do not: then torch's own is put back.

    Returns:
        A sentence for the user; None where torch's own stays, as nothing newer is there.
    """
    if device.type != "cuda" or torch.version.hip is not None or compute not in HALVES:
        return None
    if not hasattr(attention, "activate_flash_attention_impl"):
        return None
    generation = torch.cuda.get_device_capability(device)[0]
    for name, newer in NEWER.items():
        if newer.generation == generation and installed(newer.package):
            if dropout:
                _put_back()
                return None
            return _FAILED.get(name) or _replaced(name, newer, device)
    return None


_FAILED: dict[str, str] = {}
"""What is said of versions that failed their trial in this process, by their names."""


def _replaced(name: str, newer: Newer, device: torch.device) -> str:
    if attention.current_flash_attention_impl() == name:
        return f"attention by {newer.title}"
    try:
        attention.activate_flash_attention_impl(name)
        distance = difference_from_float32(device)
        wrong = "" if distance <= LEAST_LIKE else f"differs from float32 by {distance:.1%}"
    except Exception as error:  # of another package's kernels
        wrong = f"fails here ({str(error).splitlines()[0]})"
    if wrong:
        _put_back()
        _FAILED[name] = f"{newer.title} is installed and {wrong}: attention is torch's own"
    return _FAILED.get(name) or f"attention by {newer.title}"


def _put_back() -> None:
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def difference_from_float32(device: torch.device) -> float:
    """How far packed causal attention in bfloat16, and its gradients, are from each row alone in float32.

    Returns:
        The largest distance of outputs and gradients of queries, keys and values, as a share of their norms.
    """
    lengths = (96, 7, 153)
    draw = torch.Generator(device).manual_seed(0)
    heads = [torch.randn(1, many, sum(lengths), 64, generator=draw, device=device) for many in (8, 4, 4)]
    away_THD = torch.randn(sum(lengths), 8, 64, generator=draw, device=device)
    halves = [each.bfloat16().requires_grad_() for each in heads]
    whole = [each.detach().float().requires_grad_() for each in halves]
    starts = torch.tensor([0, 96, 103, 256], dtype=torch.int32, device=device)
    query, key, value = halves
    (packed,) = attention_backend.of_any_lengths(
        query, key, value, starts, longest=max(lengths), causal=True, scale=None
    )
    rows = zip(*(each.split(lengths, dim=2) for each in whole), strict=True)
    alone = torch.cat([_in_float32(*row) for row in rows], dim=2)[0].transpose(0, 1)
    packed.backward(away_THD.bfloat16())
    alone.backward(away_THD.bfloat16().float())
    pairs: list[tuple[Any, Any]] = [(packed.detach(), alone.detach())]
    pairs += [(half.grad, full.grad) for half, full in zip(halves, whole, strict=True)]
    return float(torch.stack([(half.float() - full).norm() / full.norm() for half, full in pairs]).max())


def _in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
