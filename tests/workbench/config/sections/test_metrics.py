"""Metrics against scikit-learn's, and names that are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from workbench.config.sections import metrics
from workbench.config.sections.metrics import METRICS, JudgedRows

ROWS = 24


def rows(seed: int, classes: int, *, several: bool = False, ties: bool = False) -> JudgedRows:
    """Rows that have every class, with probabilities that are equal in places where `ties`."""
    generator = np.random.default_rng(seed)
    p_NC = generator.dirichlet(np.ones(classes), ROWS)
    p_NC = np.clip(np.round(p_NC * 4) / 4, 1e-9, 1 - 1e-9) if ties else p_NC
    if several:
        true_NC = generator.random((ROWS, classes)) < 0.4
        true_NC[0], true_NC[1] = True, False
        return JudgedRows(true_NC, p_NC >= 0.5, p_NC, np.empty(0))
    p_NC /= p_NC.sum(1, keepdims=True)
    true_N = np.concatenate([np.arange(classes), generator.integers(classes, size=ROWS - classes)])
    return JudgedRows(true_N, p_NC.argmax(1), p_NC, np.arange(classes).astype(float))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 5), ties=st.booleans())
def test_scores_of_one_class_are_those_of_scikit_learn(seed: int, classes: int, ties: bool) -> None:
    own = rows(seed, classes, ties=ties)
    true_N, said_N, p_NC = own[:3]
    scores = p_NC[:, 1] if classes == 2 else p_NC
    hot_NC = true_N[:, None] == np.arange(classes)
    wanted = {
        "accuracy": sk.accuracy_score(true_N, said_N),
        "macro_f1": sk.f1_score(true_N, said_N, average="macro"),
        "micro_f1": sk.f1_score(true_N, said_N, average="micro"),
        "weighted_f1": sk.f1_score(true_N, said_N, average="weighted"),
        "roc_auc": sk.roc_auc_score(true_N, scores, multi_class="ovr"),
        "average_precision": sk.average_precision_score(
            true_N == 1 if classes == 2 else hot_NC, scores, average="macro"
        ),
        "log_loss": sk.log_loss(true_N, p_NC),
        "mcc": sk.matthews_corrcoef(true_N, said_N),
        "qwk": sk.cohen_kappa_score(true_N, said_N, weights="quadratic"),
    }
    assert {name: METRICS[name].score(own) for name in wanted} == pytest.approx(wanted)
    assert set(wanted) == {name for name, metric in METRICS.items() if "one" in metric.kinds}
    if not ties:  # scikit-learn ranks ties together
        every = metrics.named(f"map@{classes}")
        assert every is not None
        assert every.score(own) == pytest.approx(sk.label_ranking_average_precision_score(hot_NC, p_NC))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 4), ties=st.booleans())
def test_scores_of_several_classes_are_those_of_scikit_learn(seed: int, classes: int, ties: bool) -> None:
    own = rows(seed, classes, several=True, ties=ties)
    true_NC, said_NC, p_NC = own[:3]
    wanted = {
        "accuracy": sk.accuracy_score(true_NC, said_NC),
        **{f"{how}_f1": sk.f1_score(true_NC, said_NC, average=how, zero_division=0.0) for how in ("macro", "micro")},
        "weighted_f1": sk.f1_score(true_NC, said_NC, average="weighted", zero_division=0.0),
        "roc_auc": sk.roc_auc_score(true_NC, p_NC, average="macro"),
        "average_precision": sk.average_precision_score(true_NC, p_NC, average="macro"),
        "log_loss": np.mean([sk.log_loss(true_NC[:, c], p_NC[:, c]) for c in range(classes)]),
    }
    assert {name: METRICS[name].score(own) for name in wanted} == pytest.approx(wanted)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_scores_of_numbers_are_those_of_scikit_learn(seed: int) -> None:
    generator = np.random.default_rng(seed)
    true_N = np.concatenate([[0.0, 5.0], generator.integers(0, 6, ROWS).astype(float)])
    said_N = true_N + generator.normal(size=len(true_N))
    own = JudgedRows(true_N, said_N, said_N[:, None], np.empty(0))
    wanted = {
        "mae": sk.mean_absolute_error(true_N, said_N),
        "rmse": sk.root_mean_squared_error(true_N, said_N),
        "r2": sk.r2_score(true_N, said_N),
        "qwk": sk.cohen_kappa_score(
            true_N.astype(int), np.rint(said_N).astype(int), weights="quadratic", labels=range(-9, 15)
        ),
        "spearman": np.corrcoef(stats.rankdata(true_N), stats.rankdata(said_N))[0, 1],
    }
    assert {name: METRICS[name].score(own) for name in wanted} == pytest.approx(wanted)
    assert METRICS["spearman"].score(own._replace(predicted=np.zeros_like(said_N))) == 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(3, 6))
def test_a_class_that_no_row_has_counts_as_scikit_learn_counts_a_label_that_it_is_told_of(
    seed: int, classes: int
) -> None:
    own = rows(seed, classes)
    p_NC, every = own.p_NC.copy(), range(classes)
    p_NC[:, -2] = 1e-9  # one is never predicted, and one no row has
    own = JudgedRows(own.true % (classes - 1), p_NC.argmax(1), p_NC / p_NC.sum(1, keepdims=True), own.steps)
    true_N, said_N = own[:2]
    wanted = {
        f"{how}_f1": sk.f1_score(true_N, said_N, average=how, labels=every, zero_division=0.0)
        for how in ("macro", "micro", "weighted")
    }
    wanted |= {
        "accuracy": sk.accuracy_score(true_N, said_N),
        "log_loss": sk.log_loss(true_N, own.p_NC, labels=every),
        "mcc": sk.matthews_corrcoef(true_N, said_N),
        "qwk": sk.cohen_kappa_score(true_N, said_N, labels=every, weights="quadratic"),
    }
    assert {name: METRICS[name].score(own) for name in wanted} == pytest.approx(wanted)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 4))
def test_map_is_that_of_labels_written_out(seed: int, k: int) -> None:
    """Classes that are equally likely stand in the order of their names."""
    own, found = rows(seed, 5, several=True, ties=True), metrics.named(f"map@{k}")
    assert found is not None
    total = 0.0
    for has_C, p_C in zip(own.true, own.p_NC, strict=True):
        order = sorted(range(5), key=lambda c: (-p_C[c], c))[:k]
        hits = [has_C[c] for c in order]
        precisions = [sum(hits[: place + 1]) / (place + 1) for place in range(len(hits)) if hits[place]]
        total += sum(precisions) / max(1, min(int(has_C.sum()), k))
    assert found.score(own) == pytest.approx(total / len(own.true))


def test_kappa_looks_at_the_places_of_classes_on_their_scale() -> None:
    """Classes 0, 1 and 4: scikit-learn knows that 2 and 3 lie between where it is told."""
    own = rows(3, 3)._replace(steps=np.array([0.0, 1.0, 4.0]))
    true_N, said_N = (own.steps[each].astype(int) for each in (own.true, own.predicted))
    wanted = sk.cohen_kappa_score(true_N, said_N, weights="quadratic", labels=range(5))
    assert METRICS["qwk"].score(own) == pytest.approx(wanted)


def test_map_counts_hits_up_to_its_rank() -> None:
    hits = metrics.named("map@2")
    assert hits is not None
    p_NC = np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    own = JudgedRows(np.array([0, 1, 2]), np.zeros(3), p_NC, np.empty(0))
    assert hits.score(own) == pytest.approx((1 + 1 / 2 + 0) / 3)
    several = JudgedRows(np.array([[True, False, True]]), np.zeros((1, 3)), p_NC[:1], np.empty(0))
    assert hits.score(several) == pytest.approx(1 / 2)  # one of two within the first two


@pytest.mark.parametrize("name", ["auc", "map@0", "map@", "", "metric.py", "metric.py:", "metric.py:a b", "m.py:rmse"])
def test_what_names_no_metric_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no metric|without its function|names another score"):
        metrics.choice(name, None)
