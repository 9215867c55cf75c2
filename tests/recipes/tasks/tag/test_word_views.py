"""Views of words keep every word in its place, and their mean is that of the readings that have it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config.sections.tta_config import TtaConfig
from workbench.data.rows import RawRow
from workbench.data.tagged_rows import EncodedTags, TaggedRow, text_row
from workbench.recipes.tasks.tag import word_views

VIEWS = TtaConfig(views=("lower", "upper", "typos"), copies=2, noise=0.5)
WORDS = st.lists(st.text("aB7.ß'", min_size=1, max_size=4), min_size=1, max_size=6)


@given(WORDS, st.integers(0, 3))
def test_a_view_has_as_many_words_where_its_text_has_them(words: list[str], seed: int) -> None:
    row = TaggedRow(RawRow("row 1"), *_text(words), tags=("O",) * len(words))
    found = {name: change(row) for name, change in word_views.views(VIEWS, seed=seed)}
    assert found["lower"].words == tuple(map(str.lower, words)) and found["upper"].words == tuple(map(str.upper, words))
    for view in found.values():
        assert len(view.words) == len(words) and all(view.words)
        assert [view.text[start:end] for start, end in view.offsets] == list(view.words)
        assert view.tags == () and view.text.count(" ") == row.text.count(" ")


def _text(words: list[str]) -> tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]]:
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    offsets = tuple((start, start + len(word)) for start, word in zip(starts, words, strict=False))
    return " ".join(words), tuple(words), offsets


def test_what_stands_between_words_stays() -> None:
    (_, change), *_ = word_views.views(TtaConfig(views=("upper",)), seed=0)
    assert change(text_row("Bob (of  New York),7!")).text == "BOB (OF  NEW YORK),7!"


def test_copies_of_typos_differ_and_are_the_same_again() -> None:
    config = TtaConfig(views=("typos",), copies=3)
    texts = [
        [change(text_row("Bob saw New York")).text for _, change in word_views.views(config, seed=1)] for _ in "ab"
    ]
    assert texts[0] == texts[1] and len({*texts[0], "Bob saw New York"}) == 4


def test_a_view_counts_for_words_that_have_a_token_of_their_own_in_it() -> None:
    rng = np.random.default_rng(0)

    def encoded(position_W: list[int]) -> EncodedTags:
        supervised = np.isin(np.arange(6), position_W)
        return EncodedTags(np.zeros(6, int), supervised, np.zeros(0, int), np.asarray(position_W))

    # Of the second reading word 1 shares the token of word 0; of the third word 2 is cut.
    readings = [encoded([1, 2, 4]), encoded([1, 1, 3]), encoded([1, 3, -1])]
    p = [rng.dirichlet(np.ones(3), size=count) for count in (3, 2, 2)]
    expected = [
        (p[0][0] + p[1][0] + p[2][0]) / 3,
        (p[0][1] + p[2][1]) / 2,
        (p[0][2] + p[1][1]) / 2,
    ]
    assert word_views.merged(readings, p) == pytest.approx(np.stack(expected))
