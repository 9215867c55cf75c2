"""Signs that a reward was outwitted are told where the rows show them, not where chance does."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.run_files import write_lines
from workbench.report import run_record, task_sections


def record(folder: Path, *, trained: tuple[float, float], held_out: list[tuple[float, float]]) -> run_record.RunRecord:
    """A run with rewards in training, at its ends, and of each held-out prompt before and after."""
    lines = [{"step": step, "loss": 0.0, "reward[mean]": trained[step > 4]} for step in range(1, 9)]
    write_lines(folder / "metrics.jsonl", lines)
    table = pd.DataFrame(held_out, columns=["reward_before", "reward_after"])
    table.to_parquet(folder / "predictions.parquet")
    means = {when: {"reward": float(table[f"reward_{when}"].mean())} for when in ("before", "after")}
    (folder / "scores.json").write_text(json.dumps(means))
    (folder / "config.yaml").write_text("recipe: reinforce\n")
    (folder / "manifest.json").write_text("{}")
    return run_record.read(folder)


@pytest.mark.parametrize(
    ("trained", "held_out", "warned"),
    [
        ((0.1, 0.9), [(0.1, 0.1), (0.2, 0.19), (0.3, 0.3), (0.2, 0.2)] * 4, True),
        ((0.1, 0.9), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)], False),  # few rows: the interval holds 0.8
        ((0.1, 0.9), [(0.1, 0.5), (0.2, 0.7)] * 8, False),  # a gain
        ((0.1, 0.11), [(0.1, 0.1), (0.2, 0.19), (0.3, 0.35)] * 4, False),  # nothing rose in training
    ],
)
def test_a_reward_that_rose_in_training_alone_is_told(
    tmp_path: Path, trained: tuple[float, float], held_out: list[tuple[float, float]], warned: bool
) -> None:
    signs = list(task_sections.reinforce_signs(record(tmp_path, trained=trained, held_out=held_out)))
    assert [text.startswith("The reward rose by 0.800 in training") for _, text in signs] == [True] * warned
