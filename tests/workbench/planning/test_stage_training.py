"""What a stage of a pipeline keeps alive at once, against the order of its passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.packing import PACKED, PADDED, RowLayout
from workbench.planning.stage_training import AliveAtOnce


@pytest.mark.parametrize("micro", [PADDED, PACKED])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_a_step_counts_what_is_between_its_two_passes(
    micro: RowLayout, lengths: list[int], stages: int, data: st.DataObject
) -> None:
    stage, lengths_B = data.draw(st.integers(0, stages - 1)), np.array(lengths)
    parts = list(micro.cut(np.arange(len(lengths)), lengths_B, tokens=50))
    ahead = stages - stage  # of 1F1B
    windows = [parts[number : number + ahead] for number in range(max(1, len(parts) - ahead + 1))]
    tokens = max(sum(max(50, micro.tokens(lengths_B[part])) for part in window) for window in windows)
    pairs = max(sum(micro.pairs(lengths_B[part]) for part in window) for window in windows)
    counted = AliveAtOnce(micro, stages - stage, lambda: 50)
    assert (counted.tokens(lengths_B), counted.pairs(lengths_B)) == (tokens, pairs)
