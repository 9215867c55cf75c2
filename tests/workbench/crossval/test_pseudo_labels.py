"""Which rows are chosen, with what label, whatever their order; that the gate refuses a round which only misleads.

Pseudo-labels of a fold come from adapters that never saw its rows, and no label of these rows moves them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from workbench.config import RunConfig
from workbench.config.sections.classes_config import Kind
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.crossval import ensembles, gains, pseudo_labels
from workbench.crossval.fold_adapters import RoundOutputs, fold_adapters
from workbench.crossval.pseudo_labels import PseudoLabels
from workbench.data.folds.stratified_folds import assign, singletons
from workbench.data.labelled.labels import Floats, Labels

ONE = Labels("one", ("a", "b", "c"))
LABELLED = np.array([10.0, 20.0, 30.0])
SEEDS = st.integers(0, 10**6)
SHARES = st.sampled_from([0.0, 0.4, 0.6, 0.8, 0.95])


def teachers(seed: int, *, number: int = 3, rows: int = 40) -> Floats:
    """Probabilities (T, U, 3) of teachers that mostly agree, sure of some rows and unsure of others."""
    chance = np.random.default_rng(seed)
    common = chance.normal(scale=3, size=(1, rows, 3)) + chance.normal(size=3)
    grown = np.exp(common + chance.normal(size=(number, rows, 3)))
    return grown / grown.sum(2, keepdims=True)


def choose(values: Floats, *, kind: Kind = "one", round_number: int = 1, **asked: Any) -> PseudoLabels:
    config = PseudoLabelConfig(unlabelled="more.csv", **asked)
    return pseudo_labels.choose(config, Labels(kind, ONE.names), values, labelled_C=LABELLED, round_number=round_number)


@settings(deadline=None)
@given(SEEDS, SHARES, SHARES)
def test_a_higher_threshold_chooses_fewer_rows(seed: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    values = teachers(seed)
    few, many = (set(choose(values, threshold=each, cap=None).rows.tolist()) for each in (high, low))
    assert few <= many


@settings(deadline=None)
@given(SEEDS, SHARES, SHARES)
def test_an_adaptive_threshold_only_lowers_and_most_where_fewest_are_sure(seed: int, one: float, other: float) -> None:
    floor, base = sorted((one, other))
    merged = teachers(seed).mean(0)
    found = pseudo_labels.thresholds(PseudoLabelConfig(adaptive=True, threshold=base, floor=floor), merged)
    assert (found <= base).all() and (found >= floor).all()
    sure = np.array([((merged.argmax(1) == number) & (merged.max(1) >= base)).sum() for number in range(3)])
    assert (np.diff(found[sure.argsort(kind="stable")]) >= 0).all()
    assert found[sure.argmax()] == base


def test_adaptive_thresholds_written_out() -> None:
    rows = [[0.9, 0.1, 0.0]] * 4 + [[0.1, 0.9, 0.0]] * 2 + [[0.2, 0.1, 0.7]]
    config = PseudoLabelConfig(adaptive=True, threshold=0.9, floor=0.1)
    # All, half and none of the most confident class: x / (2 - x) is 1, 1/3 and 0.
    assert pseudo_labels.thresholds(config, np.array(rows)) == pytest.approx([0.9, 0.3, 0.1])
    assert pseudo_labels.thresholds(config, np.array(rows)[-1:]) == pytest.approx([0.9, 0.9, 0.9])


@settings(deadline=None)
@given(SEEDS, st.sampled_from([0.05, 0.1, 0.3, 2.0]))
def test_a_cap_keeps_the_surest_of_each_class(seed: int, cap: float) -> None:
    values = teachers(seed)
    everything, found = choose(values, threshold=0.4, cap=None), choose(values, threshold=0.4, cap=cap)
    merged = values.mean(0)
    for number, most in enumerate(np.floor(cap * LABELLED + 1e-9)):
        all_of, kept = (each.rows[each.targets_nC[:, number] == 1] for each in (everything, found))
        assert len(kept) == min(most, len(all_of))
        left = np.setdiff1d(all_of, kept)
        if len(kept) and len(left):
            assert merged[kept, number].min() >= merged[left, number].max()
    assert found.facts["capped"] == len(everything.rows) - len(found.rows)


def test_a_cap_is_not_rounded_away() -> None:
    values = np.tile(np.array([0.98, 0.01, 0.01]), (1, 60, 1))
    labelled = np.array([100.0, 1.0, 1.0])
    found = pseudo_labels.choose(PseudoLabelConfig(cap=0.29), ONE, values, labelled_C=labelled, round_number=1)
    assert len(found.rows) == 29  # 0.29 * 100 is a little less


PRIORS = st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda each: sum(each) > 0.01)
ROWS = st.lists(PRIORS, min_size=1, max_size=12)


@settings(deadline=None)
@given(ROWS, PRIORS)
def test_alignment_never_leads_away_from_the_prior(rows: list[list[float]], shares: list[float]) -> None:
    values, prior = np.array(rows), np.array(shares) / sum(shares)
    values /= values.sum(1, keepdims=True)
    found = pseudo_labels.align(values, prior)
    assert found.sum(1) == pytest.approx(np.ones(len(rows)))
    possible = values[:, prior > 0].any(1)  # the others have only classes that the prior rules out
    if possible.all():
        assert np.abs(found.mean(0) - prior).sum() <= np.abs(values.mean(0) - prior).sum() + 1e-9
    assert (found[~possible] == values[~possible]).all()


def test_alignment_written_out_and_per_teacher() -> None:
    values = teachers(3)
    prior = np.array([0.2, 0.5, 0.3])
    for each, found in zip(values, pseudo_labels.align(values, prior), strict=True):
        raw = each * prior / each.mean(0)
        assert found == pytest.approx(raw / raw.sum(1, keepdims=True))
        assert np.abs(found.mean(0) - prior).sum() < np.abs(each.mean(0) - prior).sum()


def test_alignment_keeps_a_row_that_the_prior_rules_out() -> None:
    found = pseudo_labels.align(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]), np.array([0.0, 0.5, 0.5]))
    assert found.tolist() == [[1, 0, 0], [0, 1, 0]]


@settings(deadline=None)
@given(SEEDS)
def test_alignment_leaves_rows_alone_that_have_the_prior(seed: int) -> None:
    values = teachers(seed, number=1)[0]
    assert pseudo_labels.align(values, values.mean(0)) == pytest.approx(values)


def test_alignment_to_the_labelled_shares_is_what_choose_does() -> None:
    values = teachers(5)
    found = choose(values, align=True, labels="soft", threshold=0.0, agreement=0.0, cap=None)
    assert found.targets_nC == pytest.approx(pseudo_labels.align(values.mean(0), LABELLED / 60), abs=1e-6)


def test_teachers_must_agree() -> None:
    sure, other = [0.99, 0.005, 0.005], [0.1, 0.8, 0.1]
    values = np.array([[sure, sure], [sure, sure], [sure, other]])
    asked: dict[str, Any] = {"threshold": 0.6}
    assert choose(values, **asked).rows.tolist() == [0]
    assert choose(values, agreement=2 / 3, **asked).rows.tolist() == [0, 1]
    assert choose(values, agreement=0.67, **asked).rows.tolist() == [0]
    assert choose(values, **asked).facts["agreed"] == 0.5
    # One teacher agrees with itself about every row.
    assert choose(values[2:], **asked).rows.tolist() == [0, 1]


@settings(deadline=None)
@given(SEEDS, st.booleans())
def test_labels_are_the_likeliest_class_or_the_probabilities(seed: int, soft: bool) -> None:
    values = teachers(seed)
    found = choose(values, labels="soft" if soft else "hard", threshold=0.5)
    assert found.targets_nC.dtype == np.float32
    assert found.targets_nC.sum(1) == pytest.approx(np.ones(len(found.rows)))
    merged = values.mean(0)[found.rows]
    assert (found.targets_nC.argmax(1) == merged.argmax(1)).all()
    assert found.targets_nC == pytest.approx(merged if soft else np.eye(3)[merged.argmax(1)], abs=1e-6)


@settings(deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_the_order_of_the_unlabelled_rows_does_not_matter(seed: int, adaptive: bool, align: bool) -> None:
    values = teachers(seed)
    asked: dict[str, Any] = {"adaptive": adaptive, "align": align, "cap": 0.1, "threshold": 0.6, "labels": "soft"}
    order = np.random.default_rng(seed).permutation(values.shape[1])
    here, there = choose(values, **asked), choose(values[:, order], **asked)
    assert set(order[there.rows].tolist()) == set(here.rows.tolist())
    assert there.targets_nC[order[there.rows].argsort()] == pytest.approx(here.targets_nC, abs=1e-6)
    assert there.facts["classes"] == here.facts["classes"]


def test_equally_sure_rows_are_not_chosen_by_their_places() -> None:
    rows = np.array([[0.75, 0.1875, 0.0625], [0.75, 0.0625, 0.1875], [0.75, 0.125, 0.125]])
    everything, most = np.ones(3, dtype=bool), np.array([1.0, 1.0, 1.0])
    (there,) = rows[pseudo_labels.capped(rows, everything, most)]
    (here,) = rows[::-1][pseudo_labels.capped(rows[::-1], everything, most)]
    assert (there == here).all()


def test_weights_are_those_of_the_round() -> None:
    values = teachers(0)
    for number, wanted in ((1, 0.25), (2, 0.5), (3, 0.5)):
        found = choose(values, weight=0.5, ramp_up=2, round_number=number)
        assert len(found.rows) and (found.weights_n == wanted).all() and len(found.weights_n) == len(found.rows)


def test_pairs_are_classes_too() -> None:
    one, pair = (choose(teachers(1), kind=kind, threshold=0.8) for kind in ("one", "pair"))
    assert len(pair.rows) and (pair.rows == one.rows).all()


def test_facts_count_what_was_chosen() -> None:
    values = teachers(2)
    found = choose(values, threshold=0.8, cap=0.2)
    assert found.facts["classes"] == dict(zip("abc", found.targets_nC.sum(0).tolist(), strict=True))
    assert found.facts["rows"] == len(found.rows) == sum(found.facts["classes"].values())
    assert found.facts["share"] == len(found.rows) / 40
    assert found.facts["confidence"] == pytest.approx(values.mean(0)[found.rows].max(1).mean())
    assert found.facts["thresholds"] == {"a": 0.8, "b": 0.8, "c": 0.8}
    assert found.reason == ""


TIMID = np.array([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]])
QUARREL = np.array([[[0.99, 0.01, 0.0]], [[0.4, 0.6, 0.0]]])


@pytest.mark.parametrize(
    ("values", "asked", "cure"),
    [
        (TIMID, {}, {"threshold": 0.7}),
        (QUARREL, {"threshold": 0.6}, {"agreement": 0.5}),
        (TIMID, {"threshold": 0.5, "cap": 0.01}, {"cap": 1.0}),
    ],
)
def test_where_nothing_is_chosen_the_reason_names_what_to_change(
    values: Floats, asked: dict[str, Any], cure: dict[str, Any]
) -> None:
    found = choose(values, **asked)
    assert not len(found.rows) and found.targets_nC.shape == (0, 3) and found.facts["confidence"] is None
    assert f"pseudo_label.{next(iter(cure))}" in found.reason
    assert len(choose(values, **(asked | cure)).rows)


def test_a_summary_takes_means_over_folds() -> None:
    many, none = choose(teachers(0), threshold=0.5), choose(TIMID)
    found = pseudo_labels.summary([many, none])
    assert found["rows"] == len(many.rows) / 2
    assert found["classes"]["a"] == many.facts["classes"]["a"] / 2
    assert found["thresholds"]["b"] == pytest.approx((0.5 + 0.95) / 2)
    assert found["confidence"] == pytest.approx(many.facts["confidence"])
    assert pseudo_labels.summary([none])["confidence"] is None


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_consensus_is_the_mean_of_a_cluster(seed: int, clusters: list[int]) -> None:
    values, cluster = teachers(seed, number=1, rows=len(clusters))[0], np.array(clusters) * 7
    found = pseudo_labels.consensus(values, cluster)
    assert found.sum(0) == pytest.approx(values.sum(0)) and found.sum(1) == pytest.approx(values.sum(1))
    for number in set(cluster.tolist()):
        inside = cluster == number
        assert found[inside] == pytest.approx(np.tile(values[inside].mean(0), (inside.sum(), 1)))
        if inside.sum() == 1:
            assert (found[inside] == values[inside]).all()


class World:
    """Clouds of points, of which few are labelled, in folds; a logistic regression stands for an adapter."""

    def __init__(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        centres = chance.normal(size=(3, 64))
        self.class_N, self.class_U = np.arange(300) % 3, np.arange(1500) % 3
        self.rows_ND = centres[self.class_N] + 2.5 * chance.normal(size=(300, 64))
        self.rows_UD = centres[self.class_U] + 2.5 * chance.normal(size=(1500, 64))
        self.fold_N = np.arange(300) // 3 % 5
        self.hot_NC = np.eye(3, dtype=np.float32)[self.class_N]

    def model(self, train: NDArray[np.bool_], chosen: PseudoLabels | None = None) -> LogisticRegression:
        rows, classes, weights = self.rows_ND[train], self.class_N[train], np.ones(train.sum())
        if chosen is not None:
            rows = np.concatenate([rows, self.rows_UD[chosen.rows]])
            classes = np.concatenate([classes, chosen.targets_nC.argmax(1)])
            weights = np.concatenate([weights, chosen.weights_n])
        return LogisticRegression(max_iter=2000).fit(rows, classes, sample_weight=weights)

    def out_of_fold(self, models: list[LogisticRegression]) -> Floats:
        """Outputs of each row by the model that did not train on it."""
        outputs_KNC = np.stack([model.decision_function(self.rows_ND) for model in models])
        found: Floats = outputs_KNC[self.fold_N, np.arange(len(self.fold_N))]
        return found

    def temperature(self, outputs_NC: Floats, mask_N: NDArray[np.bool_]) -> float:
        return ensembles.temperature(ONE, outputs_NC[mask_N], self.hot_NC[mask_N])

    def calibrated(self, outputs_NC: Floats) -> Floats:
        return ensembles.cross_fitted(
            self.fold_N,
            lambda mask_N: self.temperature(outputs_NC, mask_N),
            lambda fitted, mask_N: ONE.values(outputs_NC[mask_N] / fitted),
        )

    def gain(self, config: PseudoLabelConfig, *, sure: float = 1.0, confuses: bool = False) -> tuple[gains.Gain, float]:
        """What a round brings out of fold, and the share of right pseudo-labels.

        Args:
            sure: What the teachers' calibrated logits are multiplied by.
            confuses: The teachers take half of one class for another.
        """
        teachers = [self.model(self.fold_N != fold) for fold in range(5)]
        before_NC, students, precise = self.out_of_fold(teachers), [], []
        for fold, teacher in enumerate(teachers):
            train = self.fold_N != fold
            outputs_UC = teacher.decision_function(self.rows_UD) / self.temperature(before_NC, train)
            if confuses:
                mistaken = (np.arange(1500) % 2 == 0) & (outputs_UC.argmax(1) == 0)
                outputs_UC[mistaken] = np.roll(outputs_UC[mistaken], 1, axis=1)
            labelled_C = self.hot_NC[train].sum(0).astype(np.float64)
            values_TUC = ONE.values(outputs_UC * sure)[None]
            chosen = pseudo_labels.choose(config, ONE, values_TUC, labelled_C=labelled_C, round_number=1)
            precise.append((self.class_U[chosen.rows] == chosen.targets_nC.argmax(1)).mean())
            students.append(self.model(train, chosen))
        before_NC, after_NC = self.calibrated(before_NC), self.calibrated(self.out_of_fold(students))
        return gains.gain(ONE, before_NC, after_NC, self.hot_NC, least=config.least_gain), float(np.mean(precise))


NAIVE = PseudoLabelConfig(threshold=0.0, agreement=0.0, cap=None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("confuses", [True, False])
def test_the_gate_refuses_a_round_of_overconfident_teachers(seed: int, confuses: bool) -> None:
    gain, precision = World(seed).gain(NAIVE, sure=30.0, confuses=confuses)
    assert not gain.accepted
    if confuses:  # a fifth of the labels is wrong, and every teacher as good as certain of each
        assert precision < 0.85 and gain.loss_after > 1.5 * gain.loss_before


@pytest.mark.parametrize("seed", range(3))
def test_the_gate_lets_a_round_of_calibrated_teachers_pass(seed: int) -> None:
    gain, precision = World(seed).gain(PseudoLabelConfig(threshold=0.9, cap=None))
    assert gain.accepted and precision > 0.95


def test_a_gain_may_be_too_small_to_be_worth_a_round() -> None:
    gain, _ = World(0).gain(PseudoLabelConfig(threshold=0.9, cap=None, least_gain=0.1))
    assert not gain.accepted and gain.high < 0


NAMES = ("left", "middle", "right")
ROWS_PSEUDO_LABEL_CHOICES, UNLABELLED = 60, 40


@pytest.fixture
def case() -> Any:
    """Two repeats of three folds with two seeds, and random outputs."""
    chance = np.random.default_rng(0)
    label_N = np.arange(ROWS_PSEUDO_LABEL_CHOICES) % 3
    folds = assign(
        [(int(each),) for each in label_N],
        groups=singletons([str(n) for n in range(ROWS_PSEUDO_LABEL_CHOICES)]),
        k=3,
        repeats=2,
    )
    who = fold_adapters(folds, seeds=2)
    targets_NC = np.eye(3, dtype=np.float32)[label_N]
    oof_MNC = np.where(
        np.stack([each.split.validation_N for each in who])[:, :, None],
        2 * targets_NC + chance.normal(size=(len(who), ROWS_PSEUDO_LABEL_CHOICES, 3)),
        0.0,
    )
    return SimpleNamespace(who=who, targets_NC=targets_NC, oof_MNC=oof_MNC, chance=chance)


def chosen(case: Any, unlabelled_MUC: Any, targets_NC: Any | None = None) -> list[PseudoLabels]:
    targets_NC = case.targets_NC if targets_NC is None else targets_NC
    config = RunConfig.model_validate(
        {
            "recipe": "crossval",
            "data": {"train": "x"},
            "pseudo_label": {"unlabelled": "y", "threshold": 0.4, "agreement": 0.5, "cap": None},
        }
    )
    labels = Labels("one", NAMES)
    known = ensembles.out_of_fold(
        labels, targets_NC, [each.split for each in case.who], cluster_N=np.arange(ROWS_PSEUDO_LABEL_CHOICES), seed=0
    )
    data: Any = SimpleNamespace(labels=labels, rows=SimpleNamespace(targets_NC=targets_NC))
    context: Any = SimpleNamespace(config=config)
    return pseudo_labels.choices(
        context, data, case.who, known, RoundOutputs(0, case.oof_MNC, None, unlabelled_MUC), calibrate=True
    )


def same(one: PseudoLabels, other: PseudoLabels) -> bool:
    return one.rows.tolist() == other.rows.tolist() and np.array_equal(one.targets_nC, other.targets_nC)


def test_other_folds_adapters_have_no_say(case: Any) -> None:
    outputs_MUC = case.chance.normal(size=(len(case.who), UNLABELLED, 3))
    before = chosen(case, outputs_MUC)
    for number, who in enumerate(case.who):
        mine = [
            index
            for index, other in enumerate(case.who)
            if (other.split.repeat, other.split.fold) == (who.split.repeat, who.split.fold)
        ]
        others_MUC = case.chance.normal(size=outputs_MUC.shape)
        others_MUC[mine] = outputs_MUC[mine]
        assert len(mine) == 2 and same(before[number], chosen(case, others_MUC)[number])
    assert not same(before[0], before[2]), "folds differ"
    assert same(before[0], before[1]), "the seeds of a fold learn from the same rows"


def test_the_labels_of_a_folds_own_rows_have_no_say(case: Any) -> None:
    """Not even through the temperature; those of other folds do, so the test can fail."""
    outputs_MUC = 3 * case.chance.normal(size=(len(case.who), UNLABELLED, 3))
    before = chosen(case, outputs_MUC)
    for number in (0, 2, 4, 6):
        own_N = case.who[number].split.validation_N
        wrong_NC, others_NC = case.targets_NC.copy(), case.targets_NC.copy()
        wrong_NC[own_N], others_NC[~own_N] = np.roll(wrong_NC[own_N], 1, axis=1), np.roll(others_NC[~own_N], 1, axis=1)
        assert same(before[number], chosen(case, outputs_MUC, wrong_NC)[number])
        assert not same(before[number], chosen(case, outputs_MUC, others_NC)[number])
