"""Two tables of predictions in pairs: rows found by what they are, and the tests written a second time."""

from __future__ import annotations

from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation import comparison

VERDICT = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9)
PAIRS = [(Answer("Why?", "So.", row={"n": n}), Answer("Why?", "No.", row={"n": n})) for n in range(3)]


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
    found = comparison.compare(answers(first), answers(second))
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
    found, _ = comparison.compare(classes(first, labels), classes(second, labels))
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    few, count = min(gained, lost), gained + lost
    tail = sum(comb(count, k) for k in range(few + 1)) / 2**count
    assert found.name == "accuracy" and found.p == pytest.approx(min(1.0, 2 * tail))
    assert found.difference == pytest.approx((gained - lost) / len(pairs))


def test_rows_are_found_by_what_they_are_in_any_order() -> None:
    first, second = answers([0.1, 0.2, 0.3, 0.4]), answers([0.4, 0.9, 0.2], rows=[3, 7, 1])
    (found, _) = comparison.compare(first, second)
    assert found.rows == 2 and found.difference == 0 and found.interval is None and found.p is None
    changed = second.assign(prompt="Another question?")
    assert comparison.compare(first, changed) == []
    twice = pd.concat([first, first])
    assert comparison.compare(first, twice) == [], "of rows that stand there twice nobody knows which is which"


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
    found = {each.name: each for each in comparison.compare(table, other)}[name]
    assert (found.first, found.second) == pytest.approx((first, second))


def test_tags_are_compared_word_by_word() -> None:
    first = pd.DataFrame({"row": [0, 1], "text": ["a b", "c d e"], "words": [["a", "b"], ["c", "d", "e"]]})
    first = first.assign(label=["O B-X", "O O O"], predicted=["O O", "O O O"], **{"p_O": [[1, 0.9], [1, 1, 1]]})
    (found,) = comparison.compare(first, first.assign(predicted=["O B-X", "O O B-X"]))
    assert found.name == "word_accuracy" and (found.first, found.second) == pytest.approx((0.75, 5 / 6))


def test_classes_of_a_row_may_stand_in_any_order_and_other_tables_say_nothing() -> None:
    several = pd.DataFrame({"row": [0, 1], "label": [["a", "b"], ["a"]], "predicted": [["b", "a"], ["b"]]})
    several = several.assign(p_a=[0.9, 0.1], p_b=[0.8, 0.9])
    turned = several.assign(label=[["b", "a"], ["a"]], predicted=[["a"], ["a"]])
    (found,) = comparison.compare(several, turned)
    assert (found.first, found.second, found.rows) == (0.5, 0.5, 2)
    assert comparison.compare(pd.DataFrame(), several) == []
    assert comparison.compare(pd.DataFrame({"row": [0, 1], "thing": [1, 2]}), several) == []


@given(VERDICT)
def test_swapping_the_runs_turns_a_win_rate_round(verdicts: list[tuple[int, int]]) -> None:
    own, other = zip(*verdicts, strict=True)
    np.testing.assert_allclose(comparison.wins_by_verdict(own, other) + comparison.wins_by_verdict(other, own), 1)
    rewards = comparison.wins_by_reward(own, other)
    np.testing.assert_allclose(rewards + comparison.wins_by_reward(other, own), 1)


def test_a_judge_that_looks_at_places_wins_nothing_and_shows() -> None:
    assert comparison.wins_by_verdict([1, 2, 0], [1, 2, 0]).tolist() == [0.5, 0.5, 0.5]
    assert comparison.order_agreement([1, 2], [1, 2]) == 0
    assert comparison.wins_by_verdict([1, 2, 0, 1], [2, 1, 0, 0]).tolist() == [1, 0, 0.5, 0.75]
    assert comparison.order_agreement([1, 2, 0, 1], [2, 1, 0, 0]) == 0.75


def test_a_win_rate_has_its_interval_and_what_length_explains() -> None:
    found = comparison.win_rate_scores(
        np.asarray([1.0, 1.0, 0.5, 0.0]), ["a a", "b b", "c", "d"], ["a", "b", "c", "d d"]
    )
    assert found["win_rate"] == 0.625 and found["ties"] == 0.25 and found["longer"] == 1
    assert found["win_rate_low"] < 0.625 < found["win_rate_high"]
    assert (found["words"], found["words_other"]) == (1.5, 1.25)


def test_turns_of_a_question_are_resampled_together() -> None:
    """The bootstrap over questions written out, with scipy's."""
    win_TQ = np.random.default_rng(1).choice([0, 0.5, 1], (2, 40))
    win_TQ[1] = win_TQ[0]  # a second turn that goes as the first adds no knowledge
    found = comparison.win_rate_scores(win_TQ.flatten(), ["a"] * 80, ["b"] * 80, turns=2)
    wanted = stats.bootstrap((win_TQ.mean(0),), np.mean, method="percentile", random_state=0).confidence_interval
    for name in ("win_rate", "win_rate_turn_1", "win_rate_turn_2"):
        assert found[name] == pytest.approx(win_TQ.mean(), abs=1e-4)
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx(tuple(wanted), abs=0.01)


def test_the_interval_of_wins_and_losses_is_wilsons() -> None:
    found = comparison.win_rate_interval(np.asarray([1.0] * 7 + [0.0] * 3))
    wanted = stats.binomtest(7, 10).proportion_ci(method="wilson")
    assert found == pytest.approx((wanted.low, wanted.high), rel=1e-9)


def test_half_wins_are_counted_as_halves() -> None:
    """By Student's interval of their mean, which more ties make narrower; not rounded to a win or a loss."""
    win_S = np.asarray([1.0] * 5 + [0.5] * 9 + [0.0] * 2)
    wanted = stats.t.interval(0.95, len(win_S) - 1, loc=win_S.mean(), scale=stats.sem(win_S))
    low, high = comparison.win_rate_interval(win_S)
    assert (low, high) == pytest.approx(wanted, rel=1e-9)
    assert low + high == pytest.approx(2 * win_S.mean()), "around the mean, however many halves there are"
    decided = comparison.win_rate_interval(np.asarray([1.0] * 9 + [0.0] * 6))
    assert high - low < decided[1] - decided[0]


@pytest.mark.parametrize("win_S", [[0.5], [0.5] * 5, [1.0, 0.5], [0.0, 0.5, 0.0], [1.0], [0.25, 0.75]])
def test_an_interval_holds_its_mean_and_stays_within_a_share(win_S: list[float]) -> None:
    low, high = comparison.win_rate_interval(np.asarray(win_S))
    assert 0 <= low <= sum(win_S) / len(win_S) <= high <= 1 and low < high


def test_a_program_judges_lines() -> None:
    assert comparison.judge_verdicts("sed s/.*/1/", PAIRS, timeout=9) == [1, 1, 1]
    assert comparison.judge_verdicts(r"sed -E 's/.*\"n\": (.).*/\1/'", PAIRS, timeout=9) == [0, 1, 2]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program", "cannot be started"),
        ("", "cannot be started"),
        ("'", "cannot be started"),
        ("sed -n 1p", "wrote 1 lines for 3 pairs"),
        ("sed s/.*/first/", "wrote 'first' in line 1"),
        ("sh -c 'echo no model >&2; exit 4'", "ended with status 4: no model"),
        ("sleep 60", "took more than 0.2 s"),
    ],
)
def test_a_judge_that_fails_is_named(command: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        comparison.judge_verdicts(command, PAIRS, timeout=0.2 if "sleep" in command else 30)
    assert message in str(error.value) and "--judge" in str(error.value)
