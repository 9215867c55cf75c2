"""Answer scores: bounded, symmetric, 1 for the same words, and fair to scripts that write no spaces."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.evaluation.text_overlap import rouge_l, token_f1, words

TEXTS = st.lists(
    st.sampled_from(["the", "cat", "Cat", "sat", "on", "mat", "!", "猫", "ねこ", "고양이", "über", "7"])
).map(" ".join)
SCORES = pytest.mark.parametrize("score", [token_f1, rouge_l])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat, a cat & AN end.", ["cat", "cat", "end"]),
        ("It's 3.5", ["it", "s", "3", "5"]),
        ("snake_case", ["snake", "case"]),
        ("猫が好き", ["猫", "が", "好", "き"]),
        ("한국 말", ["한", "국", "말"]),
        ("iPhone猫2", ["iphone", "猫", "2"]),
        ("straße ÉTÉ", ["straße", "été"]),
        ("... !?", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(TEXTS, TEXTS)
@SCORES
def test_scores_are_bounded_and_symmetric(score: object, one: str, other: str) -> None:
    assert callable(score)
    found = score(one, other)
    assert 0 <= found <= 1
    assert found == pytest.approx(score(other, one))


@given(st.text())
@SCORES
def test_an_answer_equals_itself_whatever_its_case_and_punctuation(score: object, text: str) -> None:
    assert callable(score)
    same = score(f"  {text} ...", text)
    # Without a word there is nothing to compare: for F1 two empty answers are the same.
    assert same == pytest.approx(1.0 if words(text) or score is token_f1 else 0.0)


@given(TEXTS, TEXTS)
def test_f1_is_that_of_precision_and_recall(prediction: str, reference: str) -> None:
    found, wanted = Counter(words(prediction)), Counter(words(reference))
    shared = (found & wanted).total()
    if not shared:
        assert token_f1(prediction, reference) == float(found == wanted)
        return
    precision, recall = shared / found.total(), shared / wanted.total()
    assert token_f1(prediction, reference) == pytest.approx(2 * precision * recall / (precision + recall))


class _Words:
    """The interface that rouge_score expects of a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


@pytest.fixture(scope="module")
def scorer() -> Any:
    return pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=_Words())


@given(prediction=TEXTS, reference=TEXTS)
def test_rouge_l_is_that_of_rouge_score_to_the_last_bit(scorer: Any, prediction: str, reference: str) -> None:
    assert rouge_l(prediction, reference) == scorer.score(reference, prediction)["rougeL"].fmeasure
    assert rouge_l(prediction, reference) <= token_f1(prediction, reference) + 1e-9


def test_order_matters_to_rouge_l_alone() -> None:
    assert token_f1("mat on sat cat", "cat sat on mat") == 1.0
    assert rouge_l("mat on sat cat", "cat sat on mat") == 0.25


def test_parts_of_a_chinese_answer_count() -> None:
    assert token_f1("我喜欢猫", "我喜欢狗") == pytest.approx(0.75)
    assert rouge_l("我喜欢猫", "我喜欢狗") == pytest.approx(0.75)
    assert token_f1("猫", "狗") == 0.0
