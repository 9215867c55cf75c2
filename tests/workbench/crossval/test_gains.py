"""The gate by simulation: how often it takes noise for a gain, and what it finds; summaries against equations.

Each simulation draws many samples from one truth, so that a rate has a bound that chance explains.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import optimize, special, stats

from workbench.config.sections import metrics
from workbench.crossval import ensembles, gains
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores

ONE = Labels("one", ("a", "b", "c"))
TWO = Labels("one", ("a", "b"))
SEVERAL = Labels("several", ("a", "b", "c"))
NUMBER = Labels("number", ("value",), mean=10.0, scale=4.0)
SEEDS = 400
MOST = 0.05
"""Of changes that do nothing. An interval is meant to let 2.5 of 100 through; 400 seeds show up to 4.5 by chance."""

OneHot = np.ndarray
Change = Callable[[np.random.Generator], tuple[Floats, Floats, OneHot]]


def _accepted(labels: Labels, draw: Change, *, seeds: int = SEEDS) -> float:
    found = [gains.gain(labels, *draw(np.random.default_rng(seed))).accepted for seed in range(seeds)]
    return float(np.mean(found))


def _hot(labels: Labels, p: Floats, chance: np.random.Generator) -> OneHot:
    if labels.kind == "several":
        return (chance.random(p.shape) < p).astype(np.float32)
    drawn = (chance.random((len(p), 1)) > p.cumsum(1)[:, :-1]).sum(1)
    return np.eye(p.shape[1], dtype=np.float32)[drawn]


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
@pytest.mark.parametrize("rows", [20, 200])
def test_noise_is_refused(labels: Labels, rows: int) -> None:
    """Two models that are equally far from the truth, each in its own direction."""

    def draw(chance: np.random.Generator) -> tuple[Floats, Floats, OneHot]:
        true = chance.normal(size=(rows, len(labels.names)))
        a, b = (labels.values(true + 0.5 * chance.normal(size=true.shape)) for _ in range(2))
        wanted = true if labels is NUMBER else _hot(labels, labels.values(2 * true), chance)
        return a, b, wanted.astype(np.float32)

    assert _accepted(labels, draw) <= MOST


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("wrong", [0.005, 0.02, 0.2])
@pytest.mark.parametrize("rows", [40, 100, 300])
def test_confidence_that_is_no_gain_is_refused(wrong: float, rows: int) -> None:
    """The hard null: most rows get a little better, a rare wrong one much worse, and the sum is zero.

    Of 40 rows, 82 of 100 samples hold no wrong one at all where 0.5 % are, so that every row got better.
    """

    def risk(p: float) -> float:
        return -(1 - wrong) * np.log(p) - wrong * np.log(1 - p)

    before = 1 - 1.5 * wrong
    after = optimize.brentq(lambda p: risk(p) - risk(before), 1 - wrong, 1 - 1e-12)

    def draw(chance: np.random.Generator) -> tuple[Floats, Floats, OneHot]:
        wanted = np.eye(2, dtype=np.float32)[(chance.random(rows) < wrong).astype(int)]
        modest, sure = (np.tile([p, 1 - p], (rows, 1)) for p in (before, after))
        return modest, sure, wanted

    assert _accepted(TWO, draw) <= MOST


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
def test_a_real_gain_is_found(labels: Labels) -> None:
    """A mean of four models against one of them: less noise, other rows right."""

    def draw(chance: np.random.Generator) -> tuple[Floats, Floats, OneHot]:
        true = 2 * chance.normal(size=(300, len(labels.names)))
        models = true + 1.5 * chance.normal(size=(4, *true.shape))
        wanted = true if labels is NUMBER else _hot(labels, labels.values(true), chance)
        return labels.values(models[0]), labels.values(models.mean(0)), wanted.astype(np.float32)

    assert _accepted(labels, draw, seeds=100) >= 0.95


def test_overconfidence_is_refused_although_no_row_changes_sides() -> None:
    chance = np.random.default_rng(0)
    outputs = 2 * chance.normal(size=(500, 3))
    hot = _hot(ONE, ONE.values(outputs), chance)
    found = gains.gain(ONE, ONE.values(outputs), ONE.values(3 * outputs), hot)
    assert found.accuracy_before == found.accuracy_after
    assert found.low > 0 and not found.accepted and "does not fall" in found.sentence


def test_fewer_right_rows_are_refused_although_the_loss_falls() -> None:
    """A softer answer that loses the close calls: better log-likelihood, 40 of 400 rows fewer right."""
    hot = np.eye(2, dtype=np.float32)[np.zeros(400, dtype=int)]
    before, after = np.tile([0.51, 0.49], (400, 1)), np.tile([0.9, 0.1], (400, 1))
    after[:40] = [0.45, 0.55]
    found = gains.gain(TWO, before, after, hot)
    assert found.high < 0 and not found.accepted and "fewer rows are right" in found.reason
    after[3:40] = 0.9, 0.1  # three rows may be chance
    assert gains.gain(TWO, before, after, hot).accepted


def test_a_stage_that_only_overfits_is_refused_once_it_is_cross_fitted() -> None:
    """Least squares on forty columns of noise lowers the error of its own rows nearly always, of others never."""
    own, crossed = [], []
    for seed in range(60):
        chance = np.random.default_rng(seed)
        said, noise = chance.normal(size=(200, 1)), chance.normal(size=(200, 40))
        wanted = said + chance.normal(size=said.shape)
        rest = wanted - said

        def fit(mask: np.ndarray, noise: Floats = noise, rest: Floats = rest) -> Floats:
            return np.linalg.lstsq(noise[mask], rest[mask], rcond=None)[0]

        def apply(fitted: Floats, mask: np.ndarray, noise: Floats = noise, values: Floats = said) -> Floats:
            return NUMBER.values(values[mask] + noise[mask] @ fitted)

        every, hot = np.ones(200, dtype=bool), wanted.astype(np.float32)
        honest = ensembles.cross_fitted(np.arange(200) % 5, fit, apply)
        own.append(gains.gain(NUMBER, NUMBER.values(said), apply(fit(every), every), hot).accepted)
        crossed.append(gains.gain(NUMBER, NUMBER.values(said), honest, hot).accepted)
    assert np.mean(own) > 0.9 and not any(crossed)


def test_duplicates_are_one_witness() -> None:
    """Fifteen copies of each row: the interval knows no more than from one copy, and noise stays refused."""

    def draw(seed: int) -> tuple[Floats, Floats, OneHot]:
        chance = np.random.default_rng(seed)
        true = chance.normal(size=(40, 3))
        a, b = (ONE.values(true + 0.5 * chance.normal(size=true.shape)) for _ in range(2))
        return a, b, _hot(ONE, ONE.values(true), chance)

    accepted = {True: 0, False: 0}
    for seed in range(SEEDS):
        rows = draw(seed)
        copies = tuple(np.repeat(each, 15, axis=0) for each in rows)
        grouped = gains.gain(ONE, *copies, groups_N=np.repeat([f"cluster {n}" for n in range(40)], 15))
        once = gains.gain(ONE, *rows)
        assert (grouped.low, grouped.high) == pytest.approx((once.low, once.high), rel=1e-9)
        assert grouped.accepted == once.accepted
        for grouping, found in ((True, grouped), (False, gains.gain(ONE, *copies))):
            accepted[grouping] += found.accepted
    assert accepted[True] / SEEDS <= MOST < 0.2 < accepted[False] / SEEDS


def test_the_interval_covers_the_truth_and_is_students_where_nothing_is_skewed() -> None:
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(SEEDS):
        change = chance.exponential(size=60) - 1  # skewness 2
        low, high = gains._interval(change)
        covered += low <= 0 <= high
    assert covered / SEEDS == pytest.approx(0.95, abs=0.03)
    even = np.concatenate([change, -change])
    wanted = stats.t.interval(0.95, 119, loc=0, scale=stats.sem(even))
    assert gains._interval(even) == pytest.approx(wanted)


def test_nothing_changed_is_no_gain() -> None:
    p = special.softmax(np.random.default_rng(0).normal(size=(30, 3)), axis=1)
    found = gains.gain(ONE, p, p, np.eye(3, dtype=np.float32)[np.arange(30) % 3])
    assert (found.difference, found.low, found.high, found.accepted) == (0, 0, 0, False)


def test_who_need_not_be_sure_takes_what_looks_better() -> None:
    """Noise looks better half of the time; what is told of it does not depend on how sure one wants to be."""
    taken = {0.0: 0, 0.5: 0, 0.95: 0}
    for seed in range(100):
        chance = np.random.default_rng(seed)
        true = chance.normal(size=(200, 3))
        a, b = (ONE.values(true + 0.5 * chance.normal(size=true.shape)) for _ in range(2))
        wanted = _hot(ONE, ONE.values(2 * true), chance)
        found = {sure: gains.gain(ONE, a, b, wanted, sure=sure) for sure in taken}
        accepted = [each.accepted for each in found.values()]
        assert (
            accepted == sorted(accepted, reverse=True) and len({(each.low, each.high) for each in found.values()}) == 1
        )
        assert found[0.0].difference < 0 or not found[0.0].accepted
        for sure, each in found.items():
            taken[sure] += each.accepted
    assert 35 <= taken[0.0] <= 60 and 15 <= taken[0.5] < taken[0.0] and taken[0.95] <= 8


def test_least_is_asked_of_the_loss() -> None:
    chance = np.random.default_rng(0)
    true = 2 * chance.normal(size=(400, 3))
    hot = _hot(ONE, ONE.values(true), chance)
    before, after = ONE.values(0.3 * true), ONE.values(true)
    fall = -gains.gain(ONE, before, after, hot).difference
    assert gains.gain(ONE, before, after, hot, least=fall * 0.99).accepted
    found = gains.gain(ONE, before, after, hot, least=fall * 1.01)
    assert not found.accepted and "asked for" in found.sentence
    json.dumps(asdict(found), allow_nan=False)


def test_one_group_is_no_sample() -> None:
    p, hot = np.full((4, 2), 0.5), np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]
    with pytest.raises(ValueError, match="two groups"):
        gains.gain(TWO, p, p, hot, groups_N=np.zeros(4))


def test_numbers_have_no_accuracy() -> None:
    true = np.random.default_rng(0).normal(size=(50, 1)).astype(np.float32)
    found = gains.gain(NUMBER, NUMBER.values(true + 1.0), NUMBER.values(true + 0.1), true)
    assert found.accepted and found.accuracy_before is None and "accuracy" not in found.sentence
    assert (found.loss_before, found.loss_after) == pytest.approx((1, 0.01), rel=1e-4)


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
def test_losses_of_values_are_those_of_outputs(labels: Labels) -> None:
    chance = np.random.default_rng(0)
    outputs = 5 * chance.normal(size=(50, len(labels.names)))
    wanted = outputs if labels is NUMBER else _hot(labels, labels.values(0 * outputs), chance)
    found = gains.row_losses(labels, labels.values(outputs), wanted.astype(np.float32) + (labels is NUMBER))
    assert found.shape == (50,)
    assert found.mean() == pytest.approx(
        classification_scores.loss(labels, outputs, wanted.astype(np.float32) + (labels is NUMBER))
    )


@pytest.mark.parametrize("labels", [TWO, Labels("several", ("a", "b"))])
def test_certain_and_wrong_is_dear_but_finite(labels: Labels) -> None:
    hot = np.array([[1, 0]], dtype=np.float32)
    wrong = gains.row_losses(labels, np.array([[0.0, 1.0]]), hot)
    assert np.isfinite(wrong).all() and wrong[0] > 700
    assert gains.row_losses(labels, np.array([[1.0, 0.0]]), hot)[0] == pytest.approx(0, abs=1e-12)


def test_a_summary_written_out() -> None:
    folds = [{"accuracy": 0.8, "roc_auc": 0.7}, {"accuracy": 0.9}, {"accuracy": 0.7, "roc_auc": 0.9}]
    found = gains.fold_summary(folds, train_rows=80, test_rows=40)
    reach = 4.302653 * 0.1 * np.sqrt(1 / 3 + 40 / 80)  # t of 2 degrees of freedom
    wanted = {"mean": 0.8, "spread": 0.1, "low": 0.8 - reach, "high": 0.8 + reach}
    assert list(found) == ["accuracy"] and found["accuracy"] == pytest.approx(wanted)
    with pytest.raises(ValueError, match="two folds"):
        gains.fold_summary(folds[:1], train_rows=80, test_rows=40)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [50, 100])
def test_few_rows_let_no_more_noise_through_than_the_interval_says(rows: int) -> None:
    """Predictions that are sure of themselves: a few rows decide, and whether these are skewed is chance."""

    def draw(chance: np.random.Generator) -> tuple[Floats, Floats, OneHot]:
        true = 4 * chance.normal(size=(rows, 3))
        a, b = (ONE.values(true + 2 * chance.normal(size=true.shape)) for _ in range(2))
        return a, b, _hot(ONE, ONE.values(true), chance)

    draws, nominal = 2000, 0.025
    assert _accepted(ONE, draw, seeds=draws) <= nominal + 2 * (nominal * (1 - nominal) / draws) ** 0.5


@pytest.mark.parametrize(("gained", "reason"), [(0.05, "chance may explain"), (0.3, "")])
def test_a_metric_decides_in_place_of_the_loss(gained: float, reason: str) -> None:
    """A share of the wrong rows becomes right while all rows become less likely, so that the loss rises."""
    chance, labels = np.random.default_rng(0), replace(TWO, metric=metrics.choice("map@1", None))
    wanted_NC = np.eye(2, dtype=np.float32)[chance.integers(2, size=200)]
    right_N = chance.random(200) < 0.6
    before_NC, after_NC = (
        np.where((own_N[:, None]) == (wanted_NC > 0.5), sure, 1 - sure)
        for own_N, sure in ((right_N, 0.6), (right_N | (chance.random(200) < gained), 0.95))
    )
    found = gains.gain(labels, before_NC, after_NC, wanted_NC)
    assert found.difference > 0 and found.accepted == (not reason) and reason in found.reason
    assert "precision at 1" in found.sentence


def test_a_metric_says_how_many_rows_would_tell() -> None:
    """Two rows of a hundred become right and one wrong: so often, 1.96 deviations are reached after 1,153 rows."""
    wanted_NC = np.eye(2, dtype=np.float32)[np.arange(100) % 2]
    before_NC, after_NC = 0.2 + 0.6 * wanted_NC, 0.2 + 0.6 * wanted_NC
    before_NC[:2], after_NC[2] = before_NC[:2, ::-1], after_NC[2, ::-1]
    found = gains.gain(replace(TWO, metric=metrics.choice("accuracy", None)), before_NC, after_NC, wanted_NC)
    assert not found.accepted
    rows = int(found.reason.partition("about ")[2].partition(" rows")[0].replace(",", ""))
    assert 0.8 * 1153 < rows < 1.25 * 1153, "the deviation is that of 400 permutations"
    worse = gains.gain(replace(TWO, metric=metrics.choice("accuracy", None)), after_NC, before_NC, wanted_NC)
    assert not worse.accepted and "rows would tell" not in worse.reason
