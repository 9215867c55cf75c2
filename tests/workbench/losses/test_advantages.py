"""Advantages equal their formulas, written out for each answer."""

from __future__ import annotations

import statistics

import pytest
import torch

from workbench.losses import advantages

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [-2.0, 3.0, 0.25, 1.0]]
REWARD = torch.tensor(REWARDS, dtype=torch.float64)


def test_of_group_and_leave_one_out_equal_their_formulas() -> None:
    plain, scaled = (advantages.of_group(REWARD, scaled=each).tolist() for each in (False, True))
    alone = advantages.leave_one_out(REWARD).tolist()
    for row, rewards in enumerate(REWARDS):
        mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
        for at, reward in enumerate(rewards):
            assert plain[row][at] == pytest.approx(reward - mean, abs=1e-12)
            assert scaled[row][at] == pytest.approx((reward - mean) / (spread + 1e-4), abs=1e-12)
            others = [*rewards[:at], *rewards[at + 1 :]]
            assert alone[row][at] == pytest.approx(reward - statistics.mean(others), abs=1e-12)


def test_a_group_without_a_difference_teaches_nothing() -> None:
    assert advantages.same(REWARD).tolist() == [False, True, False]
    for found in (advantages.of_group(REWARD, scaled=True), advantages.leave_one_out(REWARD)):
        assert found[1].abs().max() == 0


def test_whitened_over_all_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    value = torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]], dtype=torch.float64)
    mean, spread = 7 / 3, statistics.pstdev([1.0, 2.0, 4.0])
    wanted = [[(1 - mean) / (spread + 1e-4), (2 - mean) / (spread + 1e-4), 0], [(4 - mean) / (spread + 1e-4), 0, 0]]
    torch.testing.assert_close(advantages.whitened(value, mask), torch.tensor(wanted, dtype=torch.float64))
    assert advantages.whitened(torch.full((1, 3), 2.0), torch.ones(1, 3, dtype=torch.bool)).abs().max() == 0


def test_to_come_adds_what_follows() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = advantages.to_come(torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 99.0]]), mask)
    assert found.tolist() == [[7.0, 6.0, 4.0], [3.0, 2.0, 0.0]]


def test_long_answers_are_punished_in_a_straight_line() -> None:
    tokens = torch.tensor([0, 60, 80, 90, 100])
    assert advantages.overlong(tokens, limit=100, buffer=20).tolist() == [0, 0, 0, -0.5, -1]
