"""How often a product has to be made ready: oneDNN compiles one for each shape that is new, and keeps the last."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from statistics import mean
from typing import NamedTuple

from workbench.planning.kernels import Kernel, Like

CAPACITY = int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""Products that are kept (workbench/__init__.py)."""


class Size(NamedTuple):
    """Of a micro-batch."""

    rows: int
    tokens: int
    """With padding."""


def new_shares(sizes: Sequence[Size], looked_at: Sequence[tuple[int, Collection[Kernel]]]) -> list[dict[Kernel, float]]:
    """The share of its calls for which each product is not ready, since its shape did not come shortly before.

    Args:
        sizes: Of all micro-batches, in their order.
        looked_at: The rows of some of them, and their kernels.

    Returns:
        Of each that was looked at, by product.
    """
    found = [(rows, {kernel for kernel in kernels if kernel.flops}) for rows, kernels in looked_at]
    by_rows = [
        {kernel for kernel in products if len(found) > 1 and all(_has_alike(kernel, rows, other) for other in found)}
        for rows, products in found
    ]
    fixed = set.intersection(*by_rows)
    by_tokens = mean(len(products - rows) for (_, products), rows in zip(found, by_rows, strict=True))
    shares = missed(
        [[size.rows for size in sizes], [size.tokens for size in sizes]],
        weights=[mean(map(len, by_rows)) - len(fixed), by_tokens],
        capacity=CAPACITY - len(fixed),
    )
    return [
        {kernel: 0.0 if kernel in fixed else shares[kernel not in rows] for kernel in products}
        for (_, products), rows in zip(found, by_rows, strict=True)
    ]


def missed(keys: Sequence[Sequence[int]], *, weights: Sequence[float], capacity: float) -> list[float]:
    """Shares of keys that are not among those kept, of several kinds that come in turn and share one memory.

    Args:
        keys: Those of each kind, in their order; of all kinds as many.
        weights: What a key of each kind takes of the memory.
        capacity: What it holds; those go that were not asked for the longest.
    """
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    new, held = [0] * len(keys), 0.0
    for together in zip(*keys, strict=True):
        for kind, key in enumerate(together):
            if (kind, key) not in kept:
                new[kind] += 1
                held += weights[kind]
            kept[kind, key] = None
            kept.move_to_end((kind, key))
            while held > capacity and kept:
                (gone, _), _ = kept.popitem(last=False)
                held -= weights[gone]
    return [count / len(keys[0]) for count in new]


def _has_alike(kernel: Kernel, rows: int, other: tuple[int, Collection[Kernel]]) -> bool:
    """Whether another micro-batch has the same product, but for how many rows it has."""
    their_rows, products = other
    return any(_alike(kernel, rows, each, their_rows) for each in products)


def _alike(kernel: Kernel, rows: int, other: Kernel, their_rows: int) -> bool:
    mine, theirs = ([leaf for leaf in each.leaves if isinstance(leaf, Like)] for each in (kernel, other))
    return (
        kernel.operation is other.operation
        and [(each.dtype, len(each.shape)) for each in mine] == [(each.dtype, len(each.shape)) for each in theirs]
        and all(
            size == their_size or size * their_rows == their_size * rows
            for each, their in zip(mine, theirs, strict=True)
            for size, their_size in zip(each.shape, their.shape, strict=True)
        )
    )
