"""Tokens in one array are those of each row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.labelled.encoded_texts import EncodedTexts, FieldTokens

ROW = st.builds(
    FieldTokens,
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.asarray(ids, dtype=np.int64)),
    st.booleans(),
)


def shown(rows: Iterable[FieldTokens]) -> list[tuple[str, list[int], bool]]:
    return [(str(each.input_ids.dtype), each.input_ids.tolist(), each.truncated) for each in rows]


@given(st.lists(ROW, max_size=6), st.lists(ROW, max_size=3), st.lists(st.integers(0, 99), max_size=8))
def test_rows_come_back(rows: list[FieldTokens], more: list[FieldTokens], numbers: list[int]) -> None:
    encoded = EncodedTexts.of(iter(rows))
    assert len(encoded) == len(rows) and shown(encoded) == shown(rows)
    assert encoded.length_N.tolist() == [len(each.input_ids) for each in rows]
    chosen = np.asarray([number % len(rows) for number in numbers if rows], dtype=np.int64)
    part = encoded.take(chosen)
    assert shown(part) == shown([rows[row] for row in chosen])
    assert shown(part.concatenated(EncodedTexts.of(more))) == shown([*(rows[row] for row in chosen), *more])
