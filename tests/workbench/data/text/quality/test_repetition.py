"""Measures of repetition equal their definitions, written out a second time character by character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.quality import repetition
from workbench.data.text.quality.row_texts import RowText

WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=40)


def _share(words: list[str], starts: list[int], n: int) -> float:
    """Share of characters that lie in the n-grams at `starts`, each character counted once."""
    letters = [(at, letter) for at, word in enumerate(words) for letter in range(len(word))]
    return sum(any(start <= at < start + n for start in starts) for at, _ in letters) / len(letters)


@given(WORDS, st.integers(2, 6))
def test_duplicate_grams_are_those_that_came_before(words: list[str], n: int) -> None:
    grams = [words[at : at + n] for at in range(len(words) - n + 1)]
    again = [at for at, gram in enumerate(grams) if gram in grams[:at]]
    found = repetition.duplicate_grams(RowText("", " ".join(words)), n=n)
    assert found == pytest.approx(_share(words, again, n))


@given(WORDS, st.integers(2, 4))
def test_the_top_gram_is_the_most_frequent_one(words: list[str], n: int) -> None:
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    most = max(map(grams.count, grams), default=0)
    shares = {
        _share(words, [at for at, gram in enumerate(grams) if gram == top], n)
        for top in grams
        if grams.count(top) == most
    }
    found = repetition.top_gram(RowText("", " ".join(words)), n=n)
    assert found is not None and 0 <= found <= 1
    assert found == 0 if most < 2 else any(found == pytest.approx(share) for share in shares)


@given(WORDS)
def test_a_long_sequence_repeats_only_where_shorter_ones_do(words: list[str]) -> None:
    row = RowText("", " ".join(words))
    shares = [repetition.duplicate_grams(row, n=n) for n in (5, 6, 7, 8)]
    assert all(shorter or not longer for shorter, longer in pairwise(shares))


@given(st.lists(st.text("xyz", min_size=1, max_size=4), min_size=1, max_size=12))
def test_lines_and_paragraphs_count_from_their_second_time(parts: list[str]) -> None:
    again = [part for at, part in enumerate(parts) if part in parts[:at]]
    characters = sum(map(len, again)) / sum(map(len, parts))
    lines, paragraphs = RowText("", "\n".join(parts)), RowText("", "\n\n".join(parts))
    assert repetition.duplicate_lines(lines) == pytest.approx(len(again) / len(parts))
    assert repetition.duplicate_paragraphs(paragraphs) == pytest.approx(len(again) / len(parts))
    assert repetition.duplicate_line_characters(lines) == pytest.approx(characters)
    assert repetition.duplicate_paragraph_characters(paragraphs) == pytest.approx(characters)


def test_texts_without_spaces_between_words_are_not_measured() -> None:
    assert repetition.top_gram(RowText("", "床前明月光"), n=2) is None
    assert repetition.duplicate_grams(RowText("", ""), n=5) is None
