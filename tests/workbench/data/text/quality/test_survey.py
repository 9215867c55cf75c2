"""Findings on sources of rows, training rows first."""

from __future__ import annotations

import numpy as np

from workbench.data.text.quality import survey
from workbench.data.text.quality.rules import Exchange, RowText
from workbench.data.text.quality.survey import SourceRows


def _source(title: str, texts: list[str], **more: object) -> SourceRows:
    rows = [RowText(f"{title}.jsonl, row {at}", text) for at, text in enumerate(texts, start=1)]
    return SourceRows(title, f"{title}.jsonl", rows, np.asarray([len(text) for text in texts]), title != "Test", **more)  # type: ignore[arg-type]


def test_training_rows_that_stand_in_evaluation_too() -> None:
    train, test = survey.examine([_source("Train", ["A cat.", "A dog."]), _source("Test", ["a CAT"])])
    assert [(flag.place, flag.note) for flag in train.flags if flag.rule == "also_in_evaluation"] == [
        ("Train.jsonl, row 1", "Test.jsonl, row 1 (Test)")
    ]
    assert not test.counts["also_in_evaluation"]


def test_sources_are_compared_with_each_other_and_all_of_them_with_evaluation() -> None:
    first, second = _source("Train: a", ["A cat.", "A dog."]), _source("Train: b", ["a DOG", "A fox.", "A hen."])
    a, b, test = survey.examine([first, second, _source("Test", ["a fox", "A fox."])])
    own = [
        [(flag.rule, flag.row, flag.note) for flag in each.flags if not flag.rule.startswith(("c4_", "gopher_"))]
        for each in (a, b, test)
    ]
    assert own[0] == []
    assert own[1] == [
        ("exact_duplicate", 0, "Train: a.jsonl, row 2 (Train: a)"),
        ("also_in_evaluation", 1, "Test.jsonl, row 1 (Test)"),
    ]
    assert own[2] == [("exact_duplicate", 1, "Test.jsonl, row 1")]
    together = survey.training([a, b, test])
    assert [row.text for row in together.read.rows] == [row.text for row in (*first.rows, *second.rows)]
    assert [flag.row for flag in together.flags if flag.rule == "also_in_evaluation"] == [3]
    assert together.files == {"Train: b.jsonl": 3, "Train: a.jsonl": 2} and together.cut(5) == 4


def test_labels_conflict_across_sources() -> None:
    read = [_source("Train: a", ["A cat."], labels=[("x",)]), _source("Train: b", ["a cat"], labels=[("y",)])]
    assert [found.counts["conflicting_label"] for found in survey.examine(read)] == [1, 1]


def test_duplicates_with_other_labels_conflict() -> None:
    read = _source("Train", ["A cat.", "a cat", "A dog.", "A dog."], labels=[("x",), ("y",), ("x",), ("x",)])
    (found,) = survey.examine([read])
    assert [flag.row for flag in found.flags if flag.rule == "conflicting_label"] == [0, 1]
    assert found.classes == {"x": 3, "y": 1}


def test_perplexities_far_from_the_median() -> None:
    read = _source("Train", [f"Row {at}." for at in range(50)])
    usual = {at: 10.0 + at % 5 for at in range(48)}
    (found,) = survey.examine([SourceRows(**{**vars(read), "perplexities": {**usual, 48: 1e4, 49: 1.0}})])
    assert [(flag.row, flag.note) for flag in found.flags if flag.rule == "perplexity"] == [(48, "high"), (49, "low")]


def test_cut_rows_files_and_unreadable_ones() -> None:
    (found,) = survey.examine([_source("Train", ["abc", "abcdef"], unreadable=("Train.jsonl, row 9: is empty.",))])
    assert found.cut(3) == 1 and found.files == {"Train.jsonl": 2}
    unreadable = [flag for flag in found.flags if flag.rule == "unreadable"]
    assert [(flag.place, flag.note) for flag in unreadable] == [("Train.jsonl, row 9", "is empty.")]


def test_few_answers_are_counted_like_classes() -> None:
    rows = [RowText(f"f, row {at}", "x", exchanges=(Exchange("x", ("yes", "no")[at % 2]),)) for at in range(40)]
    (found,) = survey.examine([SourceRows("Train", "f", rows, np.ones(40, dtype=np.int64), True)])
    assert found.classes == {"yes": 20, "no": 20}
