"""What an average step computes, by a few of its micro-batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from workbench.planning import work
from workbench.planning.work import StepWork, record, strata
from workbench.recipes.load import load
from workbench.recipes.plan import plan
from workbench.training.trainer import Trainer


def test_strata_hold_everything_once_and_about_as_much() -> None:
    weights = np.random.default_rng(0).uniform(1, 9, size=200)
    groups = strata(weights, 4)
    assert sorted(np.concatenate(groups).tolist()) == list(range(200))
    assert all(abs(weights[group].sum() / weights.sum() - 0.25) < 0.02 for group in groups)
    assert all(weights[low].max() <= weights[high].min() for low, high in pairwise(groups))
    assert len(strata(np.ones(1), 4)) == 1


def test_a_few_micro_batches_stand_for_all(monkeypatch: pytest.MonkeyPatch, stories: str) -> None:
    """The operations of an average step are known from four of its micro-batches as from every one."""
    works: list[StepWork] = []

    def recorded(fit: Trainer) -> StepWork:
        for count in (4, 1000):
            monkeypatch.setattr(work, "STRATA", count)
            works.append(record(fit))
        assert fit.model.training  # other kernels than in an evaluation
        return works[0]

    monkeypatch.setattr(work, "BLOCKS", 10**6)
    monkeypatch.setattr("workbench.recipes.plan.record", recorded)
    words = [f"model.id={stories}", "train.steps=8", "train.epochs=null", "data.limit=100", "batch.size=8"]
    plan(load("sft/quickstart", words))
    assert all(each.update and not each.recomputes for each in works)
    some, every = (
        sum(part.share * sum(kernel.flops for kernel in part.calls) for part in each.parts) for each in works
    )
    assert some == pytest.approx(every, rel=0.05)
