"""Tokens of many rows laid out for forward passes, in sizes at which a row's numbers do not depend on the others.

A matrix product may add up in another order when it has another number of rows. So the tokens of each adapter are
padded to a size of which the engine has found that every row comes out, bit for bit, as in the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.multi_adapter import BARE
from workbench.models.cached_rows import RowCache, RowPart

Sizes = tuple[int, ...]
"""Numbers of tokens, ascending."""
_PADDING = 0
"""A token that is in every vocabulary."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that one row goes on with."""

    cache: RowCache
    ids: Sequence[int]
    member: str
    """The adapter that they go through."""
    ends: bool = True
    """Whether the token after them is asked for."""
    scored: bool = False
    """Whether the token after each of them is scored."""

    @property
    def wanted(self) -> int:
        """Its last tokens after which logits are computed."""
        return len(self.ids) if self.scored else int(self.ends)


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    ids: list[int]
    positions: list[int]
    rows: list[MemberRows]
    """Members that the tokens belong to, in their order, padding included."""
    parts: list[RowPart]
    wanted: list[int]
    """Places of the tokens after which logits are computed."""
    chunks: list[Chunk]
    """Those that have tokens among them, in this order."""


Sharing = Literal["all", "member", "none"]
"""Chunks that may share a pass: all of them, those of one member, or none."""


def laid_out(chunks: Sequence[Chunk], sizes: Sizes, *, sharing: Sharing) -> Iterator[Pass]:
    """All chunks in as few passes as `sizes` and `sharing` allow."""
    groups: list[list[Chunk]] = []
    mixes = sharing == "all"
    for group in [[each] for each in chunks] if sharing == "none" else _groups(chunks, sizes[-1]):
        if groups and (not mixes or sum(_size(each, sizes) for each in (*groups, group)) > sizes[-1]):
            yield _pass(groups, sizes)
            groups = []
        groups.append(group)
    if groups:
        yield _pass(groups, sizes)


def least(tokens: int, sizes: Sizes) -> int:
    """The smallest of `sizes` that holds so many tokens."""
    return next(size for size in sizes if size >= tokens)


def _groups(chunks: Sequence[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Chunks of one member, at most so many tokens together."""
    for _, members in groupby(sorted(chunks, key=lambda chunk: chunk.member), key=lambda chunk: chunk.member):
        group: list[Chunk] = []
        for chunk in members:
            if group and sum(len(each.ids) for each in (*group, chunk)) > most:
                yield group
                group = []
            group.append(chunk)
        yield group


def _size(group: Sequence[Chunk], sizes: Sizes) -> int:
    return least(sum(len(chunk.ids) for chunk in group), sizes)


def _pass(groups: Sequence[Sequence[Chunk]], sizes: Sizes) -> Pass:
    laid = Pass([], [], [], [], [], [])
    for group in groups:
        start = len(laid.ids)
        for chunk in group:
            first = len(laid.ids)
            laid.ids.extend(chunk.ids)
            laid.positions.extend(range(chunk.cache.length, chunk.cache.length + len(chunk.ids)))
            laid.parts.append(RowPart(chunk.cache, slice(first, len(laid.ids))))
            if chunk.wanted:
                laid.wanted.extend(range(len(laid.ids) - chunk.wanted, len(laid.ids)))
                laid.chunks.append(chunk)
        _pad(laid, start, _size(group, sizes), group[0].member)
    if rest := least(len(laid.ids), sizes) - len(laid.ids):
        _pad(laid, len(laid.ids), rest, BARE)
    return laid


def _pad(laid: Pass, start: int, size: int, member: str) -> None:
    """Fill up to `size` tokens from `start`, which are all one member's."""
    more = size - (len(laid.ids) - start)
    laid.ids.extend([_PADDING] * more)
    laid.positions.extend([0] * more)
    laid.rows.append(MemberRows(member, size))
