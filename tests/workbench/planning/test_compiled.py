"""Products that are ready are those that a memory of the last ones holds."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.planning import compiled
from workbench.planning.compiled import Size, missed, new_shares
from workbench.planning.kernels import Kernel, Kernels


@pytest.mark.parametrize("capacity", [1, 3, 7, 20])
def test_what_was_not_asked_for_the_longest_goes_first(capacity: int) -> None:
    keys = np.random.default_rng(0).integers(0, 6, size=(2, 300)).tolist()
    lately: list[tuple[int, int]] = []
    new: list[list[bool]] = [[], []]
    for together in zip(*keys, strict=True):
        for asked in enumerate(together):
            new[asked[0]].append(asked not in lately)
            lately = [*(each for each in lately if each != asked), asked][-capacity:]
    assert missed(keys, weights=[1, 1], capacity=capacity) == [mean(each) for each in new]


def test_what_takes_more_drives_out_more() -> None:
    keys = [[1, 1, 1, 1], [1, 2, 3, 4]]
    assert missed(keys, weights=[2, 3], capacity=5) == [1 / 4, 1.0]
    assert missed(keys, weights=[2, 4], capacity=5) == [1.0, 1.0]
    assert missed([[7, 7]], weights=[6], capacity=5) == [1.0]


def test_products_are_new_by_what_their_shapes_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(8, 8)
    looked_at = [(rows, _products(rows, length, weight)) for rows, length in ((3, 7), (5, 9))]

    def shares(*sizes: tuple[int, int]) -> list[list[float]]:
        found = new_shares([Size(rows, rows * length) for rows, length in sizes], looked_at)
        return [
            [shares[product] for product in products] for shares, (_, products) in zip(found, looked_at, strict=True)
        ]

    lengths = [(3 + n % 2, 7 + n) for n in range(20)]
    assert shares(*lengths) == [[0.0, 2 / 20, 1.0]] * 2
    assert shares(*[(3, 7)] * 20) == [[0.0, 1 / 20, 1 / 20]] * 2
    monkeypatch.setattr(compiled, "CAPACITY", 2)  # the fixed one, and one more
    assert shares(*lengths) == [[0.0, 1.0, 1.0]] * 2


def test_of_one_micro_batch_nobody_knows_what_comes_again() -> None:
    with Kernels() as found:
        torch.ones(4, 8) @ torch.ones(8, 8)
    (shares,) = new_shares([Size(2, 6), Size(2, 7)], [(2, found.calls)])
    assert list(shares.values()) == [1.0]


def _products(rows: int, length: int, weight: Tensor) -> list[Kernel]:
    """One that is the same for all micro-batches, one of four virtual tokens in a row, one of all tokens."""
    with Kernels() as found:
        for first in (10, 4 * rows, rows * length):
            torch.ones(first, 8) @ weight
    return [kernel for kernel in found.calls if kernel.flops]
