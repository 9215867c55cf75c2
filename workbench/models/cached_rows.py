"""Attention of rows that each go on after keys and values of their own, as the answers of a server do.

The tokens of all rows are one batch of T rows of one token: every layer computes them at once, whosever they are, and
attention alone tells rows apart. It computes each row for itself, with as many keys as the row has and no padding: what
a row attends to does not depend on the rows beside it, not even in the last bit.

Legend: T tokens of all rows, t of one row, S keys of one row, H heads of queries, K of keys and values, D width of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.models.weight_storage import HALVES

LEAST = 64
"""Tokens that a row has room for at first; the room doubles."""


def room(tokens: int) -> int:
    """Tokens that the storage of a row of so many has place for."""
    return max(LEAST, 1 << (tokens - 1).bit_length())


@dataclass(eq=False)
class RowCache:
    """Keys and values of the tokens of one row, of each layer."""

    length: int = 0
    """Tokens that all layers hold."""
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory of all layers, free room included."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def extended(self, layer: int, key_1KtD: Tensor, value_1KtD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (1, K, S, D) of a layer, with those of further tokens behind."""
        end = self.length + key_1KtD.shape[2]
        buffers = []
        for held, more in zip(self._layers.get(layer, (None, None)), (key_1KtD, value_1KtD), strict=True):
            stored = _with_room(held, more, end)
            stored[:, :, self.length : end] = more
            buffers.append(stored)
        self._layers[layer] = buffers[0], buffers[1]
        return buffers[0][:, :, :end], buffers[1][:, :, :end]


@dataclass(frozen=True)
class RowPart:
    """Tokens that a row goes on with, and where they are in the batch."""

    cache: RowCache
    where: slice


def attend(
    module: nn.Module,
    query_TH1D: Tensor,
    key_TK1D: Tensor,
    value_TK1D: Tensor,
    *,
    parts: Sequence[RowPart],
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention (T, 1, H, D) of each part to its own row, whose keys and values it is added to.

    A token of no part is padding, and attends to itself alone. Half precision on a CPU attends in float32, which is
    faster.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    wide = query_TH1D.device.type == "cpu" and query_TH1D.dtype in HALVES
    rows = [each.float() if wide else each for each in (query_TH1D, key_TK1D, value_TK1D)]
    groups = query_TH1D.shape[1] // value_TK1D.shape[1]
    attended = value_TK1D.transpose(1, 2).repeat_interleave(groups, dim=2)
    for part in parts:
        query, key, value = (each[part.where, :, 0].transpose(0, 1)[None] for each in rows)
        key, value = part.cache.extended(layer, key, value)
        mask = None
        if query.shape[2] > 1:
            mask = _mask(query.shape[2], key.shape[2], sliding_window).to(query.device)
        elif sliding_window is not None:
            key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        output_1tHD, _ = sdpa_attention_forward(module, query, key, value, mask, **settings)
        attended[part.where, 0] = output_1tHD[0].to(attended.dtype)
    return attended, None


def _mask(queries: int, keys: int, window: int | None) -> Tensor:
    """Keys that the last tokens of a row see (1, 1, t, S)."""
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return (seen if window is None else seen.triu(keys - queries - window + 1))[None, None]


def _with_room(held: Tensor | None, more: Tensor, end: int) -> Tensor:
    """Storage for `end` tokens at least, with those that are `held`."""
    if held is None:
        return more.new_zeros(*more.shape[:2], room(end), more.shape[3])
    if held.shape[2] >= end:
        return held
    return F.pad(held, (0, 0, 0, room(end) - held.shape[2]))
