"""Stages that are judged on the same rows share one error rate: by simulation, and Holm's thresholds written out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.crossval import gains
from workbench.crossval.stages import Predictions, StageLog
from workbench.data.labelled.labels import Labels
from workbench.training.callbacks import Silent

LABELS = Labels("one", ("a", "b", "c"))
GATES = 6


def _log(targets_NC: Any, gates: int = GATES) -> StageLog:
    run: Any = SimpleNamespace(note=lambda **facts: None, manifest={}, home=Path("runs/one"))
    rows = SimpleNamespace(targets_NC=targets_NC)
    data: Any = SimpleNamespace(labels=LABELS, rows=rows, cluster_N=np.arange(len(targets_NC)), test=None)
    return StageLog(run, data, Silent(), gates)


def _kept(seed: int, *, first: float = 0.5) -> int:
    """Stages that stay of `GATES` models, each 0.5 from the truth; the first model is `first` away."""
    chance = np.random.default_rng(seed)
    true = chance.normal(size=(150, 3))
    drawn = (chance.random((150, 1)) > LABELS.values(2 * true).cumsum(1)[:, :-1]).sum(1)
    log = _log(np.eye(3, dtype=np.float32)[drawn])

    def model(noise: float) -> Predictions:
        return Predictions(LABELS.values(true + noise * chance.normal(size=true.shape)), None)

    log.begin("supervised", "Supervised", model(first))
    return sum(log.offer(f"{gate}", "Stage", model(0.5), {}) for gate in range(GATES))


@pytest.mark.slow
def test_runs_in_which_no_stage_helps_rarely_keep_one() -> None:
    """Uncorrected, 6 stages at 2.5 % each would be kept in 10 of 100 runs and more."""
    assert np.mean([_kept(seed) > 0 for seed in range(300)]) <= 0.05


def test_a_real_gain_is_still_kept() -> None:
    assert np.mean([_kept(seed, first=1.5) > 0 for seed in range(30)]) >= 0.9


def test_what_a_stage_costs_later_is_told() -> None:
    log, told = _log(np.eye(3, dtype=np.float32)), list[str]()
    log.callback = SimpleNamespace(say=told.append)  # type: ignore[assignment]
    values = Predictions(LABELS.values(np.zeros((3, 3))), None)
    log.begin("supervised", "Supervised", values)
    gain = gains.gain(LABELS, values.oof_NC, values.oof_NC, np.eye(3, dtype=np.float32))
    log.judge("tta", "Views", values, {}, gain=gain, why="Because.", passes=4.0)
    assert told[0].startswith("Supervised (0 s): ")
    assert told[1].startswith("Views (0 s; a later prediction costs 4 times as much): Because.")
    assert [stage.passes for stage in log.stages] == [1.0, 4.0]


def test_thresholds_are_holms_where_every_stage_stays() -> None:
    log = _log(np.eye(3, dtype=np.float32), gates=3)
    found = []
    for _ in range(3):
        found.append(1 - log.sure(0.95))
        log._judge(stays=True)
    assert found == pytest.approx([0.05 / 3, 0.05 / 2, 0.05])
    log = _log(np.eye(3, dtype=np.float32), gates=3)
    log._judge(stays=False)
    assert 1 - log.sure(0.95) == pytest.approx(0.05 / 3), "a stage that is refused hands nothing on"
    log._judge(stays=True)
    assert 1 - log.sure(0.95) == pytest.approx(2 * 0.05 / 3)


def test_who_need_not_be_sure_stays_so() -> None:
    assert _log(np.eye(3, dtype=np.float32)).sure(0.0) == 0.0
