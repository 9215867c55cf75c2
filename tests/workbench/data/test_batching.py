"""Global batches depend on (rows, seed, step) alone; micro-batches change nothing but memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.batching import (
    PASS_OVERHEAD,
    Row,
    collate,
    evenly_spaced,
    global_batch,
    micro_batches,
    steps_per_epoch,
)

rows = st.integers(1, 200)
sizes = st.integers(1, 50)


@given(rows, sizes, st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_sees_every_row_once(count: int, size: int, seed: int, epoch: int) -> None:
    steps = steps_per_epoch(count, size)
    seen = np.concatenate([global_batch(epoch * steps + s, rows=count, size=size, seed=seed) for s in range(steps)])
    assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    batches = [global_batch(step, rows=1000, size=1000, seed=seed).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(batch) for batch in batches}) == 4


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000))
def test_micro_batches_partition_within_the_budget(lengths: list[int], budget: int) -> None:
    per_row = np.asarray(lengths)
    parts = list(micro_batches(np.arange(len(lengths)), per_row, tokens=budget))
    assert sorted(np.concatenate(parts)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * per_row[part].max() <= budget
    longest = [per_row[part].max() for part in parts]
    assert longest == sorted(longest, reverse=True)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(1, 2000))
def test_no_other_cut_computes_less(lengths: list[int], budget: int) -> None:
    def cost(parts: list[list[int]]) -> float:
        fits = all(len(part) == 1 or len(part) * max(part) <= budget for part in parts)
        return sum(len(part) * max(part) + max(PASS_OVERHEAD, budget // 10) for part in parts) if fits else math.inf

    ordered = sorted(lengths, reverse=True)
    found = [sorted(np.asarray(lengths)[part]) for part in _cut(lengths, budget)]
    places = range(1, len(ordered))
    every = itertools.chain.from_iterable(itertools.combinations(places, count) for count in range(len(ordered)))
    cuts = ([0, *ends, len(ordered)] for ends in every)
    assert cost(found) == min(cost([ordered[a:b] for a, b in itertools.pairwise(cut)]) for cut in cuts)


@pytest.mark.parametrize(("rows", "fit"), [(9, 8), (16, 8), (3, 8)])
def test_rows_of_one_length_fill_the_first_micro_batches(rows: int, fit: int) -> None:
    sizes = [len(part) for part in _cut([100] * rows, 100 * fit)]
    assert sizes == [fit] * (rows // fit) + ([rows % fit] if rows % fit else [])


def _cut(lengths: list[int], budget: int) -> list[Any]:
    return list(micro_batches(np.arange(len(lengths)), np.asarray(lengths), tokens=budget))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_collate_pairs_each_supervised_token_with_the_position_before_it(masks: list[list[bool]]) -> None:
    examples = [Row(np.arange(1, len(mask) + 1) + 10 * row, np.asarray(mask)) for row, mask in enumerate(masks)]
    batch = collate(examples)
    wanted = [int(ids[t]) for ids, mask, *_ in examples for t in range(1, len(ids)) if mask[t]]
    before = [int(ids[t - 1]) for ids, mask, *_ in examples for t in range(1, len(ids)) if mask[t]]
    assert batch.labels_N.tolist() == wanted
    assert batch.inputs["input_ids"].flatten()[batch.positions_N].tolist() == before
    assert batch.tokens == sum(map(len, masks))


@given(st.integers(1, 300), st.integers(2, 300))
def test_evenly_spaced_rows_go_from_the_first_to_the_last(rows: int, count: int) -> None:
    chosen = evenly_spaced(rows, count)
    assert (len(chosen), chosen[0], chosen[-1]) == (min(rows, count), 0, rows - 1)
    assert np.ptp(np.diff(chosen)) <= 1 if len(chosen) > 2 else True
    assert evenly_spaced(rows, 1).tolist() == [0] and len(evenly_spaced(0, count)) == len(evenly_spaced(rows, 0)) == 0
