"""Labelled rows of several sources, texts and pictures: exact counts, columns of each source, repeats with a number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run_files import write_lines
from tests.workbench.evaluation.picture_sets import picture_set
from workbench.config import RunConfig
from workbench.data.labelled import labelled_data
from workbench.data.labelled.class_sampling import MixedLabelledRows, sampled_rows
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.errors import ConfigError, DataError
from workbench.models import classifier
from workbench.recipes.tasks.classify import class_run

SIZES = {"news": 30, "mail": 12, "web": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        rows = [{"text": f"{name} number {n} of all", "label": "odd" if n % 2 else "even"} for n in range(size)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def loaded(folder: Path, stories: str, **data: Any) -> tuple[RunConfig, ClassSplits]:
    own = data.pop("sources", {})
    sources = {name: {"path": str(folder / f"{name}.jsonl"), **own.get(name, {})} for name in SIZES}
    values = {"data": {"sources": sources, "held_out": 0.2, **data}, "classes": {"every_class": False}}
    config = RunConfig.model_validate({"recipe": "classify", "model": {"id": stories}, **values})
    return config, labelled_data.load(config, classifier.reader_of_backbone(config))


def test_each_source_holds_out_its_share_and_rows_keep_their_place(folder: Path, stories: str) -> None:
    _, splits = loaded(folder, stories)
    assert splits.train.sources == splits.held_out.sources == tuple(SIZES)
    for rows in (splits.held_out, splits.train):
        names = list(SIZES)
        assert all(names[number] in rows.place(row) for row, number in enumerate(rows.source_N))
    both_S = [np.bincount(rows.source_N, minlength=3) for rows in (splits.train, splits.held_out)]
    assert sum(both_S).tolist() == list(SIZES.values()) and (both_S[1] >= 1).all()  # type: ignore[union-attr]
    assert splits.train.facts()["sources"] == dict(zip(SIZES, both_S[0].tolist(), strict=True))


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.1, 9), min_size=3, max_size=3), draws=st.integers(1, 70), epochs=st.integers(1, 7))
def test_an_epoch_has_its_counts_and_no_row_comes_twice_before_all_others_of_its_source_once(
    weights: list[float], draws: int, epochs: int
) -> None:
    rows = labelled(SIZES)
    share_S = np.asarray(weights) / sum(weights)
    train = MixedLabelledRows(rows, share_S, draws, 0)
    seen = np.zeros(len(rows), dtype=np.int64)
    for epoch in range(epochs):
        taken = train.row_of(train.sample(np.arange(draws), epoch=epoch))
        once = np.bincount(taken, minlength=len(rows))
        assert once.max() <= train.most_draws
        seen += once
        for number in range(3):
            own = seen[rows.source_N == number]
            assert np.ptp(own) <= 1
            assert abs(own.sum() - (epoch + 1) * draws * share_S[number]) <= 1 + 1e-6


def labelled(sizes: dict[str, int]) -> LabelledSet:
    """Rows that have a source and a length, and nothing to read."""
    from workbench.data.labelled.record_table import EncodedTexts, LabelledRecord
    from workbench.data.labelled.text_reader import TokenRows
    from workbench.data.rows import RawRow

    total = sum(sizes.values())
    records = tuple(LabelledRecord(RawRow(f"row {n}", {}), ("a",)) for n in range(total))
    return LabelledSet(
        records=records,
        inputs=TokenRows(EncodedTexts.of(())),
        targets_NC=np.zeros((total, 2), dtype=np.float32),
        supervised=np.ones(total),
        source="here",
        fingerprint="",
        sources=tuple(sizes),
        source_N=np.repeat(np.arange(len(sizes)), list(sizes.values())),
    )


def test_a_source_has_columns_and_a_limit_of_its_own(folder: Path, stories: str) -> None:
    rows = [{"body": f"note {n} of all", "kind": "odd" if n % 2 else "even", "w": 2} for n in range(9)]
    write_lines(folder / "web.jsonl", rows)
    own = {"web": {"columns": {"text": "body", "label": "kind", "weight": "w"}, "limit": 6}}
    _, splits = loaded(folder, stories, sources=own)
    of_web = splits.train.source_N == 2
    assert of_web.sum() + (splits.held_out.source_N == 2).sum() == 6
    assert (splits.train.supervised[of_web] == 2).all() and (splits.train.supervised[~of_web] == 1).all()


def test_rows_of_one_source_that_another_holds_out_are_refused_or_dropped(folder: Path, stories: str) -> None:
    (folder / "mail.jsonl").write_text("".join((folder / "news.jsonl").read_text().splitlines(keepends=True)[:12]))
    with pytest.raises(DataError, match=r"training rows are also in .*\n  Write data\.overlap=drop"):
        loaded(folder, stories)
    _, splits = loaded(folder, stories, overlap="drop")
    texts = [{record.fields for record in rows.records} for rows in (splits.train, splits.held_out)]
    assert not texts[0] & texts[1]


def test_a_row_that_two_sources_have_stays_in_the_first(folder: Path, stories: str) -> None:
    copied = (folder / "news.jsonl").read_text().splitlines(keepends=True)[:5]
    (folder / "web.jsonl").write_text("".join([*copied, (folder / "web.jsonl").read_text()]))
    held = folder / "held.jsonl"
    write_lines(held, [{"text": "not one of them", "label": "odd"}, {"text": "nor this", "label": "even"}])
    _, splits = loaded(folder, stories, held_out=str(held), clean=["exact_duplicate"])
    assert np.bincount(splits.train.source_N).tolist() == list(SIZES.values())
    assert splits.train.cleaning is not None and len(splits.train.cleaning.places) == 5


def test_rows_are_compared_with_the_share_that_any_source_holds_out_and_with_every_test_set(
    folder: Path, stories: str
) -> None:
    write_lines(
        folder / "x.jsonl", [{"text": "WEB number 3, of all!", "label": "odd"}, {"text": "no such", "label": "odd"}]
    )
    wanted = {"action": "drop", "ngram": 3, "share": 1.0}
    _, splits = loaded(folder, stories, decontaminate=wanted, test={"x": str(folder / "x.jsonl")}, overlap="drop")
    _, before = loaded(folder, stories)
    found = splits.train.contamination
    assert found is not None and found.rows == len(splits.train), "one finding of all sources"
    assert list(found.sets) == ["data.held_out.news", "data.held_out.mail", "data.held_out.web", "data.test.x"]
    lost = set(before.train.places()) - set(splits.train.places())
    assert lost <= {"web.jsonl, row 4"} and splits.test is not None and splits.test.sources == ("x",)


def test_passes_and_a_source_without_rows_are_refused(folder: Path, stories: str) -> None:
    config, splits = loaded(folder, stories, sources={"web": {"passes": 1, "weight": 9}})
    assert isinstance(sampled_rows(splits.train, config), MixedLabelledRows)
    with pytest.raises(ConfigError, match=r"data\.sources\.web\.passes=1"):
        class_run.prepare(config)
    with pytest.raises(DataError, match=r"data\.sources\.web: no row of it is left"):
        sampled_rows(splits.train.subset(splits.train.source_N < 2), config)


def test_a_picture_that_is_drawn_again_in_an_epoch_is_augmented_anew(tmp_path: Path) -> None:
    rows, _ = picture_set(tmp_path, rows=20, augment={"rotation": 30, "brightness": 0.5})
    named = replace(rows, sources=("a", "b"), source_N=np.asarray([0] * 14 + [1] * 6))
    train = MixedLabelledRows(named, np.asarray([0.1, 0.9]), 40, 0)
    numbers = train.sample(np.arange(40), epoch=0)
    assert len(set(numbers.tolist())) == 40, "each draw has a number of its own"
    taken = train.row_of(numbers)
    again = numbers[taken == np.bincount(taken).argmax()]
    assert len(again) == 6
    pixels = train.batch(again, epoch=0).inputs["pixel_values"]
    assert all(not np.array_equal(pixels[0], each) for each in pixels[1:])
    assert train.lengths.shape == train.supervised.shape and numbers.max() < len(train.lengths)
