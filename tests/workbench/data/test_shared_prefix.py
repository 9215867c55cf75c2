"""Rows that begin alike hold what they share once, and every label where its token is predicted."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.data import packing
from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.data.packing import PACKED, SharedPrefix

beginnings = st.integers(1, 12)
rests = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def rows_of(prefix: int, own: list[int], *, seed: int = 0) -> list[Row]:
    """Rows with the same first tokens, whose next ones differ where there are several."""
    draw = np.random.default_rng(seed)
    first = draw.integers(3, 64, prefix)
    return [
        Row(np.concatenate([first, [3 + number], draw.integers(3, 64, length - 1)]), draw.random(prefix + length) < 0.5)
        for number, length in enumerate(own)
    ]


class Rows:
    """As much of a data set as is asked for."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.lengths, self.read = rows, np.array([len(row.input_ids) for row in rows]), 0

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        self.read += len(indices)
        return collate([self.rows[index] for index in indices])


@given(beginnings, rests, st.integers(1, 60))
def test_each_row_is_in_one_micro_batch_that_keeps_to_its_tokens(prefix: int, own: list[int], tokens: int) -> None:
    form, lengths, rows = SharedPrefix(prefix), prefix + np.asarray(own), np.arange(len(own))
    parts = list(form.cut(rows, lengths, tokens=tokens))
    assert sorted(np.concatenate(parts)) == list(rows)
    for part in parts:
        assert form.tokens(lengths[part]) == prefix + sum(own[row] for row in part)
        assert form.tokens(lengths[part]) <= tokens or len(part) == 1


@given(beginnings, rests)
def test_labels_follow_their_tokens_and_positions_go_on(prefix: int, own: list[int]) -> None:
    rows = rows_of(prefix, own)
    padded = collate(rows)
    laid = SharedPrefix(prefix).lay(padded)
    ids_T, place_T = laid.inputs["input_ids"][0], laid.inputs["position_ids"][0]
    assert len(ids_T) == SharedPrefix(prefix).tokens(prefix + np.asarray(own))
    assert torch.equal(laid.row_of_label, padded.row_of_label) and torch.equal(laid.labels_N, padded.labels_N)
    for position, row, label in zip(laid.positions_N, laid.row_of_label, laid.labels_N, strict=True):
        place = int(place_T[position])
        assert ids_T[position] == rows[row].input_ids[place], "a hidden state of the row"
        assert label == rows[row].input_ids[place + 1], "the next token is the label"
    wanted = torch.cat([torch.arange(prefix), *(torch.arange(prefix, prefix + length) for length in own)])
    assert torch.equal(place_T, wanted)
    assert laid.inputs["row_lengths"].tolist() == own


def test_rows_that_share_less_are_laid_out_with_less() -> None:
    rows = rows_of(6, [4, 5])
    rows[1].input_ids[3] += 1
    laid = SharedPrefix(6).lay(collate(rows))
    assert int(laid.inputs["prefix_tokens"]) == 3
    assert laid.inputs["input_ids"].shape[1] == 3 + 7 + 8
    rows[1].input_ids[0] += 1
    apart, packed = SharedPrefix(6).lay(collate(rows)), PACKED.lay(collate(rows))
    assert all(torch.equal(value, packed.inputs[name]) for name, value in apart.inputs.items())


def test_a_row_that_a_view_cut_short_keeps_a_token_of_its_own() -> None:
    rows = [Row(np.arange(3, 12), np.ones(9, bool)), Row(np.arange(3, 7), np.ones(4, bool))]
    laid = SharedPrefix(8).lay(collate(rows))
    assert int(laid.inputs["prefix_tokens"]) == 3
    assert laid.inputs["row_lengths"].tolist() == [6, 1]


@given(beginnings, rests)
def test_what_all_rows_begin_with_is_found(prefix: int, own: list[int]) -> None:
    rows = rows_of(prefix, own)
    wanted = prefix if len(own) > 1 else len(rows[0].input_ids) - 1
    assert packing.prefix_of_all(cast(Any, Rows(rows)), least=1) == wanted
    assert packing.prefix_of_all(cast(Any, Rows(rows)), least=wanted + 1) == 0


def test_few_rows_tell_that_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_AT_ONCE", 4)
    rows = Rows(rows_of(5, [3] * 40))
    assert packing.prefix_of_all(cast(Any, rows), least=6) == 0
    assert rows.read <= 8
    assert packing.prefix_of_all(cast(Any, rows), least=5) == 5
    rows.rows[39].input_ids[2] += 1
    assert packing.prefix_of_all(cast(Any, rows), least=1) == 2


@given(beginnings, rests)
def test_pairs_are_those_that_attention_computes(prefix: int, own: list[int]) -> None:
    lengths_B = prefix + np.asarray(own)
    assert SharedPrefix(prefix).pairs(lengths_B) == prefix**2 + sum(each * (prefix + each) for each in own)
