"""Rows that go on after their own keys and values attend as the equation says, each as if it were alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workbench.models.cached_rows import RowCache, RowPart, attend, room

HEADS, GROUPS, WIDTH = 4, 2, 8


class Layer(nn.Module):
    layer_idx = 0
    num_key_value_groups = HEADS // GROUPS


def _numbers(tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, 1, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]


def _written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole row: softmax(q k / sqrt(D)) v, head by head and token by token."""
    attended = torch.zeros(len(query), 1, HEADS, WIDTH)
    for token in range(len(query)):
        first = 0 if window is None else max(0, token + 1 - window)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys, values = key[first : token + 1, group, 0], value[first : token + 1, group, 0]
            weights = (keys @ query[token, head, 0] / math.sqrt(WIDTH)).softmax(0)
            attended[token, 0, head] = weights @ values
    return attended


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cuts", [[1] * 12, [7, 1, 1, 3], [12]])
def test_parts_of_two_rows_and_padding_attend_to_their_own(cuts: list[int], window: int | None) -> None:
    rows = [_numbers(12, seed) for seed in (1, 2)]
    padding = _numbers(2, 3)
    caches, found, start = [RowCache(), RowCache()], [[], []], 0  # type: ignore[var-annotated]
    for cut in cuts:
        where = slice(start, start + cut)
        batch = [torch.cat([rows[0][n][where], padding[n], rows[1][n][where]]) for n in range(3)]
        parts = [RowPart(caches[0], slice(0, cut)), RowPart(caches[1], slice(cut + 2, 2 * cut + 2))]
        attended, _ = attend(Layer(), *batch, parts=parts, sliding_window=window)
        for row, part in enumerate(parts):
            found[row].append(attended[part.where])
            part.cache.length += cut
        assert torch.equal(attended[cut : cut + 2, 0], padding[2][:, :, 0].repeat_interleave(2, dim=1))
        start += cut
    for row, pieces in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces), _written_out(row[0], row[1], row[2], window))


def test_storage_doubles_and_keeps_what_it_holds() -> None:
    cache, seen = RowCache(), []
    for token in range(200):
        new = torch.full((1, GROUPS, 1, WIDTH), float(token))
        keys, values = cache.extended(0, new, -new)
        cache.length += 1
        seen.append(cache.bytes)
        assert keys[0, 0, :, 0].tolist() == list(range(token + 1)) and torch.equal(values, -keys)
    assert sorted({size // (2 * GROUPS * WIDTH * 4) for size in seen}) == [64, 128, 256]
    assert [room(tokens) for tokens in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]
