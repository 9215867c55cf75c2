"""Products of groups of rows with a matrix each, in a number of launches that does not grow with the groups.

Legend: N rows of all groups, K groups, T rows of the largest group, F and G features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.adapters.row_dropout import sent

WORD = 8
"""Numbers in half precision of 16 bytes, of which the rows of grouped products are a multiple."""
WASTE = 2
"""Rows with those that fill groups up, by rows, up to which groups are filled: copies take at most so much more."""


class RowGroups(ABC):
    """Neighbouring rows, the first `sizes[0]` of which belong to the first group; no group is empty."""

    @abstractmethod
    def __init__(self, sizes: Sequence[int], device: torch.device) -> None: ...

    @abstractmethod
    def product(self, spread: Tensor, weight_KFG: Tensor) -> Tensor:
        """Each row times its group's matrix, spread as the rows are."""

    @abstractmethod
    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The sums (K, F, G) of the outer products of each group's rows, both spread and one `cleared`."""

    def spread(self, rows_NF: Tensor) -> Tensor:
        """The rows as the products read them."""
        return rows_NF

    def cleared(self, spread: Tensor) -> Tensor:
        """Sets what fills groups up to 0, in place."""
        return spread

    def joined(self, spread: Tensor) -> Tensor:
        """The rows (N, F) again."""
        return spread


class KernelGroups(RowGroups):
    """By torch's grouped product, which is one kernel where `fastest` takes it, and a loop elsewhere."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._ends_K = sent(np.cumsum(sizes, dtype=np.int32), device)

    def product(self, spread: Tensor, weight_KFG: Tensor) -> Tensor:
        return F.grouped_mm(spread, weight_KFG, offs=self._ends_K)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return F.grouped_mm(left.mT, right, offs=self._ends_K)


class PaddedGroups(RowGroups):
    """By batched products (K, T, F), for which smaller groups are filled up with copies of their own first row.

    Another's row would bring its infinities along, which times 0 are not 0.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._shape = len(sizes), max(sizes)
        self._alike = min(sizes) == max(sizes)
        if not self._alike:
            size_K1, place_1T = np.array(sizes)[:, None], np.arange(max(sizes))[None]
            filled_KT = place_1T >= size_K1
            place_KT = np.cumsum(size_K1, axis=0) - size_K1 + np.where(filled_KT, 0, place_1T)
            self._place = sent(place_KT.reshape(-1), device)
            self._own_N = sent(np.flatnonzero(~filled_KT), device)
            self._filled_KT1 = sent(filled_KT[..., None], device)

    def product(self, spread: Tensor, weight_KFG: Tensor) -> Tensor:
        return spread @ weight_KFG

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return left.mT @ right

    def spread(self, rows_NF: Tensor) -> Tensor:
        return (rows_NF if self._alike else rows_NF[self._place]).view(*self._shape, -1)

    def cleared(self, spread: Tensor) -> Tensor:
        return spread if self._alike else spread.masked_fill_(self._filled_KT1, 0)

    def joined(self, spread: Tensor) -> Tensor:
        rows = spread.flatten(0, 1)
        return rows if self._alike else rows[self._own_N]


def fastest(rows_NF: Tensor, sizes: Sequence[int], *, outputs: int) -> type[RowGroups] | None:
    """How groups of rows are multiplied on their device; None: one product after the other.

    On a CPU launches cost nothing. torch's grouped product is one kernel on cards of compute capability 9 and 10 in
    bfloat16 (torch 2.13); on others it waits for the sizes and loops over the groups.
    """
    if rows_NF.device.type == "cpu":
        return None
    whole = rows_NF.shape[-1] % WORD == outputs % WORD == 0 and rows_NF.dtype == torch.bfloat16
    nvidia = rows_NF.device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available()
    if whole and nvidia and torch.cuda.get_device_capability(rows_NF.device)[0] in (9, 10):
        return KernelGroups
    return PaddedGroups if len(sizes) * max(sizes) <= WASTE * sum(sizes) else None
