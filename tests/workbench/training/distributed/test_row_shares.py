from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.packing import PACKED, PADDED, RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed.row_shares import share_rows


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    tokens=st.integers(60, 300),
    world=st.integers(1, 5),
    in_step=st.booleans(),
    form=st.sampled_from([PADDED, PACKED]),
)
@settings(max_examples=200, deadline=None)
def test_each_row_is_one_process_own_and_nobody_waits_for_long(
    lengths: list[int], tokens: int, world: int, in_step: bool, form: RowLayout
) -> None:
    known, rows = np.array(lengths), np.arange(len(lengths))
    dealt = [
        share_rows(rows, known, form, tokens=tokens, ranks=Ranks(rank, world), in_step=in_step) for rank in range(world)
    ]
    counted = [part.rows for own in dealt for part in own if part.counts]
    assert sorted(np.concatenate(counted)) == list(rows)
    assert all(form.tokens(known[part]) <= tokens for part in counted)
    passes = [len(own) for own in dealt]
    assert max(passes) - min(passes) <= (0 if in_step else 1)
    if len(rows) >= world:
        assert all(any(part.counts for part in own) for own in dealt)
