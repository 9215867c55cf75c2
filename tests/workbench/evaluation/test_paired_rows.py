"""Two tables of predictions in pairs: rows found by what they are, and the tests written a second time."""

from __future__ import annotations

from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.evaluation import paired_rows


def answers(f1: list[float], *, rows: list[int] | None = None) -> pd.DataFrame:
    """A table of answers to prompts."""
    places = rows or [*range(len(f1))]
    return pd.DataFrame(
        {
            "row": [f"rows.jsonl, row {number}" for number in places],
            "prompt": [f"What is {number}?" for number in places],
            "reference": [str(number) for number in places],
            "after": "an answer",
            "f1_after": f1,
            "rouge_l_after": f1,
        }
    )


def classes(predicted: str, labels: str) -> pd.DataFrame:
    """A table of the classes a and b."""
    frame = pd.DataFrame({"row": range(len(labels)), "text": [*labels], "label": [*labels], "predicted": [*predicted]})
    return frame.assign(**{f"p_{name}": [float(each == name) for each in predicted] for name in "ab"})


def test_students_interval_and_p_are_those_of_the_textbook() -> None:
    first, second = [0.1, 0.4, 0.3, 0.9, 0.2], [0.3, 0.5, 0.2, 1.0, 0.6]
    found = paired_rows.compare(answers(first), answers(second))
    assert [each.name for each in found] == ["f1", "rouge_l"] and found[0].rows == 5
    difference = np.subtract(second, first)
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(5)
    critical = 2.7764451052  # of Student's t with 4 degrees of freedom, as tables print it
    assert found[0].difference == pytest.approx(mean)
    assert found[0].interval == pytest.approx((mean - critical * error, mean + critical * error))
    assert found[0].p is not None and 0.05 < found[0].p < 0.2  # |t| = 1.75 with 4: 0.154


@given(
    pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40).filter(
        lambda pairs: len({a - b for a, b in pairs}) > 1
    )
)
def test_p_of_right_and_wrong_is_the_exact_one_of_mcnemar(pairs: list[tuple[bool, bool]]) -> None:
    labels = "a" * len(pairs)
    first, second = ("".join("a" if pair[side] else "b" for pair in pairs) for side in (0, 1))
    (found,) = paired_rows.compare(classes(first, labels), classes(second, labels))
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    few, count = min(gained, lost), gained + lost
    tail = sum(comb(count, k) for k in range(few + 1)) / 2**count
    assert found.name == "accuracy" and found.p == pytest.approx(min(1.0, 2 * tail))
    assert found.difference == pytest.approx((gained - lost) / len(pairs))


def test_rows_are_found_by_what_they_are_in_any_order() -> None:
    first, second = answers([0.1, 0.2, 0.3, 0.4]), answers([0.4, 0.9, 0.2], rows=[3, 7, 1])
    (found, _) = paired_rows.compare(first, second)
    assert found.rows == 2 and found.difference == 0 and found.interval is None and found.p is None
    changed = second.assign(prompt="Another question?")
    assert paired_rows.compare(first, changed) == []
    twice = pd.concat([first, first])
    assert paired_rows.compare(first, twice) == [], "of rows that stand there twice nobody knows which is which"


@pytest.mark.parametrize(
    ("columns", "name", "first", "second"),
    [
        ({"margin": [1.0, -2.0, 3.0]}, "accuracy", 2 / 3, 1.0),
        ({"reward_after": [1.0, -2.0, 3.0]}, "reward", 2 / 3, 5 / 3),
        ({"right": [True, False, True]}, "accuracy", 2 / 3, 1.0),
        ({"label": [1.0, 2.0, 3.0], "predicted": [1.5, 2.0, 2.0]}, "absolute_error", 0.5, 1.0),
    ],
)
def test_each_recipe_has_its_score(columns: dict[str, list[float]], name: str, first: float, second: float) -> None:
    table = pd.DataFrame({"row": [0, 1, 2], "text": ["a", "b", "c"], **columns})
    more = {
        "margin": [1.0, 2.0, 3.0],
        "reward_after": [2.0, -1.0, 4.0],
        "right": [True] * 3,
        "predicted": [0.0, 2.0, 1.0],
    }
    other = table.assign(**{key: value for key, value in more.items() if key in table})
    found = {each.name: each for each in paired_rows.compare(table, other)}[name]
    assert (found.first, found.second) == pytest.approx((first, second))


def test_classes_of_a_row_may_stand_in_any_order_and_other_tables_say_nothing() -> None:
    several = pd.DataFrame({"row": [0, 1], "label": [["a", "b"], ["a"]], "predicted": [["b", "a"], ["b"]]})
    several = several.assign(p_a=[0.9, 0.1], p_b=[0.8, 0.9])
    turned = several.assign(label=[["b", "a"], ["a"]], predicted=[["a"], ["a"]])
    (found,) = paired_rows.compare(several, turned)
    assert (found.first, found.second, found.rows) == (0.5, 0.5, 2)
    assert paired_rows.compare(pd.DataFrame(), several) == []
    assert paired_rows.compare(pd.DataFrame({"row": [0, 1], "thing": [1, 2]}), several) == []
