"""Micro-batches of several owners: every row once, within the budget, and joined without moving what is predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.data.packing import PACKED, PADDED, Cut, in_sequence, join, laid_together, mixed_batches, padded_length

draw = np.random.default_rng(0)
LENGTHS = [draw.integers(2, 30, size) for size in (40, 25, 60)]
BATCHES = [draw.permutation(len(lengths))[:size] for lengths, size in zip(LENGTHS, (12, 3, 20), strict=True)]


def within(tokens: int) -> Cut:
    """Padded micro-batches of at most so many tokens."""
    return lambda rows, lengths: ((each, True) for each in PADDED.cut(rows, lengths, tokens=tokens))


@pytest.mark.parametrize("tokens", [30, 64, 200, 10_000])
def test_every_row_once_owners_together_within_the_budget(tokens: int) -> None:
    seen: list[list[int]] = [[] for _ in BATCHES]
    longest = []
    for parts in mixed_batches(BATCHES, LENGTHS, cut=within(tokens)):
        owners = [part.owner for part in parts]
        assert owners == sorted(set(owners))
        lengths = np.concatenate([LENGTHS[part.owner][part.indices] for part in parts])
        assert len(lengths) * lengths.max() <= tokens
        longest.append(int(lengths.max()))
        for owner, indices, counts in parts:
            assert counts
            seen[owner] += indices.tolist()
    assert [sorted(rows) for rows in seen] == [sorted(batch.tolist()) for batch in BATCHES]
    assert longest == sorted(longest, reverse=True)


def test_there_is_less_padding_than_with_one_owner_each() -> None:
    def computed(batches: list[np.ndarray], lengths: list[np.ndarray]) -> int:
        found = 0
        for parts in mixed_batches(batches, lengths, cut=within(128)):
            pooled = np.concatenate([lengths[part.owner][part.indices] for part in parts])
            found += len(pooled) * int(pooled.max())
        return found

    apart = sum(computed([batch], [lengths]) for batch, lengths in zip(BATCHES, LENGTHS, strict=True))
    needed = sum(int(lengths[batch].sum()) for batch, lengths in zip(BATCHES, LENGTHS, strict=True))
    assert needed <= computed(BATCHES, LENGTHS) < apart


def _row(length: int, source: int = 0) -> Row:
    ids = draw.integers(1, 99, length)
    return Row(ids, np.arange(length) > source + 1, source)


@pytest.mark.parametrize("source", [0, 3])
def test_joined_rows_are_those_that_one_collation_gives(source: int) -> None:
    """With an encoder's mask and a decoder's positions where there is a source."""
    rows = [[_row(9 + source, source), _row(4 + source, source)], [_row(5 + source, source)], [_row(12, source)]]
    joined = join([collate(part) for part in rows])
    whole = collate([row for part in rows for row in part])
    assert joined.inputs.keys() == whole.inputs.keys()
    assert all(torch.equal(joined.inputs[name], whole.inputs[name]) for name in whole.inputs)
    assert torch.equal(joined.positions_N, whole.positions_N) and torch.equal(joined.labels_N, whole.labels_N)
    assert joined.tokens == whole.tokens and padded_length(joined) == padded_length(whole)


def test_packed_rows_of_several_are_those_that_are_packed_together() -> None:
    parts = [collate([_row(length) for length in lengths]) for lengths in ((9, 4), (5,), (12, 2, 7))]
    found, wanted = in_sequence([PACKED.lay(part) for part in parts]), laid_together(parts, PACKED)
    assert wanted.inputs["row_owners"].tolist() == [0, 0, 1, 2, 2, 2]
    assert wanted.inputs.keys() - PACKED.lay(join(parts)).inputs.keys() == {"row_owners"}
    assert found.inputs.keys() == wanted.inputs.keys() and found.tokens == wanted.tokens
    assert all(torch.equal(found.inputs[name], wanted.inputs[name]) for name in wanted.inputs)
    assert torch.equal(found.positions_N, wanted.positions_N) and torch.equal(found.labels_N, wanted.labels_N)


def test_joined_encoder_rows_mask_their_padding() -> None:
    parts = [
        MicroBatch(encoder_inputs([np.arange(1, length)]), torch.tensor([0]), torch.tensor([7]), length - 1)
        for length in (4, 9)
    ]
    joined = join(parts)
    assert joined.inputs["attention_mask"].sum(1).tolist() == [3, 8]
    assert joined.positions_N.tolist() == [0, 8]


def test_pictures_of_different_sizes_stay_apart() -> None:
    lengths = [np.full(9, 4), np.full(9, 16), np.full(9, 4)]
    batches = [np.asarray(each) for each in ([0, 3, 5], [8, 1], [2, 7])]
    found = list(mixed_batches(batches, lengths, cut=within(64), padded=False))
    for parts in found:
        assert len({int(lengths[owner][row]) for owner, rows, _ in parts for row in rows}) == 1
    drawn = [(owner, int(row)) for parts in found for owner, rows, _ in parts for row in rows]
    assert sorted(drawn) == sorted((owner, row) for owner, rows in enumerate(batches) for row in rows.tolist())
    assert len(found) == 2, "and of one size together"
