"""A sweep's table and plots: means over seeds, failures beside them, and what a lead is worth."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from workbench.report import run_record, sweep_sections

LOSSES: dict[float, tuple[float | None, ...]] = {1e-4: (3.0, 3.2), 1e-3: (2.0, 2.3), 1e-2: (2.1, 2.5), 1.0: (None, 4.0)}


def write(folder: Path, losses: dict[Any, tuple[float | None, ...]], key: str, scores: dict[str, Any]) -> Path:
    rows = [
        {
            "member": f"{value},{seed}",
            "settings": {key: value, "seed": seed},
            "status": "done" if loss else "failed",
            "steps": 5,
            "held_out_loss": loss,
            "best_held_out_loss": loss and loss - 0.5 * seed,
            "best_step": 4 if loss else None,
            "seconds": 70.0,
        }
        for value, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    best = min((row for row in rows if row["held_out_loss"]), key=lambda row: row["held_out_loss"])
    table = {"best": best["member"], "ship": "last", "members": rows}
    (folder / "sweep.json").write_text(json.dumps(table))
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "config.yaml").write_text("recipe: sweep\nof: sft\n")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_means_and_spreads_over_seeds(tmp_path: Path) -> None:
    found = sweep_sections.read_sweep(write(tmp_path, LOSSES, "train.learning_rate", {}))
    assert found is not None
    assert found.columns == ("train.learning_rate", "mean", "spread", "lowest", "members")
    assert [each.row for each in found.settings] == [
        ("0.0001", "3.1000", f"{statistics.stdev((3.0, 3.2)):.4f}", "3.0000", "2"),
        ("0.001", "2.1500", f"{statistics.stdev((2.0, 2.3)):.4f}", "2.0000", "2"),
        ("0.01", "2.3000", f"{statistics.stdev((2.1, 2.5)):.4f}", "2.1000", "2"),
        ("1", "4.0000", "-", "4.0000", "1 of 2, 1 failed"),
    ]
    assert [each.ships for each in found.settings] == [False, True, False, False] and found.shipped == 2
    assert found.members[6] == ("1", "0", "-", "-", "-", "5", "1 min 10 s", "failed")


def test_the_best_of_many_is_not_taken_at_its_word(tmp_path: Path) -> None:
    found = sweep_sections.read_sweep(write(tmp_path, LOSSES, "train.learning_rate", {"test": {"loss": 2.25}}))
    assert found is not None
    assert "The best of 7" in found.notes[0] and "On the test rows, scored once, its loss is 2.2500." in found.notes[0]
    assert "leads the second by 0.1500, which is no more than seeds make (0.2828)" in found.notes[1]
    assert len(found.notes) == 2
    clear = sweep_sections.read_sweep(
        write(tmp_path, {1: (3.0, 3.1), 2: (2.6, 2.7), 4: (2.0, 2.1)}, "adapter.rank", {})
    )
    assert clear is not None and len(clear.notes) == 2 and "data.test=FILE" in clear.notes[0]
    assert clear.notes[1] == "The best adapter.rank is the highest that was tried: a higher one may be better."


@pytest.mark.parametrize(
    ("key", "losses", "labels"),
    [
        ("train.learning_rate", LOSSES, ("mean over seeds", "each member")),
        ("schedule.name", {"linear": (2.0, 2.1), "cosine": (2.2, 2.3)}, ("name linear", "name cosine")),
    ],
)
def test_the_loss_is_drawn_against_a_number(key: str, losses: Any, labels: tuple[str, ...], tmp_path: Path) -> None:
    first, curves = sweep_sections.plots(run_record.read(write(tmp_path, losses, key, {})))
    assert tuple(each.label for each in first.legend) == labels
    assert first.title == f"Held-out loss against {key if key.startswith('train') else 'seed'}" and first.svg
    assert ("Failed, and not shown: 1.0,0." in first.caption) == (key == "train.learning_rate")
    assert not curves.svg, "no member has metrics"
    if key == "train.learning_rate":
        assert first.legend[0].y.tolist() == pytest.approx([3.1, 2.15, 2.3, 4.0])


def test_a_run_of_another_recipe_has_none(tmp_path: Path) -> None:
    assert sweep_sections.read_sweep(tmp_path) is None
