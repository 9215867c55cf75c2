"""Win rates: swapping runs turns them round, a judge of places wins nothing, and what a judge does wrong is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation import judge_command, win_rates

VERDICT = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9)
PAIRS = [(Answer("Why?", "So.", row={"n": n}), Answer("Why?", "No.", row={"n": n})) for n in range(3)]


@given(VERDICT)
def test_swapping_the_runs_turns_a_win_rate_round(verdicts: list[tuple[int, int]]) -> None:
    own, other = zip(*verdicts, strict=True)
    np.testing.assert_allclose(win_rates.of_verdicts(own, other) + win_rates.of_verdicts(other, own), 1)
    rewards = win_rates.of_rewards(own, other)
    np.testing.assert_allclose(rewards + win_rates.of_rewards(other, own), 1)


def test_a_judge_that_looks_at_places_wins_nothing_and_shows() -> None:
    assert win_rates.of_verdicts([1, 2, 0], [1, 2, 0]).tolist() == [0.5, 0.5, 0.5]
    assert win_rates.order_agreement([1, 2], [1, 2]) == 0
    assert win_rates.of_verdicts([1, 2, 0, 1], [2, 1, 0, 0]).tolist() == [1, 0, 0.5, 0.75]
    assert win_rates.order_agreement([1, 2, 0, 1], [2, 1, 0, 0]) == 0.75


def test_a_win_rate_has_its_interval_and_what_length_explains() -> None:
    found = win_rates.summary(np.asarray([1.0, 1.0, 0.5, 0.0]), ["a a", "b b", "c", "d"], ["a", "b", "c", "d d"])
    assert found["win_rate"] == 0.625 and found["ties"] == 0.25 and found["longer"] == 1
    assert found["win_rate_low"] < 0.625 < found["win_rate_high"]
    assert (found["words"], found["words_other"]) == (1.5, 1.25)


def test_the_interval_of_wins_and_losses_is_wilsons() -> None:
    found = win_rates.interval(np.asarray([1.0] * 7 + [0.0] * 3))
    wanted = stats.binomtest(7, 10).proportion_ci(method="wilson")
    assert found == pytest.approx((wanted.low, wanted.high), rel=1e-9)


def test_half_wins_are_counted_as_halves() -> None:
    """By Student's interval of their mean, which more ties make narrower; not rounded to a win or a loss."""
    win_S = np.asarray([1.0] * 5 + [0.5] * 9 + [0.0] * 2)
    wanted = stats.t.interval(0.95, len(win_S) - 1, loc=win_S.mean(), scale=stats.sem(win_S))
    low, high = win_rates.interval(win_S)
    assert (low, high) == pytest.approx(wanted, rel=1e-9)
    assert low + high == pytest.approx(2 * win_S.mean()), "around the mean, however many halves there are"
    decided = win_rates.interval(np.asarray([1.0] * 9 + [0.0] * 6))
    assert high - low < decided[1] - decided[0]


@pytest.mark.parametrize("win_S", [[0.5], [0.5] * 5, [1.0, 0.5], [0.0, 0.5, 0.0], [1.0], [0.25, 0.75]])
def test_an_interval_holds_its_mean_and_stays_within_a_share(win_S: list[float]) -> None:
    low, high = win_rates.interval(np.asarray(win_S))
    assert 0 <= low <= sum(win_S) / len(win_S) <= high <= 1 and low < high


def test_a_program_judges_lines() -> None:
    assert judge_command.verdicts("sed s/.*/1/", PAIRS, timeout=9) == [1, 1, 1]
    assert judge_command.verdicts(r"sed -E 's/.*\"n\": (.).*/\1/'", PAIRS, timeout=9) == [0, 1, 2]


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
        judge_command.verdicts(command, PAIRS, timeout=0.2 if "sleep" in command else 30)
    assert message in str(error.value) and "--judge" in str(error.value)
