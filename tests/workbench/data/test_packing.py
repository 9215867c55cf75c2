"""Packed micro-batches hold each row once, within their budget, and every token where the padded ones have it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.data.packing import MASK, PACKED, PADDED

lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def rows_of(lengths: list[int], *, seed: int = 0) -> list[Row]:
    draw = np.random.default_rng(seed)
    return [Row(draw.integers(3, 64, length), draw.random(length) < 0.5) for length in lengths]


@given(lengths_of_rows, st.integers(1, 60))
def test_each_row_is_in_one_micro_batch_that_keeps_to_its_tokens(lengths: list[int], tokens: int) -> None:
    lengths_N, rows = np.asarray(lengths), np.arange(len(lengths))
    parts = list(PACKED.cut(rows, lengths_N, tokens=tokens))
    assert sorted(np.concatenate(parts)) == list(rows)
    for part in parts:
        assert PACKED.tokens(lengths_N[part]) <= tokens or len(part) == 1
        assert list(lengths_N[part]) == sorted(lengths_N[part], reverse=True)
    first, *_ = parts
    assert lengths_N[first].max() == lengths_N.max(), "a lack of memory shows at once"


@given(lengths_of_rows, st.integers(1, 60))
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], tokens: int) -> None:
    lengths_N = np.asarray(lengths)
    parts = list(PACKED.cut(np.arange(len(lengths)), lengths_N, tokens=tokens))
    fullest = [PACKED.tokens(lengths_N[part]) for part in parts]
    assert all(one + other > tokens for number, one in enumerate(fullest) for other in fullest[:number])


@given(lengths_of_rows)
def test_packed_rows_compute_no_padding(lengths: list[int]) -> None:
    lengths_B = np.asarray(lengths)
    assert PACKED.tokens(lengths_B) == sum(lengths) <= PADDED.tokens(lengths_B) == len(lengths) * max(lengths)
    assert PACKED.pairs(lengths_B) == sum(length**2 for length in lengths) <= PADDED.pairs(lengths_B)
    assert (PACKED.tokens(lengths_B) == PADDED.tokens(lengths_B)) == (len(set(lengths)) == 1)


@given(lengths_of_rows)
def test_labels_follow_their_tokens_and_positions_restart(lengths: list[int]) -> None:
    padded = collate(rows_of(lengths))
    packed = PACKED.lay(padded)
    ids_L = packed.inputs["input_ids"][0]
    assert torch.equal(ids_L[packed.positions_N + 1], packed.labels_N), "the next token is the label"
    assert torch.equal(packed.row_of_label, padded.row_of_label)
    wanted = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(packed.inputs["position_ids"][0], wanted)
    assert packed.inputs["row_lengths"].tolist() == lengths
    assert packed.inputs["row_starts"].tolist() == [0, *itertools.accumulate(lengths)]
    moved = packed.to(torch.device("meta"))
    assert {name for name, each in moved.inputs.items() if each.device.type == "cpu"} == {"row_lengths"}
    assert packed.tokens == padded.tokens == len(ids_L)


def test_an_encoders_padding_goes_by_its_mask() -> None:
    lengths = [5, 3, 1]
    ids = [row.input_ids for row in rows_of(lengths)]
    inputs = encoder_inputs(ids)
    padded = MicroBatch(inputs, torch.tensor([0, 5, 7, 10]), torch.tensor([9, 9, 9, 9]), sum(lengths))
    packed = PACKED.lay(padded)
    assert packed.inputs["input_ids"][0].tolist() == np.concatenate(ids).tolist()
    assert packed.positions_N.tolist() == [0, 5, 7, 8]
    assert packed.inputs[MASK].numel() == 0


def test_rows_with_weights_keep_them() -> None:
    padded = collate([Row(np.arange(3, 8), np.ones(5, bool)), Row(np.arange(3, 6), np.ones(3, bool))])
    weight_B = np.array([0.5, 2.0])
    packed = PACKED.lay(padded).weighted(weight_B)
    assert packed.weights_N is not None
    torch.testing.assert_close(packed.weights_N, torch.tensor([0.5] * 4 + [2.0] * 2))


def test_a_decoder_beside_its_encoder_cannot_be_packed() -> None:
    both = collate([Row(np.arange(3, 9), np.ones(6, bool), source=4), Row(np.arange(3, 8), np.ones(5, bool), source=3)])
    with pytest.raises(AssertionError, match="sequences of their own"):
        PACKED.lay(both)
