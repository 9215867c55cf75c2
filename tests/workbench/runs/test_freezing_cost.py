"""What freezing saved is told from a run's own steps, and where they cannot tell, that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_files import write_lines
from workbench.runs import freezing_cost


def _record(folder: Path, steps: int, *, frozen_from: int | None, faster: float, peak: float = 1.0) -> Path:
    changes = [{"step": 0, "trains": "00" if frozen_from == 0 else "11"}]
    changes += [{"step": frozen_from, "trains": "01"}] if frozen_from else []
    write_lines(folder / "layers.jsonl", changes)
    speeds = [1000.0 * (faster if frozen_from is not None and step >= frozen_from else 1) for step in range(steps + 1)]
    lines = [
        {"step": step, "tokens": 100 + step, "tokens_per_second": speeds[step], "peak_bytes": 1e9 * peak ** (step > 5)}
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


@pytest.mark.parametrize(
    ("frozen_from", "faster", "peak", "lost", "said"),
    [
        (6, 2.0, 1.0, False, "15 of 20 steps with frozen layers, which took 50 % less time for a token"),
        (6, 2.0, 1.0, False, "the peak of memory, 1.0 GB, is of the latter"),
        (
            6,
            0.8,
            1.2,
            True,
            "25 % more time for a token than those that trained all; peak memory rose from 1.0 GB to 1.2 GB",
        ),
        (6, 1.01, 1.0, True, "which took no other time"),
        (None, 1.0, 1.0, True, "froze nothing in 20 steps, and saved nothing"),
        (0, 2.0, 1.0, False, "no step trained all layers"),
        (3, 2.0, 1.0, False, "too few steps are alike"),
    ],
)
def test_what_freezing_saved_or_cost(
    tmp_path: Path, frozen_from: int | None, faster: float, peak: float, lost: bool, said: str
) -> None:
    cost = freezing_cost.of_run(_record(tmp_path, 20, frozen_from=frozen_from, faster=faster, peak=peak))
    found, text = freezing_cost.sentence("gradual", cost)
    assert found is lost and said in text and text.startswith("freeze.policy=gradual")


def test_the_first_step_is_not_compared(tmp_path: Path) -> None:
    folder = _record(tmp_path, 20, frozen_from=6, faster=1.0)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = '{"step": 1, "tokens": 100, "tokens_per_second": 1.0, "peak_bytes": 1}'
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    cost = freezing_cost.of_run(folder)
    assert cost["all"]["seconds_per_token"] == pytest.approx(cost["frozen"]["seconds_per_token"])


def test_layers_that_thaw_are_compared_with_the_steps_after(tmp_path: Path) -> None:
    _record(tmp_path, 20, frozen_from=None, faster=1.0)
    write_lines(tmp_path / "layers.jsonl", [{"step": 0, "trains": "01"}, {"step": 11, "trains": "11"}])
    cost = freezing_cost.of_run(tmp_path)
    assert [cost[kind]["steps"] for kind in ("all", "frozen")] == [10, 10]
    assert "memory" not in freezing_cost.sentence("gradual", cost)[1]


def test_a_run_without_a_log_of_layers_says_nothing(tmp_path: Path) -> None:
    assert freezing_cost.of_run(tmp_path) == {}
