"""Weights of a sum of adapters by what the sum scores: model soups (Wortsman et al. 2022, arXiv:2203.05482), a search.

Each function asks a judge, which scores the sum of so many adapters under a tuple of weights; higher is better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

Weights = tuple[float, ...]
Judge = Callable[[Weights], float]
Chooser = Callable[..., Weights]
SMALLEST_STEP = 1 / 32
"""Step of a weight at which a search ends."""


def mean(members: Collection[int], count: int) -> Weights:
    """Equal weights of some of `count` adapters, which sum to 1; the others have none."""
    return tuple(1 / len(members) if number in members else 0.0 for number in range(count))


def uniform(judge: Judge, count: int, *, seed: int = 0, trials: int = 0) -> Weights:
    """Equal weights, whatever they score; each adapter alone is scored beside them."""
    for number in range(count):
        judge(mean([number], count))
    judge(mean(range(count), count))
    return mean(range(count), count)


def greedy(judge: Judge, count: int, *, seed: int = 0, trials: int = 0) -> Weights:
    """Equal weights of the best adapter and of each next best with which the mean scores no less (recipe 1 there)."""
    alone = [judge(mean([number], count)) for number in range(count)]
    first, *others = sorted(range(count), key=lambda number: -alone[number])
    kept, best = [first], alone[first]
    for number in others:
        if (score := judge(mean([*kept, number], count))) >= best:
            kept, best = [*kept, number], score
    return mean(kept, count)


def searched(judge: Judge, count: int, *, seed: int = 0, trials: int = 32) -> Weights:
    """The weights that scored best: of each adapter alone, the mean, Dirichlet draws, and steps from the best of them.

    Draws sum to 1 and take half of the trials. Steps change one weight at a time by 1/4, and by half of that once none
    helps, never below 0; what they reach need not sum to 1.

    Args:
        seed: Of the draws.
        trials: Most weights that are scored, at least `count` + 1.
    """
    assert trials > count
    scores: dict[Weights, float] = {}

    def tried(weights: Weights) -> float:
        if weights not in scores:
            scores[weights] = judge(weights)
        return scores[weights]

    for weights in (*(mean([number], count) for number in range(count)), mean(range(count), count)):
        tried(weights)
    draws = np.random.default_rng(seed).dirichlet([1.0] * count, size=max(0, trials // 2 - len(scores)))
    for draw in draws.round(3).tolist():
        tried(tuple(draw))
    best, step = max(scores, key=lambda weights: scores[weights]), 0.25
    while step >= SMALLEST_STEP:
        before = best
        for number in range(count):
            for change in (step, -step):
                moved = round(max(0.0, best[number] + change), 6)
                weights = (*best[:number], moved, *best[number + 1 :])
                if weights not in scores and len(scores) >= trials:
                    return best
                if any(weights) and tried(weights) > scores[best]:
                    best = weights
        step = step / 2 if best == before else step
    return best


BY_SCORE = {"soup": uniform, "greedy-soup": greedy}
"""Sums whose weights nobody writes."""
SEARCH = "search"
"""In place of the weights of a sum: search them."""
