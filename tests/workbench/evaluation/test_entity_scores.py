"""Scores of entities: seqeval's on any tags, with intervals of resampled rows, and the mistakes told apart."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import accuracy_score, v1
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from seqeval.scheme import BILOU, IOB2

from tests.conftest import FILES
from workbench.data import tagged_rows
from workbench.data.tagged_rows import EntitySpan, SpanRule
from workbench.evaluation import entity_scores

GENERATOR = np.random.default_rng(0)
Rows = list[list[str]]


@st.composite
def tag_pairs(draw: st.DrawFn, letters: str) -> tuple[Rows, Rows]:
    tag = st.one_of(
        st.just("O"), st.builds("{}-{}".format, st.sampled_from(letters), st.sampled_from(["A", "B", "C-D"]))
    )
    pair = st.lists(st.tuples(tag, tag), min_size=1, max_size=8)
    rows = draw(st.lists(pair, min_size=1, max_size=5))
    return [[own for own, _ in row] for row in rows], [[found for _, found in row] for row in rows]


def of_seqeval(true: Rows, predicted: Rows, rule: SpanRule) -> dict[str, float]:
    # `v1` is what seqeval's `mode="strict"` calls.
    strict = rule != "conlleval"
    score = v1.precision_recall_fscore_support if strict else precision_recall_fscore_support
    options = {"scheme": {"IOB2": IOB2, "BILOU": BILOU}[rule]} if strict else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        micro = score(true, predicted, average="micro", zero_division=0, **options)[:3]
        macro = score(true, predicted, average="macro", zero_division=0, **options)[:3]
    names = ("precision", "recall", "f1")
    macro_by_name = {f"macro_{name}": float(np.nan_to_num(value)) for name, value in zip(names, macro, strict=True)}
    return dict(zip(names, map(float, micro), strict=True)) | macro_by_name


def assert_equals_seqeval(true: Rows, predicted: Rows, rule: SpanRule) -> None:
    found = entity_scores.scores(true, predicted, rule=rule)
    expected = of_seqeval(true, predicted, rule) | {"accuracy": accuracy_score(true, predicted)}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)


@given(tag_pairs("BI"))
def test_scores_are_those_of_seqeval(rows: tuple[Rows, Rows]) -> None:
    assert_equals_seqeval(*rows, "conlleval")
    assert_equals_seqeval(*rows, "IOB2")


@given(tag_pairs("BILU"))
def test_strict_scores_of_bilou_are_those_of_seqeval(rows: tuple[Rows, Rows]) -> None:
    assert_equals_seqeval(*rows, "BILOU")


def test_real_tags_with_some_wrong_ones() -> None:
    source = tagged_rows.read(str(FILES / "tagged" / "wnut17.conll"))
    true = [list(row.tags) for row in source.rows]
    names = tagged_rows.TagSet.of(source.rows, source.scheme).names
    predicted = [[str(GENERATOR.choice(names)) if GENERATOR.random() < 0.1 else tag for tag in row] for row in true]
    for rule in ("conlleval", "IOB2"):
        assert_equals_seqeval(true, predicted, rule)
    perfect = entity_scores.scores(true, true)
    assert perfect["f1"] == perfect["macro_f1"] == perfect["f1_low"] == perfect["accuracy_high"] == 1.0
    found = entity_scores.scores(true, predicted)
    for name in ("precision", "recall", "f1", "macro_f1", "accuracy"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]


@pytest.mark.slow
def test_intervals_are_those_of_drawn_rows() -> None:
    """Scores of rows that are drawn one by one; 400 draws tell a bound to about a fifth of the width."""
    tags = np.asarray(["O", "B-A", "I-A", "B-B"])
    true = [GENERATOR.choice(tags, size=6).tolist() for _ in range(120)]
    predicted = [[tag if GENERATOR.random() < 0.8 else str(GENERATOR.choice(tags)) for tag in row] for row in true]
    found = entity_scores.scores(true, predicted)
    drawn = []
    for own in GENERATOR.integers(120, size=(400, 120)):
        rows = [true[row] for row in own], [predicted[row] for row in own]
        drawn.append([of_seqeval(*rows, "conlleval")[name] for name in ("f1", "macro_f1")])
    for name, values in zip(("f1", "macro_f1"), np.asarray(drawn).T, strict=True):
        low, high = np.quantile(values, [0.025, 0.975])
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx((low, high), abs=0.2 * (high - low))


def test_nothing_to_score_is_zero() -> None:
    found = entity_scores.scores([["O", "O"], ["O"]], [["O", "O"], ["O"]])
    assert found["f1"] == found["macro_f1"] == 0.0 and found["accuracy"] == 1.0
    assert entity_scores.scores([["B-A"]], [["B-A"]]).keys() == {
        *("precision", "recall", "f1", "macro_precision", "macro_recall", "macro_f1", "accuracy")
    }, "one row tells no spread"
    assert entity_scores.scores([], [])["f1"] == 0.0
    with pytest.raises(ValueError, match="row 0 has 2 tags, but 1"):
        entity_scores.scores([["O", "O"]], [["O"]])


TRUE = [["B-A", "I-A", "O", "B-B", "O"], ["B-A", "I-A", "I-A", "O", "B-B"], ["O", "O", "B-A", "I-A", "O"]]
PREDICTED = [["B-A", "I-A", "O", "B-A", "O"], ["B-A", "I-A", "O", "O", "O"], ["B-A", "O", "O", "B-B", "I-B"]]


def test_mistakes_are_told_apart() -> None:
    found = entity_scores.wrong_spans(TRUE, PREDICTED)
    assert [(each.row, each.kind, each.true, each.predicted) for each in found] == [
        (0, "wrong type", EntitySpan(3, 4, "B"), EntitySpan(3, 4, "A")),
        (1, "wrong edges", EntitySpan(0, 3, "A"), EntitySpan(0, 2, "A")),
        (1, "missed", EntitySpan(4, 5, "B"), None),
        (2, "spurious", None, EntitySpan(0, 1, "A")),
        (2, "wrong type and edges", EntitySpan(2, 4, "A"), EntitySpan(3, 5, "B")),
    ]


@given(tag_pairs("BI"))
def test_mistakes_and_right_entities_are_all_entities(rows: tuple[Rows, Rows]) -> None:
    found = entity_scores.EntityCounts.of(*rows)
    wrong = entity_scores.wrong_spans(*rows)
    for total_NE, missing in ((found.true_NE, "spurious"), (found.predicted_NE, "missed")):
        assert found.right_NE.sum() + sum(each.kind != missing for each in wrong) == total_NE.sum()


def test_plain_tags_have_accuracy() -> None:
    true = [["NOUN", "VERB"], ["NOUN", "ADJ", "NOUN"], ["VERB"]]
    predicted = [["NOUN", "VERB"], ["NOUN", "NOUN", ""], ["VERB"]]
    found = entity_scores.tag_scores(true, predicted)
    assert found["accuracy"] == pytest.approx(4 / 6) and found["row_accuracy"] == pytest.approx(2 / 3)
    assert found["accuracy_low"] < found["accuracy"] < found["accuracy_high"]
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3), "of NOUN, VERB and ADJ"
