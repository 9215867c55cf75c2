"""The final answer of a text is read as a whole, and exactly."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.evaluation.rewards.final_answers import number_in, of_answer, of_reference


@pytest.mark.parametrize(
    ("text", "number"),
    {
        "Natalia sold 48/2 = 24 clips.\n#### 72": "72",
        "#### 1,234.50 in all, not 3": "1234.50",
        "It costs $18.": "18",
        "It costs $18 and then $20.": "20",
        "10-4": None,
        "12 + 30": None,
        "1e-05 and 1e+16": "1e16",
        "#### 2.5E-3": "0.0025",
        "room 3e8b": "3",
        "H2O": None,
        "x = -4": "-4",
        "the answer is \u22124.0": "-4.0",
        "1,23": None,
        "1,234,567": "1234567",
        "in 2020, 300 people": "300",
        "**72** km/h": "72",
        "9.8 m/s^2": "9.8",
        r"so \boxed{-\dfrac{7}{2}}, not 3": "-7/2",
        r"It is \(\frac14\) of it": "1/4",
        "5 million": None,
        "area 2π": None,
        "1/0": None,
        "9" * 5000: None,
        "#### none": None,
        "no number": None,
        "": None,
    }.items(),
)
def test_the_number_of_a_text(text: str, number: str | None) -> None:
    assert number_in(text) == (None if number is None else Fraction(number))


@settings(max_examples=25)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.text())
def test_a_number_is_found_behind_the_mark_whatever_stands_before(number: Fraction, before: str) -> None:
    assert number_in(f"{before} #### {number:,}") == Fraction(number)
    assert number_in(f"{before} #### {number}") == Fraction(number)


@pytest.mark.parametrize("piece", ["(100,200,", "(1 ", "1 ", "1^", "1/", "$a ", r"\(", r"\[", r"\frac{", "1'", "{"])
def test_long_texts_are_read_in_time(piece: str) -> None:
    before = time.process_time()
    of_answer(piece * 2000)
    of_reference(piece * 2000)
    assert time.process_time() - before < 2
