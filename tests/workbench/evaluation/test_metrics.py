"""Scores of probabilities: equations written again, and what perfect and blind predictions must get."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import f1_score

from workbench.evaluation import metrics
from workbench.evaluation.metrics import rouge_l, token_f1, words

GENERATOR = np.random.default_rng(0)
P = GENERATOR.dirichlet(np.ones(4), size=200)
LABELS = np.array([GENERATOR.choice(4, p=row) for row in P])
TEXTS = st.lists(
    st.sampled_from(["the", "cat", "Cat", "sat", "on", "mat", "!", "猫", "ねこ", "고양이", "über", "7"])
).map(" ".join)
SCORES = pytest.mark.parametrize("score", [token_f1, rouge_l])


def test_the_equations_written_again() -> None:
    found = metrics.probability_scores(P, LABELS)
    truth = P[np.arange(200), LABELS]
    assert found["accuracy"] == pytest.approx((P.argmax(1) == LABELS).mean())
    assert found["log_loss"] == pytest.approx(-np.log(truth).mean())
    assert found["brier"] == pytest.approx(np.mean((P**2).sum(1) - truth**2 + (1 - truth) ** 2))
    f1 = []
    for number in range(4):
        predicted, true = P.argmax(1) == number, number == LABELS
        f1.append(2 * (predicted & true).sum() / (predicted.sum() + true.sum()))
    assert found["macro_f1"] == pytest.approx(np.mean(f1))


def test_perfect_and_blind() -> None:
    perfect = metrics.probability_scores(np.eye(4)[LABELS], LABELS)
    assert (perfect["accuracy"], perfect["macro_f1"], perfect["calibration_error"]) == (1, 1, 0)
    assert perfect["log_loss"] < 1e-9 and perfect["brier"] == 0
    blind = metrics.probability_scores(np.full((200, 4), 0.25), LABELS)
    assert blind["log_loss"] == pytest.approx(np.log(4)) and blind["brier"] == pytest.approx(0.75)


def test_a_mean_that_rounding_puts_above_1_is_scored() -> None:
    p = np.eye(4)[LABELS] * np.nextafter(1.0, 2.0)
    assert metrics.probability_scores(p, LABELS) == metrics.probability_scores(np.eye(4)[LABELS], LABELS)


def test_labels_drawn_from_the_probabilities_are_calibrated_and_sharpened_ones_are_not() -> None:
    p = GENERATOR.dirichlet(np.ones(3), size=20_000)
    labels = (p.cumsum(1) > GENERATOR.random((20_000, 1))).argmax(1)
    sharp = p**4 / (p**4).sum(1, keepdims=True)
    assert metrics.calibration_error(p, labels) < 0.015 < 0.1 < metrics.calibration_error(sharp, labels)


def test_two_classes_have_an_area_under_the_curve() -> None:
    p = GENERATOR.random(100)
    labels = (GENERATOR.random(100) < p).astype(np.int64)
    positives, negatives = p[labels == 1], p[labels == 0]
    wanted = (positives[:, None] > negatives[None]).mean()
    assert metrics.probability_scores(np.stack((1 - p, p), 1), labels)["roc_auc"] == pytest.approx(wanted)
    assert "roc_auc" not in metrics.probability_scores(P, LABELS)


@given(st.integers(1, 400), st.floats(0, 1))
def test_the_interval_holds_its_mean_and_narrows(rows: int, share: float) -> None:
    hits = round(share * rows)
    found, more = metrics.accuracy_interval(hits, rows), metrics.accuracy_interval(100 * hits, 100 * rows)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert more.high - more.low < found.high - found.low


@given(st.integers(1, 400), st.integers(0, 800))
def test_the_interval_is_wilsons_and_moves_with_half_a_hit(rows: int, halves: int) -> None:
    hits = min(halves, 2 * rows) / 2
    whole = math.floor(hits)
    bounds = stats.binomtest(whole, rows).proportion_ci(method="wilson")
    found = metrics.accuracy_interval(whole, rows)
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high), abs=1e-12)
    if whole < hits:
        between = metrics.accuracy_interval(hits, rows)
        assert found.low < between.low and found.high < between.high


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = GENERATOR.binomial(50, 0.9, size=4000)
    found = [metrics.accuracy_interval(int(n), 50) for n in hits]
    assert 0.93 < np.mean([each.low <= 0.9 <= each.high for each in found]) < 0.98


@pytest.mark.parametrize(
    "classes", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(11, marks=pytest.mark.slow)]
)
def test_f1_is_that_of_drawn_rows(classes: int) -> None:
    """scikit-learn's score of rows that are drawn one by one; 400 draws tell a bound to about a tenth of the width."""
    true_N = GENERATOR.integers(classes, size=150)
    predicted_N = np.where(GENERATOR.random(150) < 0.6, true_N, GENERATOR.integers(classes, size=150))
    names = np.arange(classes)
    found = metrics.f1_intervals(true_N[:, None] == names, predicted_N[:, None] == names)
    drawn = GENERATOR.integers(150, size=(400, 150))
    for average in ("micro", "macro"):
        written = [f1_score(true_N[own], predicted_N[own], average=average) for own in drawn]
        low, high = np.quantile(written, [0.025, 0.975])
        assert found[f"{average}_f1"] == pytest.approx((low, high), abs=0.2 * (high - low))
        score = f1_score(true_N, predicted_N, average=average)
        assert found[f"{average}_f1"][0] < score < found[f"{average}_f1"][1]


def test_several_classes_of_a_row_are_drawn_together() -> None:
    """Rows whose classes are all right or all wrong: so many rows vary as much as one class of each would."""
    right_N = GENERATOR.random(200) < 0.7
    true_NC = np.ones((200, 8), dtype=bool)
    low, high = metrics.f1_intervals(true_NC, np.repeat(right_N[:, None], 8, axis=1))["micro_f1"]
    one_low, one_high = metrics.f1_intervals(true_NC[:, :1], right_N[:, None])["micro_f1"]
    assert (low, high) == pytest.approx((one_low, one_high))


def test_a_class_that_nothing_has_counts_as_in_the_score() -> None:
    """Three of four classes, all right: macro-F1 is 0.75 in the set and in each of its resamples."""
    true_NC = np.eye(4, dtype=bool)[np.arange(60) % 3]
    assert metrics.f1_intervals(true_NC, true_NC) == {"micro_f1": (1.0, 1.0), "macro_f1": (0.75, 0.75)}
    assert metrics.f1_intervals(true_NC[:2], ~true_NC[:2] & False)["micro_f1"] == (0.0, 0.0)


def test_means_have_the_width_of_the_normal_interval() -> None:
    value_NS = GENERATOR.normal(size=(500, 2)) * [1.0, 3.0]
    found = metrics.bootstrap_means(("a", "b"), value_NS)
    for name, value_N in zip("ab", value_NS.T, strict=True):
        assert found[name] == pytest.approx(value_N.mean())
        assert found[f"{name}_high"] - found[f"{name}_low"] == pytest.approx(
            2 * 1.96 * value_N.std() / np.sqrt(500), rel=0.1
        )
    assert found == metrics.bootstrap_means(("a", "b"), value_NS), "of one seed"
    assert metrics.bootstrap_means(("a", "b"), value_NS[:1]).keys() == {"a", "b"}, "one row tells no spread"


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
