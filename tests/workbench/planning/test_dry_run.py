"""Which micro-batches are carried out, and which cannot take most."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.planning.dry_run import Costs, MicroBatchTrial, largest_rows

ROWS = np.arange(2)
LARGEST = MicroBatchTrial(ROWS, later=True, padded=1000, pairs=100_000, supervised=50.0)
COSTS = Costs(position=1000, pair=16, gradients=500_000)
ACTIVATIONS = 1000 * 10_000 + 50 * 1000
"""10,000 bytes a token, of which half are certain."""


def _less(**other: float) -> bool:
    return LARGEST._replace(**other).takes_less(LARGEST, ACTIVATIONS, COSTS)


def test_what_is_smaller_in_every_respect_takes_less() -> None:
    assert _less() and _less(padded=900) and _less(pairs=1, supervised=0.0, later=False)


def test_tokens_weigh_against_all_else() -> None:
    assert not _less(padded=1001)
    assert _less(padded=900, supervised=550.0) and not _less(padded=900, supervised=551.0)
    assert _less(padded=900, pairs=131_000) and not _less(padded=900, pairs=132_000)
    assert not _less(pairs=131_000) and _less(pairs=131_000, later=False)


def test_where_pairs_may_take_anything_more_of_them_are_looked_at() -> None:
    costs = COSTS._replace(pair=math.inf)
    assert not LARGEST._replace(padded=10, pairs=100_001).takes_less(LARGEST, ACTIVATIONS, costs)
    assert LARGEST._replace(padded=10).takes_less(LARGEST, ACTIVATIONS, costs)


def test_more_gradients_are_never_less() -> None:
    first = LARGEST._replace(later=False)
    assert not LARGEST.takes_less(first, ACTIVATIONS, COSTS)


class Pairs:
    """Rows of two sequences; the second has fewer tokens and more padding."""

    sequence_lengths = np.asarray([[6, 6], [10, 1], [3, 3]])
    lengths = sequence_lengths.sum(1)
    supervised = np.ones(3)

    def __len__(self) -> int:
        return 3


def test_rows_of_several_sequences_take_the_padding_of_each() -> None:
    rows: Any = Pairs()
    assert largest_rows(rows, tokens=12)[0].tolist() == [1]


class Rows:
    """Three rows, each a micro-batch."""

    lengths = np.asarray([4, 9, 8])
    supervised = np.asarray([1.0, 5.0, 7.0])

    def __len__(self) -> int:
        return 3


def test_supervised_tokens_beyond_a_chunk_of_logits_take_no_more() -> None:
    """Of three micro-batches the second has most tokens and enough of them supervised; the third most supervised."""
    rows: Any = Rows()
    assert [each.tolist() for each in largest_rows(rows, tokens=9)] == [[1], [2]]
    assert [each.tolist() for each in largest_rows(rows, tokens=9, positions=5)] == [[1]]
