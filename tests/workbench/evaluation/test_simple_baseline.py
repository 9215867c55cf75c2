"""A classifier without a backbone tells what words and colours tell, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import workbench
from tests.run_files import write_lines
from tests.workbench.data.images.pictures import photograph
from tests.workbench.evaluation.picture_sets import picture_reader
from workbench.cli import render
from workbench.config import RunConfig
from workbench.config.sections.classes_config import Kind
from workbench.data.labelled import labelled_data, labels
from workbench.evaluation import simple_baseline
from workbench.models import classifier
from workbench.recipes.verbs import features
from workbench.report.findings import findings
from workbench.report.run_record import RunRecord, read


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
    meaning = labels.fit("one", source.labels, source="pictures")
    found = simple_baseline.fit(rows.subset(~aside_N), rows.subset(aside_N), reader, meaning, seed=0)
    right = np.mean(found.values_MC.argmax(1) == rows.subset(aside_N).targets_NC.argmax(1))
    assert found.features == simple_baseline.PICTURES and found.rows == 80 and least <= right <= most


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_the_verb_says_that_the_backbone_holds_back_where_it_does(
    tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """The first of many words decides: counting tells the class, and what an untaught backbone ends with does not."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    data = {"train": str(write_lines(tmp_path / "rows.jsonl", [*worded(300)]))}
    model = {"id": stories, "weights": "float32"}
    aside = {"folds": {"k": 2}} if recipe == "crossval" else {"data": {**data, "held_out": 0.4}}
    found = features.features(RunConfig.model_validate({"recipe": recipe, "model": model, "data": data, **aside}))
    assert found.known is not None
    score = found.known.baseline.score
    assert found.known.probe is not None
    assert score.first == found.known.probe.linear and score.second > score.first
    assert score.interval is not None and score.interval[0] > 0 and "surely better than" in found.sentence


NAMES = ("cat", "dog", "bird")
WORDS = ("sun", "moon", "tree", "house", "river", "stone", "road", "hill", "boat", "bread")


def worded(rows: int, *, kind: str = "one", known: bool = True) -> Iterator[dict[str, Any]]:
    """Rows whose first words tell the label, or nothing does."""
    rng = np.random.default_rng(0)
    for _ in range(rows):
        has = rng.random(3) < 0.5 if kind == "several" else np.arange(3) == rng.integers(3)
        said = [name for name, own in zip(NAMES, has if known else rng.random(3) < 0.5, strict=True) if own]
        label = [name for name, own in zip(NAMES, has, strict=True) if own]
        number = 10.0 * has.argmax() + rng.normal()
        text = " ".join([*said, *rng.choice(WORDS, 12)])
        yield {"text": text, "label": label if kind == "several" else number if kind == "number" else label[0]}


def run_beside(folder: Path, model: str, rows: list[dict[str, Any]], **sections: Any) -> RunRecord:
    """A short run of the untaught backbone `model`."""
    values = {
        "recipe": "classify",
        "model": {"id": model, "weights": "float32"},
        "data": {"train": str(write_lines(folder / "rows.jsonl", rows))},
        "train": {"steps": 2},
        "batch": {"size": 8},
        **sections,
    }
    if values["recipe"] == "classify":
        values["data"]["held_out"] = 0.4
    return read(workbench.run(RunConfig.model_validate(values), out=folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kind", "metric", "score"),
    [
        ("classify", "one", None, "accuracy"),
        ("classify", "one", "macro_f1", "macro_f1"),
        ("classify", "several", None, "micro_f1"),
        ("classify", "several", "roc_auc", "roc_auc"),
        ("classify", "number", None, "rmse"),
        ("classify", "number", "mae", "mae"),
        ("crossval", "one", "log_loss", "log_loss"),
    ],
)
def test_a_run_says_that_counted_words_do_better(
    tmp_path: Path,
    stories: str,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    kind: str,
    metric: str,
    score: str,
) -> None:
    folds = {"folds": {"k": 2}} if recipe == "crossval" else {}
    evaluate = {"metric": metric, "probe": 64}
    rows = [*worded(240, kind=kind)]
    record = run_beside(tmp_path, stories, rows, recipe=recipe, classes={"kind": kind}, evaluate=evaluate, **folds)
    facts, after = record.manifest["simple_baseline"], record.scores["after"]
    assert facts["score"] == score and facts["ahead"][0] > 0, "it is surely better"
    assert facts["run"] == pytest.approx(after[score], abs=1e-4), "the run's own score, of the same rows"
    assert record.scores["simple_baseline"] == {score: pytest.approx(facts["baseline"], abs=1e-4)}
    better = min if score in ("rmse", "mae", "log_loss") else max
    assert better(facts["baseline"], facts["constant"]) == facts["baseline"]
    told = "The simple model is surely better than this run"
    if recipe == "classify":  # the stages of a cross-validation have their own
        assert " ".join(render.outcome(record.folder).split()).count(told) == 1
    else:
        assert told in " ".join(capsys.readouterr().err.split())
    assert any(each.tone == "warning" and told in each.text for each in findings(record))


@pytest.mark.parametrize(("first", "warns"), [(1.0, False), (0.0, True)])
def test_a_baseline_that_loses_is_one_quiet_sentence(first: float, warns: bool) -> None:
    meaning, wanted = labels.fit("one", ["a", "b"], source="rows"), np.eye(2)[np.arange(90) % 2]
    random = np.random.default_rng(0).random((90, 2))
    baseline = simple_baseline.Baseline("words", "logistic regression", 90, random)
    facts = simple_baseline.compare(
        meaning, baseline, first * wanted + (1 - first) * wanted[::-1], wanted, wanted
    ).facts
    behind, text = simple_baseline.sentence(facts)
    assert behind == warns and ("surely better" in text) == warns and text.count(". ") <= 2 * warns


@pytest.mark.parametrize("kind", ["one", "several", "number"])
def test_values_have_a_column_for_each_class_and_numbers_their_unit(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    given: list[Any] = {
        "one": ["a", "b"] * 20,
        "several": [("a",), ("a", "b")] * 20,
        "number": [100.0, 200.0] * 20,
    }[kind]
    meaning = labels.fit(kind, [*given, *({"one": ["c"], "several": [("c",)]}.get(kind, []))], source="rows")
    targets = meaning.targets(given)
    seen = np.column_stack([np.arange(40) % 2, rng.normal(size=40)])
    values = simple_baseline.linear_values(meaning, seen, targets, 10.0, lambda model: model)(seen)
    if kind == "number":
        assert values.shape == (40, 1) and np.abs(values[:, 0] - given).max() < 5
    else:
        assert values.shape == (40, 3) and (values[:, 2] == 0).all(), "a class that no row has"
        assert ((values[:, 1] > 0.5) == targets[:, 1]).all()


@pytest.mark.parametrize("kind", ["one", "number"])
def test_numbers_of_the_template_are_read_as_numbers(tmp_path: Path, kind: Kind) -> None:
    """How large a number is decides, which no word says; a row without it is no trouble."""
    rng, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for size in rng.normal(size=400):
        label = 3 * size if kind == "number" else "large" if size > 0 else "small"
        rows.append({"text": " ".join(rng.choice(WORDS, 5)), "size": f"{size:.4f}", "label": label})
    rows[390]["size"] = "unknown"
    path = write_lines(tmp_path / "rows.jsonl", rows)
    classes = {"kind": kind, "text": "Size {size}. {text}"}
    asked = RunConfig.model_validate({"recipe": "classify", "data": {"train": str(path)}, "classes": classes})
    reader = classifier.reader_of_backbone(asked)
    source = reader.read(str(path))
    meaning = labels.fit(kind, source.labels, source="rows")
    every = labelled_data.encode(source, reader, meaning)
    aside_N = np.arange(400) >= 300
    aside = every.subset(aside_N)
    found = simple_baseline.fit(every.subset(~aside_N), aside, reader, meaning, seed=0)
    assert found.features == simple_baseline.NUMBERS
    score = simple_baseline.compare(meaning, found, found.values_MC, aside.targets_NC, every.targets_NC)
    assert score.score.second > 0.95 if kind == "one" else score.score.second < 0.3 * score.floor
