"""The page on a run's files names everything that runs leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.scripts.shown_commands import inline

PAGE = Path(__file__).parents[2] / "recipes" / "run_files.md"
SHORT = ("train.steps=2", "data.limit=60", "evaluate.every=1", "evaluate.answers=2", "evaluate.max_new_tokens=2")
FOLDS = ("train.steps=1", "data.limit=300", "folds.k=2")


def left_out(run: Path) -> set[str]:
    """Files, columns and parts of the manifest that a run has and the page does not name."""
    known = set(inline(PAGE))
    found = {path.name + "/" * path.is_dir() for path in run.iterdir()}
    found |= {"step-N/" if path.name.startswith("step-") else f"{path.name}/" for path in run.glob("checkpoints/*")}
    found |= {path.name for path in run.glob("checkpoints/step-*/*")}
    found |= set(json.loads((run / "manifest.json").read_text()))
    for path in run.rglob("metrics.jsonl"):
        found |= {column for line in path.read_text().splitlines() for column in json.loads(line)}
    named = {name for name in found if f"{name.partition('[')[0]}[...]" in known}
    return found - known - named - {"members/"}


@pytest.mark.slow
def test_the_page_names_what_runs_leave(tmp_path: Path) -> None:
    workbench.run("sft/quickstart", SHORT, out=tmp_path / "sft", quiet=True)
    workbench.run("crossval/quickstart", FOLDS, out=tmp_path / "folds", quiet=True)
    assert left_out(tmp_path / "sft") == set()
    assert left_out(tmp_path / "folds") == set()


def test_a_file_that_no_page_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"moon": 1}')
    (tmp_path / "tides.json").touch()
    assert left_out(tmp_path) == {"tides.json", "moon"}
