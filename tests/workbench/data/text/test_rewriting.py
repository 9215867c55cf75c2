"""Noise is a function of the text alone, and never leaves a row of words without one."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.rewriting import (
    MARKS,
    noise_rng,
    with_punctuation,
    with_typos,
    with_words_dropped,
    with_words_inserted,
    with_words_swapped,
    without_punctuation,
)

FIRST_DRAW = 2218794735863269303
texts = st.text(st.sampled_from("abcXYZ 09.,!?'-\n\u00e9\u4e2d\U0001f600"), max_size=60)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello, world!", "Hello world"),
        ("don't pay 3.5 $ (please) \u2014 ok?", "don't pay 3.5 $ please ok"),
        ("two  spaces stay", "two  spaces stay"),
        ("\u00bfqu\u00e9? \u300c\u4e2d\u300d", "qu\u00e9 \u4e2d"),
        ("?!...", ""),
    ],
)
def test_without_punctuation(text: str, wanted: str) -> None:
    assert without_punctuation(text) == wanted == without_punctuation(wanted)


@given(texts, st.floats(0.01, 0.99), st.integers(0, 9))
def test_dropped_words_are_as_many_as_asked_for_and_the_others_stay_in_order(
    text: str, share: float, seed: int
) -> None:
    words = text.split()
    left = with_words_dropped(text, np.random.default_rng(seed), share=share).split()
    count = len(words) - min(max(1, round(share * len(words))), len(words) - 1) if len(words) > 1 else len(words)
    rest = iter(words)
    assert len(left) == count and all(word in rest for word in left)


@given(texts, st.floats(0.01, 0.99), st.integers(0, 9))
def test_words_that_change_places_are_the_same_ones_with_the_same_spaces(text: str, share: float, seed: int) -> None:
    words, found = text.split(), with_words_swapped(text, np.random.default_rng(seed), share=share)
    assert sorted(found.split()) == sorted(words) and re.findall(r"\s+", found) == re.findall(r"\s+", text)
    if max(1, round(share * len(words))) == 1 and len(words) > 1:
        moved = [(before, after) for before, after in zip(words, found.split(), strict=True) if before != after]
        assert len(moved) in (0, 2), "one exchange, which two equal words do not show"
    assert len(words) > 1 or found == text


@given(texts, st.floats(0.01, 0.99), st.integers(0, 9))
def test_what_is_put_in_is_as_much_as_asked_for_and_leaves_the_rest(text: str, share: float, seed: int) -> None:
    words = text.split()
    for change, known in ((with_words_inserted, words), (with_punctuation, list(MARKS))):
        found = change(text, np.random.default_rng(seed), share=share).split()
        assert len(found) - len(words) == (max(1, round(share * len(words))) if len(words) > 1 else 0)
        left = list(found)
        for word in words:
            left.remove(word)
        assert set(left) <= set(known)
        rest = iter(found)
        assert all(word in rest for word in words), "in their order"


@given(texts, st.floats(0.01, 0.99), st.integers(0, 9))
def test_typos_touch_letters_and_digits_only(text: str, share: float, seed: int) -> None:
    found = with_typos(text, np.random.default_rng(seed), share=share)
    assert [each for each in found if not each.isalnum()] == [each for each in text if not each.isalnum()]
    assert set(found) <= set(text)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1])
def test_typos_are_as_many_as_asked_for_and_of_all_kinds(share: float) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(1000))
    out = doubled = exchanged = 0
    for seed in range(12):
        found = with_typos(text, np.random.default_rng(seed), share=share)
        times = Counter(found)
        out += sum(times[letter] == 0 for letter in text)
        doubled += sum(times[letter] == 2 for letter in text)
        exchanged += sum(left > right for left, right in pairwise(found))
    # A letter that is exchanged twice, or first exchanged and then left out, leaves fewer traces.
    assert 0.9 * share * 12_000 <= out + doubled + exchanged <= share * 12_000 + 1e-9
    assert min(out, doubled, exchanged) > 0.1 * share * 12_000


def test_chance_is_of_the_row_its_copy_and_the_seed() -> None:
    row = ("a", "b")
    keys = [
        (0, "typos", 1, row),
        (1, "typos", 1, row),
        (0, "typos", 2, row),
        (0, "drop_words", 1, row),
        (0, "typos", 1, ("ab", "")),
        (0, "typos", 1, ("a", "c")),
    ]
    draws = [int(noise_rng(*key).integers(2**62)) for key in keys]
    assert len(set(draws)) == len(draws)
    assert draws == [int(noise_rng(*key).integers(2**62)) for key in keys]
    assert noise_rng(0, "typos", 1, row).integers(2**62) == FIRST_DRAW, "the same in every process and on every machine"
