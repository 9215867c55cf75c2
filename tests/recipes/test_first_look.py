"""What is told before torch is imported is what a run would tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.data.folds import duplicates
from workbench.errors import DataError
from workbench.recipes import first_look
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check

ROW = {"text": "x" * 1000}
BY_CLASS = [{**ROW, "label": "ab"[n // 1100]} for n in range(2200)]


def _require(folder: Path, rows: list[dict[str, str]], recipe: str) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "my.yaml"
    path.write_text(f"recipe: {recipe}\nmodel: {{id: starter}}\ndata: {{train: {folder}/rows.jsonl, held_out: 0.2}}\n")
    first_look.require_rows(load(path))


def test_the_first_rows_of_a_large_file_say_nothing_of_its_classes(tmp_path: Path) -> None:
    assert len(json.dumps(BY_CLASS)) > first_look.SMALL and first_look.FIRST < 1100
    _require(tmp_path, BY_CLASS, "classify")
    with pytest.raises(DataError, match="among the first 2201"):
        _require(tmp_path, [{**ROW, "label": ""}, *BY_CLASS], "classify")


def test_later_rows_of_a_large_file_are_left_to_the_run(tmp_path: Path) -> None:
    _require(tmp_path, [*BY_CLASS, ROW], "classify")


def test_all_rows_of_a_small_file_are_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 23"):
        _require(tmp_path, [*BY_CLASS[::100], ROW], "classify")


def test_the_first_look_and_the_run_search_for_copies_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    near_pairs = duplicates.near_pairs

    def counted(sets: duplicates.ShingleSets, **options: Any) -> duplicates.Ints:
        searched.append(sets.table_UV.shape[0])
        return near_pairs(sets, **options)

    monkeypatch.setattr(duplicates, "near_pairs", counted)
    words = [f"{n * 7919:b} {n * 104729:b}" for n in range(40)]
    _require(tmp_path, [{"text": text, "label": "ab"[n % 2]} for n, text in enumerate(words)], "classify")
    check(load(tmp_path / "my.yaml"))
    assert searched == [40]
