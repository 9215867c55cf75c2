"""Blends against the equations: least loss of a mean, logistic regression; random labels gain nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import special
from sklearn.linear_model import LogisticRegression

from workbench.config.sections import metrics
from workbench.crossval import blends, ensembles, gains
from workbench.crossval.blends import HOWS, Blend, How
from workbench.data.labelled.labels import Floats, Labels

ONE = Labels("one", ("a", "b", "c"))
KINDS = [ONE, Labels("one", ("a", "b")), Labels("several", ("a", "b", "c")), Labels("number", ("value",), 10.0, 4.0)]


def parts_of(
    labels: Labels, rows: int, *, noise: tuple[float, ...] = (0.5, 1.0, 3.0), seed: int = 0
) -> tuple[Floats, Floats]:
    """Values of parts that know the truth less and less, and targets drawn from it."""
    chance = np.random.default_rng(seed)
    true_NC = 2 * chance.normal(size=(rows, len(labels.names)))
    values = np.stack([labels.values(true_NC + each * chance.normal(size=true_NC.shape)) for each in noise])
    if labels.kind == "number":
        return values, true_NC.astype(np.float32)
    if labels.kind == "several":
        return values, (chance.random(true_NC.shape) < special.expit(true_NC)).astype(np.float32)
    drawn_N = (true_NC + chance.gumbel(size=true_NC.shape)).argmax(1)
    return values, np.eye(len(labels.names), dtype=np.float32)[drawn_N]


@pytest.mark.parametrize("labels", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_a_blend_is_no_worse_on_its_rows_and_the_same_from_its_file(labels: Labels, how: How) -> None:
    values_PNC, targets_NC = parts_of(labels, 60)
    fitted = blends.fit(how, labels, values_PNC, targets_NC)
    said_NC = fitted.values(labels, values_PNC)
    again = Blend.from_facts(json.loads(json.dumps(fitted.facts)))
    np.testing.assert_array_equal(again.values(labels, values_PNC), said_NC)
    if labels.kind == "one":
        np.testing.assert_allclose(said_NC.sum(1), 1)
    if how != "mean":
        mean_NC = blends.fit("mean", labels, values_PNC, targets_NC).values(labels, values_PNC)
        bound = values_PNC[0] if how == "best" else mean_NC
        # Stacking reads probabilities of at least LEAST, and is drawn to small coefficients.
        slack = 0.02 if how == "stacking" else 1e-6
        assert ensembles.cost(labels, said_NC, targets_NC) <= ensembles.cost(labels, bound, targets_NC) + slack


def test_convex_weights_are_where_no_step_lowers_the_loss() -> None:
    values_PNC, targets_NC = parts_of(ONE, 200)
    weights_P = blends.fit("convex", ONE, values_PNC, targets_NC).weights_P
    # At the least loss of a mean each part with a weight has the mean ratio 1 to the mixture, others less.
    own_PN = (values_PNC * targets_NC).sum(2)
    ratio_P = (own_PN / (weights_P[:, None] * own_PN).sum(0)).mean(1)
    np.testing.assert_allclose(ratio_P[weights_P > 0], 1, atol=0.01)
    assert (ratio_P[weights_P == 0] <= 1.01).all() and weights_P.sum() == pytest.approx(1)


def test_convex_weights_follow_the_metric() -> None:
    judged = replace(ONE, metric=metrics.choice("macro_f1", None))
    values_PNC, targets_NC = parts_of(ONE, 80, noise=(1.0, 1.2, 1.4), seed=3)
    by_loss, by_score = (
        ensembles.cost(judged, blends.fit("convex", each, values_PNC, targets_NC).values(ONE, values_PNC), targets_NC)
        for each in (ONE, judged)
    )
    assert by_score < by_loss  # minus macro-F1


def test_stacking_is_logistic_regression_on_log_probabilities() -> None:
    values_PNC, targets_NC = parts_of(ONE, 5000, noise=(0.5, 1.0))
    said_NC = blends.fit("stacking", ONE, values_PNC, targets_NC).values(ONE, values_PNC)
    inputs_NF = np.concatenate(list(np.log(values_PNC)), axis=1).clip(np.log(blends.LEAST))
    theirs_NC = LogisticRegression(max_iter=1000).fit(inputs_NF, targets_NC.argmax(1)).predict_proba(inputs_NF)
    np.testing.assert_allclose(said_NC, theirs_NC, atol=2e-3)


def test_stacking_knows_a_class_that_no_row_of_the_other_folds_has() -> None:
    values_PNC, targets_NC = parts_of(ONE, 30)
    rare = targets_NC[:, 2] > 0.5
    said_NC = blends.out_of_fold("stacking", ONE, values_PNC, targets_NC, np.where(rare, "rare", "other"))
    assert np.isfinite(np.log(said_NC)).all()


def null_rate(how: How, seeds: range, *, rows: int = 100) -> float:
    """Share of samples with random labels in which a cross-fitted blend passes the gate."""
    accepted = []
    for seed in seeds:
        values_PNC, _ = parts_of(ONE, rows, seed=seed)
        chance = np.random.default_rng([seed, 1])
        targets_NC = np.eye(3, dtype=np.float32)[chance.integers(3, size=rows)]
        fold_N = chance.integers(5, size=rows)
        after_NC = blends.out_of_fold(how, ONE, values_PNC, targets_NC, fold_N)
        prior_NC = np.full_like(after_NC, 1 / 3)
        accepted.append(gains.gain(ONE, prior_NC, after_NC, targets_NC).accepted)
    return float(np.mean(accepted))


@pytest.mark.slow
@pytest.mark.nightly(but=["mean", "stacking"])
@pytest.mark.parametrize("how", ["mean", "greedy", "convex", "stacking"])
def test_random_labels_gain_nothing(how: How) -> None:
    """Against saying that all classes are equally likely."""
    assert null_rate(how, range(200)) <= 0.05
