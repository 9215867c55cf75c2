"""A search's table and plots: who came farthest stands first, failures beside them, and ends of ranges are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.report import run_record, sweep_sections

LOSSES: list[list[float | None]] = [[3.0, 2.5, 2.0], [2.9, 2.6, None], [3.2, None, None], [None, None, None]]
RATES, TARGETS = (1e-3, 1e-2, 1e-4, 1e-1), ("all-linear", ["q_proj"], ["q_proj"], "all-linear")


def write(folder: Path, *, losses: list[list[float | None]] = LOSSES, **other: Any) -> Path:
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
    table = {"best": "000", "shares": [0.25, 0.5, 1.0], "rows": 8, "trained": 2.0, "importances": {}, "members": rows}
    (folder / "search.json").write_text(json.dumps(table | other))
    (folder / "config.yaml").write_text("recipe: search\nof: sft\n")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_those_that_came_farthest_stand_first(tmp_path: Path) -> None:
    found = sweep_sections.read_search(
        write(tmp_path, importances={"train.learning_rate": 0.75, "adapter.targets": 0.25})
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
    found = sweep_sections.read_search(write(tmp_path, best="003"))
    assert found is not None
    assert (
        "The best train.learning_rate is at the high end of what was tried: a higher one may be better." in found.notes
    )
    found = sweep_sections.read_search(write(tmp_path, best=None))
    assert found is not None and found.shipped is None


def test_plots_show_who_has_a_loss_and_names_where_values_are_no_numbers(tmp_path: Path) -> None:
    plots = {plot.title: plot for plot in sweep_sections.plots(run_record.read(write(tmp_path)))}
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
    empty = write(tmp_path, losses=[[None, None, None]] * 4)
    assert sweep_sections.plots(run_record.read(empty)) == []
    (tmp_path / "search.json").unlink()
    assert sweep_sections.read_search(tmp_path) is None and sweep_sections.plots(run_record.read(tmp_path)) == []
