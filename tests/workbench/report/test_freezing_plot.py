"""The panel of layers shows what the policy says of each step, and no two labels in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.config.freeze_policies import FreezeOut, Gradual, Lisa, Static
from workbench.report import learning_rate_plots
from workbench.report.plots import palette

POLICIES = [Static(), Gradual(), FreezeOut(scaled=True), Lisa(active=1, every=3)]


def panel(policy: FreezeConfig, *, steps: int, blocks: int) -> tuple[np.ndarray[Any, Any], Any]:
    found = learning_rate_plots.freezing(policy, steps=steps, blocks=blocks, seed=5)
    axes = Figure().add_subplot()
    learning_rate_plots.draw_freezing(axes, found, steps=steps, colours=palette())
    return found, axes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.policy)
def test_each_cell_is_the_plan_of_its_step(policy: FreezeConfig) -> None:
    found, axes = panel(policy, steps=24, blocks=4)
    shown, grey = np.asarray(axes.images[0].get_array()), to_rgb(palette()["grid"])
    assert found.shape == (6, 24) == shown.shape[:2]
    for step in range(24):
        plan = policy.plan(Moment(step, step / 24, 5), blocks=4)
        for layer, (trains, rate) in enumerate(zip(*plan, strict=True)):
            assert trains == (not np.isnan(found[layer, step])) == (tuple(shown[layer, step]) != grey)
            assert not trains or found[layer, step] == rate
    assert learning_rate_plots.frozen_share(found) == np.isnan(found).sum() / (6 * 24)


def test_the_deeper_the_shade_the_higher_the_rate() -> None:
    found, axes = panel(FreezeOut(first=0.6, scaled=True), steps=50, blocks=5)
    trains = ~np.isnan(found)
    order = np.argsort(found[trains])
    light = np.asarray(axes.images[0].get_array()).sum(-1)[trains][order]
    assert np.all(np.diff(light) <= 1e-12) and light[0] - light[-1] > 0.5
    key = [text.get_text() for text in axes.get_legend().get_texts()]
    assert key == [f"rate times {np.nanmax(found):.3g}", "near 0", "frozen"]


def test_a_long_run_is_drawn_from_its_first_to_its_last_step() -> None:
    found = learning_rate_plots.freezing(
        Gradual(until=1.0), steps=10 * learning_rate_plots.FREEZE_COLUMNS, blocks=4, seed=0
    )
    assert found.shape == (6, learning_rate_plots.FREEZE_COLUMNS)
    assert np.isnan(found[:4, 0]).all() and not np.isnan(found[1:, -1]).any()
    assert learning_rate_plots.frozen_share(found) == pytest.approx((1 / 4 + 2 / 4 + 3 / 4 + 1) / 6, abs=1e-3)


@pytest.mark.parametrize("blocks", [1, 2, 8, 9, 12, 13, 24, 80])
def test_labels_are_few_and_apart(blocks: int) -> None:
    _, axes = panel(Static(), steps=3, blocks=blocks)
    places = axes.get_yticks().tolist()
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0] == "embeddings" and names[-1] == "head" and (places[0], places[-1]) == (0, blocks + 1)
    assert (
        names[1:-1] == [f"block {place:.0f}" for place in places[1:-1]]
        and 1 <= len(names) - 2 <= learning_rate_plots.FREEZE_LABELS
    )
    assert min(np.diff(places)) >= (blocks + 2) / (learning_rate_plots.FREEZE_LABELS + 2) * 0.8
