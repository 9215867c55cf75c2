"""Passes hold every token once, in sizes that were found to change nothing."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from workbench.evaluation.serving.passes import Chunk, Sharing, laid_out
from workbench.models.cached_rows import RowCache

SIZES = st.sets(st.sampled_from([1, 2, 4, 8, 16, 32]), max_size=5).map(lambda passes: (*sorted(passes), 64))
CHUNKS = st.lists(
    st.builds(
        lambda read, tokens, *rest: Chunk(RowCache(read), list(range(1, tokens + 1)), *rest),
        st.integers(0, 5),
        st.integers(1, 64),
        st.sampled_from("abc"),
        st.booleans(),
        st.booleans(),
    ),
    max_size=9,
)


@given(CHUNKS, SIZES, st.sampled_from(["all", "member", "none"]))
def test_every_token_is_once_in_a_pass_of_a_known_size(
    chunks: list[Chunk], sizes: tuple[int, ...], sharing: Sharing
) -> None:
    seen = []
    for laid in laid_out(chunks, sizes, sharing=sharing):
        assert len(laid.ids) == len(laid.positions) == sum(rows.many for rows in laid.rows)
        assert len(laid.ids) in sizes and {rows.many for rows in laid.rows[:-1]} <= set(sizes)
        members = [rows.member for rows in laid.rows for _ in range(rows.many)]
        found = {id(chunk.cache): chunk for chunk in chunks}
        for part in laid.parts:
            chunk = found[id(part.cache)]
            assert laid.ids[part.where] == list(chunk.ids)
            assert laid.positions[part.where] == list(range(chunk.cache.length, chunk.cache.length + len(chunk.ids)))
            assert set(members[part.where]) == {chunk.member}
            seen.append(chunk)
        pairs = [(part.where, found[id(part.cache)]) for part in laid.parts]
        wanted = [range(where.start if each.scored else where.stop - each.ends, where.stop) for where, each in pairs]
        assert laid.wanted == list(chain.from_iterable(wanted)) and len(laid.chunks) == sum(map(bool, wanted))
        assert sharing == "all" or len({found[id(part.cache)].member for part in laid.parts}) == 1
        assert sharing != "none" or len(laid.parts) == 1
    assert sorted(map(id, seen)) == sorted(map(id, chunks))
