"""Token spans of a text, whatever a tokenizer leaves out of its offsets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.chat_tokenizer import TokenSpans


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_a_token_starts_where_the_one_before_it_ended_or_earlier(steps: list[tuple[int, int]]) -> None:
    """Gaps belong to the token after them; of tokens that share a character each starts where it says."""
    ends = np.cumsum([right for _, right in steps], dtype=int)
    offsets = [(max(0, int(end) - left), int(end)) for end, (left, _) in zip(ends, steps, strict=True)]
    found = TokenSpans("", list(range(len(steps))), offsets)
    assert found.ends == ends.tolist()
    assert found.starts == [min(start, before) for (start, _), before in zip(offsets, [0, *ends], strict=False)]


def test_ends_never_go_back() -> None:
    found = TokenSpans("", [0, 1, 2], [(0, 4), (0, 0), (4, 6)])
    assert (found.starts, found.ends) == ([0, 0, 4], [4, 4, 6])
    assert TokenSpans("", [], []).starts == []
