"""The guard stops what explodes, and nothing else; after a resume it judges as before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.training.loss_guard import LossGuard

ROWS = np.arange(4)


def _guard(tmp_path: Path) -> LossGuard:
    rows: Any = SimpleNamespace(place=lambda row: f"rows.jsonl, row {row + 1}")
    return LossGuard(rows, checkpoints_folder=tmp_path, learning_rate=1e-3)


def _judge(guard: LossGuard, loss: float, *, norm: float = 1.0, tokens: int = 64) -> str | None:
    error = guard(loss, norm, ROWS, tokens=tokens, step=7)
    return None if error is None else str(error)


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_what_is_not_finite_is_refused_from_the_first_step_on(tmp_path: Path, loss: float, norm: float) -> None:
    message = _judge(_guard(tmp_path), loss, norm=norm)
    assert message is not None and "not finite at step 8" in message and "rows.jsonl, row 4" in message


@pytest.mark.parametrize("fresh", [0.9, 1.8, 5.0])
def test_a_loss_far_above_the_usual_and_the_fresh_one_is_refused(tmp_path: Path, fresh: float) -> None:
    guard = _guard(tmp_path)
    assert not any(_judge(guard, loss) for loss in [fresh] * 5 + [0.4 * fresh] * 20)
    assert "exploded" in str(_judge(guard, 2.5 * fresh))


def test_one_hard_row_in_a_small_batch_ends_no_run(tmp_path: Path) -> None:
    """Losses of a classifier of six classes with balanced weights, 16 rows a step: the last one is one rare row's."""
    guard = _guard(tmp_path)
    for loss in [1.81, 1.79, 1.8, 1.7, 1.6, *[0.37, 0.39, 0.94, 0.36, 0.1, 0.24] * 4, 2.377]:
        assert _judge(guard, loss) is None


def test_the_last_batch_of_an_epoch_may_be_one_row(tmp_path: Path) -> None:
    """A mean of a quarter of the tokens may lie twice as far from the usual one."""
    guard = _guard(tmp_path)
    assert not any(_judge(guard, loss) for loss in [1.0] * 25)
    assert _judge(guard, 4.9, tokens=16) is None
    assert "exploded" in str(_judge(guard, 5.1, tokens=16)) and "exploded" in str(_judge(guard, 3.1))


def test_a_resumed_guard_judges_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    losses = [2.0, 1.9, 1.8, 1.7, 1.6, *np.linspace(1.5, 0.2, 40).tolist()]
    whole, resumed = _guard(tmp_path), _guard(tmp_path)
    assert not any(_judge(whole, loss) for loss in losses)
    resumed.load([(loss, 64) for loss in losses])
    for loss in (2.69, 2.71):
        assert _judge(whole, loss) == _judge(resumed, loss)
