"""Pictures as labelled rows: their near-duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.workbench.data.images.pictures import photograph
from tests.workbench.evaluation.picture_sets import SIZE, picture_reader
from workbench.config import RunConfig
from workbench.data.images import picture_duplicates

SETTINGS = {"recipe": "crossval", "data": {"train": "pets", "format": "image"}, "adapter": {"method": "lora"}}


def copies(folder: Path) -> Path:
    """Four pictures, and copies of three: an equal one, a grainy one and a very grainy one."""
    pictures = [photograph(SIZE, SIZE, seed=number) for number in range(4)]
    chance = np.random.default_rng(0)
    for picture, grain in zip(pictures[:3], (0, 12, 26), strict=True):
        copy = np.clip(picture + chance.normal(0, 1, picture.shape) * grain, 0, 255).astype(np.uint8)
        pictures.append(copy)
    for number, each in enumerate(pictures):
        place = folder / ("a" if number % 2 else "b")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(place / f"{number}.png")
    return folder


@pytest.mark.parametrize(("threshold", "pairs"), [(1, 1), ("auto", 2), (0.9, 3)])
def test_a_threshold_says_how_alike_near_duplicates_are(tmp_path: Path, threshold: float | str, pairs: int) -> None:
    RunConfig.model_validate({**SETTINGS, "duplicates": {"threshold": threshold}})
    folder = copies(tmp_path / "pictures")
    reader = picture_reader(folder, threshold=threshold)
    source = reader.read(str(folder))
    inputs, number = reader.inputs(source), {reader.describe(each)[-5]: n for n, each in enumerate(source.records)}
    cluster_N = reader.duplicates([source]).cluster_N
    alike = [
        picture_duplicates.similarity(*(inputs.picture(number[each]) for each in pair)) for pair in ("04", "15", "26")
    ]
    assert alike[0] > 0.9999 and 0.95 < alike[1] < 0.999 and 0.9 < alike[2] < 0.95
    assert [cluster_N[number[one]] == cluster_N[number[other]] for one, other in ("04", "15", "26")] == [
        order < pairs for order in range(3)
    ]
    assert len(set(cluster_N.tolist())) == 7 - pairs
