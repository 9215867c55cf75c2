"""A sweep's table and plots: means over seeds, failures beside them, and what a lead is worth.

A search's table and plots: who came farthest stands first, failures beside them, and ends of ranges are told.
"""

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


LOSSES_SEARCH_SECTIONS: list[list[float | None]] = [
    [3.0, 2.5, 2.0],
    [2.9, 2.6, None],
    [3.2, None, None],
    [None, None, None],
]
RATES, TARGETS = (1e-3, 1e-2, 1e-4, 1e-1), ("all-linear", ["q_proj"], ["q_proj"], "all-linear")


def write_of_search_sections(
    folder: Path, *, losses: list[list[float | None]] = LOSSES_SEARCH_SECTIONS, **other: Any
) -> Path:
    rows = [
        {
            "member": f"{number:03}",
            "settings": {"train.learning_rate": rate, "adapter.targets": targets},
            "status": "failed" if loss[0] is None else "stopped" if loss[2] is None else "done",
            "steps": 4,
            "losses": loss,
        }
        for number, (loss, rate, targets) in enumerate(zip(losses, RATES, TARGETS, strict=True))
    ]
    table = {
        "best": "000",
        "shares": [0.25, 0.5, 1.0],
        "rows": 8,
        "by": "loss",
        "trained": 2.0,
        "importances": {},
        "members": rows,
    }
    (folder / "search.json").write_text(json.dumps(table | other))
    (folder / "config.yaml").write_text("recipe: search\nof: sft\n")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_those_that_came_farthest_stand_first(tmp_path: Path) -> None:
    found = sweep_sections.read_search(
        write_of_search_sections(tmp_path, importances={"train.learning_rate": 0.75, "adapter.targets": 0.25})
    )
    assert found is not None and found.shipped == 0
    assert found.columns == (
        *("train.learning_rate", "adapter.targets"),
        *("loss after 1/4", "loss after 1/2", "loss after all", "steps", "status"),
    )
    assert [row[2:5] for row in found.members] == [
        ("3.0000", "2.5000", "2.0000"),
        ("2.9000", "2.6000", "-"),
        ("3.2000", "-", "-"),
        ("-", "-", "-"),
    ]
    assert found.settings[0] == ("train.learning_rate", "75 %")
    assert found.notes[0].startswith(
        "4 settings took the steps of 2 trainings; 1 came to the end. Before that, members"
    )
    assert "flatters itself" in found.notes[2] and found.notes[-1] == "Failed: 003."


def test_a_best_value_at_the_end_of_what_was_tried_is_told(tmp_path: Path) -> None:
    found = sweep_sections.read_search(write_of_search_sections(tmp_path, best="003"))
    assert found is not None
    assert (
        "The best train.learning_rate is at the high end of what was tried: a higher one may be better." in found.notes
    )
    found = sweep_sections.read_search(write_of_search_sections(tmp_path, best=None))
    assert found is not None and found.shipped is None


def test_plots_show_who_has_a_loss_and_names_where_values_are_no_numbers(tmp_path: Path) -> None:
    plots = {plot.title: plot for plot in sweep_sections.plots(run_record.read(write_of_search_sections(tmp_path)))}
    assert list(plots) == [
        "Settings of all members, and how far they came",
        "Held-out loss against train.learning_rate",
        "Held-out loss against adapter.targets",
        "Held-out loss at each comparison",
    ]
    lines = plots["Settings of all members, and how far they came"]
    assert [each.label for each in lines.legend] == ["came to 1/4", "came to 1/2", "came to all"]
    assert "0.0001 to 0.01" in lines.svg, "of those that have a loss"
    assert "all-linear" in plots["Held-out loss against adapter.targets"].svg
    empty = write_of_search_sections(tmp_path, losses=[[None, None, None]] * 4)
    assert sweep_sections.plots(run_record.read(empty)) == []
    (tmp_path / "search.json").unlink()
    assert sweep_sections.read_search(tmp_path) is None and sweep_sections.plots(run_record.read(tmp_path)) == []
