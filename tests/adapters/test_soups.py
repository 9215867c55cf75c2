"""Weights by score: the greedy soup of Wortsman et al. 2022, and a search that ends at the best weights it tried."""

from __future__ import annotations

import itertools

import pytest

from workbench.adapters.soups import Weights, greedy, mean, searched, uniform


class Recorder:
    """A judge that prefers weights near the wanted ones."""

    def __init__(self, *wanted: float) -> None:
        self.wanted = wanted
        self.scores: dict[Weights, float] = {}
        self.asked = 0

    def __call__(self, weights: Weights) -> float:
        self.asked += 1
        self.scores[weights] = -sum((one - two) ** 2 for one, two in zip(weights, self.wanted, strict=True))
        return self.scores[weights]


def test_a_mean_is_of_its_members() -> None:
    assert mean([0, 2], 4) == (0.5, 0, 0.5, 0) and uniform(Recorder(1, 0, 0, 0), 4) == (0.25,) * 4


@pytest.mark.parametrize("wanted", [(0.5, 0.5, 0.0), (0.0, 0.1, 0.9), (0.3, 0.3, 0.4), (0.45, 0.1, 0.4)])
def test_the_greedy_soup_is_that_of_the_paper(wanted: Weights) -> None:
    """Recipe 1, written out a second time: sort, add, keep where the score does not fall."""
    judge = Recorder(*wanted)
    singles = [judge(mean([number], 3)) for number in range(3)]
    soup: list[int] = []
    best = float("-inf")
    for _, number in sorted((-score, number) for number, score in enumerate(singles)):
        if judge(mean([*soup, number], 3)) >= best:
            soup.append(number)
            best = judge(mean(soup, 3))
    assert greedy(judge, 3) == mean(soup, 3)


def test_an_adapter_that_changes_nothing_stays() -> None:
    """The score does not fall."""
    assert greedy(lambda weights: 1.0, 3) == mean(range(3), 3)


@pytest.mark.parametrize("wanted", [(1.0, 0.0), (0.7, 0.5), (0.2, 0.3, 0.9)])
def test_a_search_keeps_the_best_it_tried_within_its_trials(wanted: Weights) -> None:
    for trials in (len(wanted) + 1, 12, 60):
        judge = Recorder(*wanted)
        found = searched(judge, len(wanted), seed=3, trials=trials)
        assert judge.asked == len(judge.scores) <= trials and min(found) >= 0
        assert judge.scores[found] == max(judge.scores.values())
        assert found == searched(Recorder(*wanted), len(wanted), seed=3, trials=trials)
    assert all(abs(one - two) < 0.1 for one, two in zip(found, wanted, strict=True))
    draws = [tuple(itertools.islice(_tried(seed), 5, 9)) for seed in (1, 2)]
    assert draws[0] != draws[1]


def _tried(seed: int) -> list[Weights]:
    judge = Recorder(0.2, 0.3, 0.9)
    searched(judge, 3, seed=seed, trials=20)
    return list(judge.scores)
