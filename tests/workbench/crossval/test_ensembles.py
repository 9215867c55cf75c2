"""Merging and greedy weights: what each way is by definition, and what it must not depend on.

Temperatures against what they must undo, and that no row is judged by a fit that saw it.
"""

from __future__ import annotations

import numpy as np
import pytest

from workbench.crossval import ensembles, gains
from workbench.crossval.ensembles import Combiner, Merging
from workbench.data.folds.stratified_folds import Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError
from workbench.evaluation import classification_scores

ONE = Labels("one", ("a", "b", "c"))
PAIR = Labels("pair", ("a", "b", "tie"))
SEVERAL = Labels("several", ("a", "b", "c"))
NUMBER = Labels("number", ("value",), mean=10.0, scale=4.0)
KINDS = [ONE, PAIR, SEVERAL, NUMBER]
HOWS: list[Merging] = ["mean", "geometric", "rank", "max"]
EVERY = [(labels, how) for labels in KINDS for how in HOWS if labels is not NUMBER or how == "mean"]


def _members(labels: Labels, *, members: int = 4, rows: int = 30, seed: int = 0) -> Floats:
    chance = np.random.default_rng(seed)
    return np.stack([labels.values(chance.normal(size=(rows, len(labels.names)))) for _ in range(members)])


def _hot(labels: Labels, rows: int, seed: int = 1) -> np.ndarray:
    chance = np.random.default_rng(seed)
    if labels.kind == "number":
        return chance.normal(size=(rows, 1)).astype(np.float32)
    if labels.kind == "several":
        return (chance.random((rows, 3)) < 0.4).astype(np.float32)
    return np.eye(3, dtype=np.float32)[chance.integers(0, 3, rows)]


@pytest.mark.parametrize(("labels", "how"), EVERY)
def test_rows_stay_probabilities_and_members_have_no_order(labels: Labels, how: Merging) -> None:
    values = _members(labels)
    found = ensembles.merge(labels.kind, values, how)
    np.testing.assert_allclose(ensembles.merge(labels.kind, values[::-1], how), found, rtol=1e-12)
    if labels is not NUMBER:
        assert (found > 0).all() and (found <= 1).all()
    if labels in (ONE, PAIR):
        np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)
    if how != "rank":  # one member is itself; its ranks are not
        np.testing.assert_allclose(ensembles.merge(labels.kind, values[:1], how), values[0], rtol=1e-12)


@pytest.mark.parametrize("labels", [ONE, SEVERAL])
def test_the_geometric_mean_of_probabilities_is_the_mean_of_logits(labels: Labels) -> None:
    logits, weights = np.random.default_rng(0).normal(size=(4, 30, 3)), np.array([1.0, 0.0, 2.0, 5.0])
    values = np.stack([labels.values(each) for each in logits])
    found = ensembles.merge(labels.kind, values, "geometric", weights_M=weights)
    wanted = labels.values(np.average(logits, axis=0, weights=weights))
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_a_weighted_mean_and_a_maximum_written_out() -> None:
    values, weights = _members(ONE), np.array([1.0, 0.0, 2.0, 5.0])
    np.testing.assert_allclose(
        ensembles.merge("one", values, "mean", weights_M=weights), np.average(values, axis=0, weights=weights)
    )
    largest = values.max(0)
    np.testing.assert_allclose(ensembles.merge("one", values, "max"), largest / largest.sum(1, keepdims=True))
    np.testing.assert_allclose(ensembles.merge("several", values, "max"), largest)


def test_ranks_see_only_the_order_of_rows() -> None:
    values = _members(SEVERAL)
    sharper = values**7  # another confidence, the same order
    found = ensembles.merge("several", values, "rank")
    np.testing.assert_allclose(ensembles.merge("several", sharper, "rank"), found)
    better = (values[:, :, None] >= values[:, None]).mean(2)  # share of rows that are no higher
    np.testing.assert_allclose(found, better.mean(0))


@pytest.mark.parametrize(("labels", "how"), EVERY)
def test_an_absent_member_has_no_say(labels: Labels, how: Merging) -> None:
    values = _members(labels)
    present = np.ones(values.shape[:2], dtype=bool)
    present[0] = present[1, 10:] = False
    found = ensembles.merge(labels.kind, values, how, present_MN=present)
    silent = np.where(present[:, :, None], values, np.nan)
    np.testing.assert_array_equal(ensembles.merge(labels.kind, silent, how, present_MN=present), found)
    if how != "rank":
        np.testing.assert_allclose(found[10:], ensembles.merge(labels.kind, values[2:, 10:], how), rtol=1e-12)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["one", "several"])
def test_members_that_are_certain_leave_numbers(kind: str, how: Merging) -> None:
    """Each excludes what the other is sure of: no 0 / 0, and no side is taken."""
    values = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    found = ensembles.merge("one" if kind == "one" else "several", values, how)
    assert np.isfinite(found).all()
    if kind == "one":
        np.testing.assert_allclose(found, 0.5)


def test_mistakes() -> None:
    values = _members(NUMBER)
    for how in ("geometric", "rank", "max"):
        with pytest.raises(ConfigError, match="Write `mean`"):
            ensembles.merge("number", values, how)
    present = np.ones((4, 30), dtype=bool)
    present[:, 7] = False
    with pytest.raises(ValueError, match="row 7"):
        ensembles.merge("number", values, "mean", present_MN=present)
    with pytest.raises(ValueError, match="takes no weights"):
        ensembles.merge("one", _members(ONE), "rank", weights_M=np.ones(4))
    for weights in (np.ones(3), np.array([1.0, -1.0, 1.0, 1.0])):
        with pytest.raises(ValueError, match="one number of at least 0"):
            ensembles.merge("one", _members(ONE), "mean", weights_M=weights)


@pytest.mark.parametrize("labels", KINDS)
def test_greedy_is_never_worse_than_the_plain_mean(labels: Labels) -> None:
    for seed in range(8):
        values, hot = _members(labels, seed=seed), _hot(labels, 30, seed)
        weights = ensembles.greedy(labels, values, hot)
        assert weights.sum() == pytest.approx(1) and (weights > 0).all()
        even, chosen = (
            gains.row_losses(labels, ensembles.merge(labels.kind, values, "mean", weights_M=each), hot).mean()
            for each in (np.ones(4), weights)
        )
        assert chosen <= even + 1e-12


@pytest.mark.parametrize("labels", KINDS)
def test_greedy_finds_the_member_that_knows(labels: Labels) -> None:
    values, hot = _members(labels, rows=200), _hot(labels, 200)
    values[2] = labels.values(hot + 0.2 if labels is NUMBER else 4.0 * hot - 2.0)
    weights = ensembles.greedy(labels, values, hot)
    assert weights.argmax() == 2 and weights[2] > 0.7


@pytest.mark.parametrize("labels", KINDS)
def test_greedy_is_close_to_the_best_weights_there_are(labels: Labels) -> None:
    """Mean losses are convex in the weights, so a fine grid of two members' weights finds the lowest."""
    hot = _hot(labels, 200)
    near = hot * 1.5 if labels is NUMBER else 3.0 * hot - 1.5
    values = np.stack(
        [labels.values(near + np.random.default_rng(seed).normal(size=near.shape) * (seed + 1)) for seed in (0, 1)]
    )

    def loss(weights: Floats) -> float:
        merged = ensembles.merge(labels.kind, values, "mean", weights_M=weights)
        return float(gains.row_losses(labels, merged, hot).mean())

    lowest = min(loss(np.array([w, 1 - w])) for w in np.linspace(0, 1, 201))
    assert loss(ensembles.greedy(labels, values, hot)) <= lowest + 2e-3


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_greedy_keeps_the_plain_mean_where_nothing_is_better(rounds: int) -> None:
    """Two members that err by as much to either side: whoever joins once more makes it worse."""
    hot = _hot(NUMBER, 30)
    values = np.stack([NUMBER.values(hot + error) for error in (-1.0, 1.0)])
    np.testing.assert_array_equal(ensembles.greedy(NUMBER, values, hot, rounds=rounds), [0.5, 0.5])


ONE_CALIBRATION = Labels("one", ("a", "b", "c"))
SEVERAL_CALIBRATION = Labels("several", ("a", "b", "c"))
NUMBER_CALIBRATION = Labels("number", ("value",), mean=10.0, scale=4.0)


def _calibrated(labels: Labels, *, rows: int = 4000, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Outputs, and labels drawn with just the probabilities that they claim."""
    chance = np.random.default_rng(seed)
    outputs = 2 * chance.normal(size=(rows, 3))
    p = labels.values(outputs)
    if labels.kind == "several":
        return outputs, (chance.random(p.shape) < p).astype(np.float32)
    return outputs, np.eye(3, dtype=np.float32)[(chance.random((rows, 1)) > p.cumsum(1)[:, :2]).sum(1)]


@pytest.mark.parametrize("labels", [ONE_CALIBRATION, SEVERAL_CALIBRATION])
def test_calibrated_outputs_need_none_and_a_scale_is_found(labels: Labels) -> None:
    outputs, hot = _calibrated(labels)
    plain = ensembles.temperature(labels, outputs, hot)
    assert plain == pytest.approx(1, abs=0.05)
    for scale in (0.2, 0.7, 3.0, 8.0):
        found = ensembles.temperature(labels, scale * outputs, hot)
        assert found / plain == pytest.approx(scale, rel=1e-4)  # it moves with the scale, to the search's precision


@pytest.mark.parametrize("labels", [ONE_CALIBRATION, SEVERAL_CALIBRATION])
@pytest.mark.parametrize("rows", [3, 30, 300])
def test_the_loss_never_rises(labels: Labels, rows: int) -> None:
    for seed in range(20):
        outputs, hot = _calibrated(labels, rows=rows, seed=seed)
        for scale in (0.5, 1.0, 5.0, 100.0):
            found = ensembles.temperature(labels, scale * outputs, hot)
            assert ensembles.COLDEST <= found <= ensembles.HOTTEST
            after = classification_scores.loss(labels, scale * outputs / found, hot)
            assert after <= classification_scores.loss(labels, scale * outputs, hot)


def test_rows_that_are_all_right_ask_for_no_certainty() -> None:
    """Few rows allow less confidence than many, and none allows the bound."""
    wrong = []
    for rows in (10, 100, 1000):
        hot = np.eye(3, dtype=np.float32)[np.arange(rows) % 3]
        found = ensembles.temperature(ONE_CALIBRATION, hot.astype(np.float64), hot)
        assert ensembles.COLDEST * 1.5 < found < 1
        wrong.append(1 - ONE_CALIBRATION.values(hot / found)[0].max())
    for rows, chance in zip((10, 100, 1000), wrong, strict=True):
        assert chance == pytest.approx(2 * 2 / 3 / (rows + 2), rel=0.01)  # two blind rows, wrong two times in three


def test_numbers_claim_no_confidence() -> None:
    assert ensembles.temperature(NUMBER_CALIBRATION, np.ones((5, 1)), np.zeros((5, 1), dtype=np.float32)) == 1.0


def test_each_fold_is_judged_by_the_others() -> None:
    fold = np.array(["0", "1", "2", "10", "1", "0", "2"])
    rows = np.arange(7.0)
    found = ensembles.cross_fitted(
        fold,
        lambda mask: set(rows[mask].tolist()),
        lambda seen, mask: np.array([[each, each in seen, len(seen)] for each in rows[mask]], dtype=np.float64),
    )
    np.testing.assert_array_equal(found[:, 0], rows)
    assert not found[:, 1].any()
    np.testing.assert_array_equal(found[:, 2], [7 - (fold == each).sum() for each in fold])


def test_one_fold_leaves_nothing_to_fit_on() -> None:
    with pytest.raises(ValueError, match="two folds"):
        ensembles.cross_fitted(np.zeros(4), lambda mask: None, lambda _, mask: np.zeros((4, 1)))


CLASSES = pytest.mark.parametrize("labels", [ONE_CALIBRATION, SEVERAL_CALIBRATION])


def _disagreeing(labels: Labels, *, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Outputs (5, 4000, 3) of members that err each in its own way and claim too much, and the labels."""
    outputs, hot = _calibrated(labels, seed=seed)
    return 2 * (outputs + 1.5 * np.random.default_rng(seed + 1).normal(size=(5, *outputs.shape))), hot


@CLASSES
def test_members_that_agree_need_no_other_temperature_together(labels: Labels) -> None:
    outputs, _ = _calibrated(labels, rows=50)
    for single in (0.4, 1.0, 3.0):
        found = ensembles.matched_temperature(labels, labels.values(outputs), np.stack([outputs] * 3), single)
        assert found == pytest.approx(single, rel=1e-3)


@CLASSES
def test_a_mean_of_members_that_disagree_is_calibrated_without_labels(labels: Labels) -> None:
    """What unlabelled rows say of the mean is near what labels say, and better than a temperature of each member."""
    outputs, hot = _disagreeing(labels)
    mean = np.mean([labels.values(each) for each in outputs], axis=0)
    single = np.mean([ensembles.temperature(labels, each, hot) for each in outputs])
    best = ensembles.temperature(labels, classification_scores.outputs_of_values(labels, mean), hot)
    found = ensembles.matched_temperature(labels, mean, outputs, single)
    assert best < found < single * 0.8

    def loss(values: Floats) -> float:
        return float(gains.row_losses(labels, values, hot).mean())

    today = loss(np.mean([labels.values(each / single) for each in outputs], axis=0))
    lowest = loss(ensembles.tempered(labels, mean, best))
    assert lowest <= loss(ensembles.tempered(labels, mean, found)) < lowest + (today - lowest) / 3


@CLASSES
def test_no_temperature_comes_from_rows_that_an_adapter_trained_on(labels: Labels) -> None:
    outputs, hot = _disagreeing(labels)
    present = np.arange(4000)[None] % 5 == np.arange(5)[:, None]
    splits = [Split(0, fold, ~mask, mask) for fold, mask in enumerate(present)]
    known = ensembles.out_of_fold(labels, hot, splits, cluster_N=np.arange(4000), seed=0)
    unseen, _ = _disagreeing(labels, seed=7)
    combiner = Combiner(calibrate=True, how="mean")
    alone, together = (combiner.fit(known, outputs, unseen_MUC=rows) for rows in (None, unseen))
    assert together.temperature < alone.temperature * 0.9
    memorised = np.where(present[:, :, None], outputs, 1e3 * (hot - 0.5))
    assert (alone, together) == tuple(combiner.fit(known, memorised, unseen_MUC=rows) for rows in (None, unseen))
    twice = ensembles.OutOfFold(labels, hot, present | np.roll(present, 1, axis=0), known.part_N)
    assert together.temperature < combiner.fit(twice, outputs).temperature < alone.temperature, "a mean of two voices"
