"""Mistakes with rows that are pictures end in status 2 and a message with place and cure, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, file
from tests.mistakes.picture_cases import CASES
from tests.mistakes.picture_folders import (
    ROWS,
    both,
    locked,
    pictures,
)
from tests.vision_backbones import save_vision

RECIPE = """
recipe: classify
model: {id: vit, weights: float32}
adapter: {method: lora, rank: 2}
data: {format: image, train: pets, held_out: 0.25}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a backbone, and a run of two steps. Read only."""
    import workbench

    folder = tmp_path_factory.mktemp("finished")
    both(pictures("pets/cat"), pictures("pets/dog", start=ROWS))(folder)
    save_vision(folder / "vit", "ViT")
    file("my.yaml", RECIPE)(folder)
    words = [f"model.id={folder}/vit", f"data.train={folder}/pets"]
    workbench.run(folder / "my.yaml", words, out=folder / "one", quiet=True)
    return folder


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: Case, tmp_path: Path, finished: Path, stories: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if case.prepare is locked and os.geteuid() == 0:
        pytest.skip("root may read everything")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "pets", tmp_path / "pets")
    shutil.copy(finished / "my.yaml", tmp_path)
    for link, target in (("vit", finished / "vit"), ("one", finished / "one"), ("stories", Path(stories))):
        (tmp_path / link).symlink_to(target)
    assert_refused(case, tmp_path, monkeypatch, capsys)
