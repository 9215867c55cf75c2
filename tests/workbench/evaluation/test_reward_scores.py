"""Scores of rated steps, counted a second time answer by answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy import special

from workbench.data.text.stepwise import StepSet
from workbench.evaluation import metrics, reward_scores

LABELS = [[1.0, 1.0], [1.0, 0.0, 1.0], [0.0], [0.9], [1.0, 0.2, 0.0], [1.0, 1.0, 1.0]]
P = [[0.9, 0.8], [0.7, 0.1, 0.9], [0.6], [0.3], [0.4, 0.1, 0.2], [0.9, 0.6, 0.51]]


class ListedSteps(StepSet):
    """Steps with labels that are given."""

    def __init__(self, labels: list[list[float]]) -> None:
        counts = np.asarray([len(each) for each in labels])
        super().__init__(cast(Any, SimpleNamespace(supervised=counts, sources={})))
        object.__setattr__(self, "labels", np.concatenate([np.asarray(each) for each in labels]))

    def __len__(self) -> int:
        return len(self.steps)


def test_scores_equal_a_count_answer_by_answer() -> None:
    found = reward_scores.step_scores(
        ListedSteps(LABELS), special.logit(np.concatenate([np.asarray(each) for each in P]))
    )
    pairs = [(p, y) for ps, ys in zip(P, LABELS, strict=True) for p, y in zip(ps, ys, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean([(p >= 0.5) == (y >= 0.5) for p, y in pairs]), abs=1e-6)
    losses = [-y * np.log(p) - (1 - y) * np.log(1 - p) for p, y in pairs]
    assert found["loss"] == pytest.approx(np.mean(losses), abs=1e-6)

    def first(steps: list[float]) -> int | None:
        return next((number for number, step in enumerate(steps) if step < 0.5), None)

    wrong = [(first(p), first(y)) for p, y in zip(P, LABELS, strict=True) if first(y) is not None]
    right = [first(p) is None for p, y in zip(P, LABELS, strict=True) if first(y) is None]
    errors, passed = float(np.mean([p == y for p, y in wrong])), float(np.mean(right))
    assert found["error_found"] == pytest.approx(errors, abs=1e-6) and found["all_right"] == pytest.approx(
        passed, abs=1e-6
    )
    assert found["f1"] == pytest.approx(2 * errors * passed / (errors + passed), abs=1e-6)
    lowest = [(min(p), first(y) is None) for p, y in zip(P, LABELS, strict=True)]
    wins = [(a > b) + (a == b) / 2 for a, good in lowest if good for b, bad in lowest if not bad]
    assert found["auc_min"] == pytest.approx(np.mean(wins), abs=1e-6)
    rows, p_S = ListedSteps(LABELS), np.concatenate([np.asarray(each) for each in P])
    for how, combine in {"min": min, "product": np.prod, "mean": np.mean, "last": lambda p: p[-1]}.items():
        expected = [combine(each) for each in P]
        np.testing.assert_allclose(reward_scores.aggregated(rows, p_S, how), expected)  # type: ignore[arg-type]


def test_answers_without_an_error_have_no_score_of_errors() -> None:
    found = reward_scores.step_scores(ListedSteps([[1.0, 1.0], [1.0]]), np.asarray([2.0, 1.0, -1.0]))
    assert "error_found" not in found and "f1" not in found and found["all_right"] == 0.5


def test_steps_that_are_alike_widen_the_interval() -> None:
    rows, alike = np.repeat(np.arange(40), 5), np.repeat(np.arange(40) % 4 > 0, 5)
    mixed = np.arange(200) % 4 > 0
    independent = metrics.accuracy_interval(150, 200)
    assert reward_scores.clustered_interval(mixed, rows) == independent
    wide = reward_scores.clustered_interval(alike, rows)
    few = metrics.accuracy_interval(30, 40)
    assert wide.mean == 0.75 and wide.low == pytest.approx(few.low, abs=0.01) and wide.low < independent.low
    assert reward_scores.clustered_interval(np.ones(8, dtype=bool), np.arange(8) // 2).high == 1
