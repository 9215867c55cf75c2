"""A classifier without a backbone tells what words and colours tell, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.run_files import write_lines
from tests.workbench.data.images.pictures import photograph
from tests.workbench.evaluation.picture_sets import picture_reader
from workbench.config import RunConfig
from workbench.data.labelled import labelled_data, labels
from workbench.evaluation import simple_baseline
from workbench.recipes.verbs import features


@pytest.mark.parametrize(("tint", "least", "most"), [(0.3, 0.95, 1.0), (1.0, 0.25, 0.75)])
def test_pictures_are_told_by_their_colours_and_equal_ones_are_not(
    tmp_path: Path, tint: float, least: float, most: float
) -> None:
    for number in range(120):
        place = tmp_path / "pictures" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        share = np.asarray([1, tint, tint]) if number % 2 else np.ones(3)  # green and blue of a reddish picture
        picture = (photograph(40, 40, seed=number) * share).astype(np.uint8)
        Image.fromarray(picture).save(place / f"{number}.png")
    reader = picture_reader(tmp_path / "pictures")
    source = reader.read(str(tmp_path / "pictures"))
    rows = labelled_data.encode(source, reader, labels.fit("one", source.labels, source="pictures"))
    aside_N = np.random.default_rng(0).permutation(len(rows)) < 40
    found = simple_baseline.fit(rows.subset(~aside_N), rows.subset(aside_N), reader, seed=0)
    right = np.mean(found.predicted_M == np.asarray(rows.subset(aside_N).labels))
    assert found.features == simple_baseline.PICTURES and found.rows == 80 and least <= right <= most


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_the_verb_says_that_the_backbone_holds_back_where_it_does(
    tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """The first of many words decides: counting tells the class, and what an untaught backbone ends with does not."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    rng, names = np.random.default_rng(0), ("cat", "dog", "bird")
    words = ["sun", "moon", "tree", "house", "river", "stone", "road", "hill", "boat", "bread"]
    rows = [{"text": " ".join([names[row % 3], *rng.choice(words, 12)]), "label": names[row % 3]} for row in range(300)]
    data = {"train": str(write_lines(tmp_path / "rows.jsonl", rows))}
    model = {"id": stories, "weights": "float32"}
    aside = {"folds": {"k": 2}} if recipe == "crossval" else {"data": {**data, "held_out": 0.4}}
    found = features.features(RunConfig.model_validate({"recipe": recipe, "model": model, "data": data, **aside}))
    assert found.known is not None
    score = found.known.baseline
    assert score.first == found.known.probe.linear and score.second > score.first
    assert score.interval is not None and score.interval[0] > 0 and "surely more than" in found.sentence
