"""Views are used where rows that no model trained on show that they help, on the rows that need them, and only then.

Votes are counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.crossval.seeing import NUMBER, ONE, ROWS, SEVERAL, said
from workbench.config.sections.tta_config import TtaConfig
from workbench.crossval import gains, tta
from workbench.crossval.tta import vote
from workbench.data.labelled.labels import Labels
from workbench.data.tta_views import user_merge
from workbench.errors import ConfigError

FOLD = np.arange(ROWS) % 5


def settled(**values: Any) -> TtaConfig:
    return TtaConfig.model_validate({"views": ["lower", "upper"], **values})


def decided(config: TtaConfig, labels: Labels, values: np.ndarray, targets: np.ndarray, **more: Any) -> tta.TtaDecision:
    names = [f"view {number}" for number in range(1, len(values))]
    decision, merged = tta.fit(config, labels, values, targets, FOLD, names=names, **more)
    loss = gains.row_losses(labels, merged, targets).mean()
    assert loss == pytest.approx(decision.gain.loss_after), "the values that it was judged by"
    return decision


ABLE = [(ONE, merge) for merge in ("mean", "geometric", "max", "vote")]
ABLE += [(SEVERAL, merge) for merge in ("mean", "geometric", "vote")]


@pytest.mark.parametrize(("labels", "merge"), [*ABLE, (NUMBER, "mean")])
def test_views_that_err_otherwise_help(labels: Labels, merge: str) -> None:
    values, targets = said(labels, [1.0, 1.0, 1.0])
    decision = decided(settled(merge=merge), labels, values, targets, calibrate=True)
    assert decision.accepted and decision.gain.loss_after < decision.gain.loss_before
    merged = tta.apply(decision, labels, values)
    loss = gains.row_losses(labels, merged, targets).mean()
    assert 0.9 * decision.gain.loss_after < loss <= decision.gain.loss_after + 1e-9, "fitted on these very rows"
    if labels.kind == "one":
        assert merged.sum(1) == pytest.approx(np.ones(ROWS))
    if labels.kind == "number":
        assert decision.temperature == 1
    else:
        assert decision.temperature < 1, "the mean of predictions that err otherwise is less sure than it could be"


def test_the_largest_of_several_independent_probabilities_is_too_large() -> None:
    values, targets = said(SEVERAL, [1.0, 1.0, 1.0])
    decision = decided(settled(merge="max"), SEVERAL, values, targets, calibrate=True)
    assert not decision.accepted and "Refused" in decision.reason


@pytest.mark.parametrize("config", [settled(), settled(uncertain=0.3)], ids=["all rows", "some"])
def test_views_are_not_credited_with_what_calibration_gives(config: TtaConfig) -> None:
    outputs = np.log(said(ONE, [1.0])[0][0])
    targets = said(ONE, [1.0])[1]
    values = np.stack([ONE.values(4 * outputs)] * 3)  # four times too sure, and views that say just the same
    decision = decided(config, ONE, values, targets, calibrate=True)
    assert decision.temperature > 1.5 and not decision.accepted
    assert decision.gain.difference == pytest.approx(0, abs=1e-9)


def test_the_mean_is_the_mean() -> None:
    values, targets = said(ONE, [1.0, 1.0, 1.0])
    decision = decided(settled(), ONE, values, targets)
    assert decision.accepted and decision.passes == 3 and decision.temperature == 1
    assert tta.apply(decision, ONE, values) == pytest.approx(values.mean(0))


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER], ids=lambda labels: labels.kind)
def test_views_that_only_hurt_are_rejected_with_numbers(labels: Labels) -> None:
    values, targets = said(labels, [0.1 if labels is NUMBER else 0.5] * 3)
    values[1:] = np.roll(values[1:], 1, axis=1)  # what is said of other rows
    decision = decided(settled(), labels, values, targets)
    assert not decision.accepted and not tta.needs_views(decision, values[0]).any()
    assert np.array_equal(tta.apply(decision, labels, values), values[0])
    before = gains.row_losses(labels, values[0], targets).mean()
    assert f"{before:.4f} -> {decision.gain.loss_after:.4f}" in decision.reason and "Refused" in decision.reason
    assert decision.losses[1] > decision.losses[0] == pytest.approx(before)


@pytest.mark.parametrize("labels", [ONE, SEVERAL], ids=lambda labels: labels.kind)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_gate_spends_views_on_uncertain_rows_only(labels: Labels, share: float) -> None:
    values, targets = said(labels, [1.0, 1.0, 1.0])
    decision = decided(settled(uncertain=share), labels, values, targets)
    assert decision.accepted and decision.spent == pytest.approx(share, abs=0.01)
    assert decision.passes == pytest.approx(1 + 2 * share, abs=0.02)
    new, _ = said(labels, [1.0, 1.0, 1.0], seed=1)
    rows = tta.needs_views(decision, new[0])
    assert 0 < rows.mean() == pytest.approx(share, abs=0.08)
    uncertain = tta.entropy(labels.kind, new[0])
    assert uncertain[rows].min() > decision.threshold >= uncertain[~rows].max()
    unread = new.copy()
    unread[1:, ~rows] = np.nan
    merged = tta.apply(decision, labels, unread)
    assert np.array_equal(merged[~rows], new[0, ~rows])
    assert merged[rows] == pytest.approx(new[:, rows].mean(0))
    assert np.array_equal(tta.apply(decision, labels, new[:, :7]), merged[:7]), "each row by itself"


def test_where_a_gate_leaves_no_row_nothing_is_merged() -> None:
    values, targets = said(ONE, [1.0, 1.0])
    values[0] = 1 / 3  # all rows are alike, so none is more uncertain than others
    decision = decided(settled(uncertain=0.5), ONE, values, targets)
    assert decision.spent == 0 and decision.passes == 1 and not decision.accepted
    assert decision.gain.difference == 0


def test_entropy() -> None:
    p = np.array([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]])
    assert tta.entropy("one", p) == pytest.approx([0, 1, -0.9 * np.log2(0.9) - 0.1 * np.log2(0.1)])
    assert tta.entropy("several", np.array([[1.0, 0.0], [0.5, 0.5], [0.5, 1.0]])) == pytest.approx([0, 1, 0.5])


def test_the_least_gain_and_witnesses_count() -> None:
    values, targets = said(ONE, [1.0, 1.0, 1.0])
    found = decided(settled(), ONE, values, targets)
    asked = decided(settled(least_gain=-2 * found.gain.difference), ONE, values, targets)
    assert found.accepted and not asked.accepted
    few = decided(settled(), ONE, values, targets, groups_N=np.arange(ROWS) // 200)
    assert few.gain.high - few.gain.low > found.gain.high - found.gain.low


@pytest.mark.parametrize("config", [settled(), settled(uncertain=0.3)])
def test_a_decision_survives_json(config: TtaConfig) -> None:
    values, targets = said(ONE, [1.0, 0.8, 1.2])
    decision = decided(config, ONE, values, targets)
    again = tta.TtaDecision.from_facts(json.loads(json.dumps(decision.facts)))
    assert again == decision and asdict(again) == asdict(decision)
    assert np.array_equal(tta.apply(again, ONE, values), tta.apply(decision, ONE, values))


def users(folder: Path, body: str) -> TtaConfig:
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\ndef merge(p):\n    {body}\n")
    return settled(merge="user", function=str(path))


def test_a_users_merge(tmp_path: Path) -> None:
    values, targets = said(ONE, [1.0, 1.0, 1.0])
    config = users(tmp_path, "p *= p; found = p.sum(0); return found / found.sum(axis=1, keepdims=True)")
    mine = user_merge(config)
    decision = decided(config, ONE, values.copy(), targets, user_merge=mine)
    wanted = (values**2).sum(0)
    found = tta.apply(decision, ONE, values, mine)
    assert decision.accepted and found == pytest.approx(wanted / wanted.sum(1, keepdims=True))
    assert values.sum() == pytest.approx(3 * ROWS), "what it does to its argument stays there"


@pytest.mark.parametrize(
    ("labels", "body", "wanted"),
    [
        (
            ONE,
            "return p.sum(0)",
            r"for row 0 \(they count from 0\), with sum 3\. Divide by p.sum\(axis=1, keepdims=True\)",
        ),
        (ONE, "p[0, 7] *= 1.5; return p[0]", r"for row 7 .*, with sum 1\.5\. Divide by"),
        (ONE, "p[0, 2, 0] += 2; p[0, 2, 1] -= 2; return p[0]", r"for row 2 .* probabilities, which are never negative"),
        (ONE, "p[0, 3, 0] = np.nan; return p[0]", r"\[nan, .* for row 3 .* Return finite numbers"),
        (
            ONE,
            "return p.mean(1)",
            r"returned shape \(3, 3\) for p of shape \(V, N, C\) = \(3, 120, 3\)\. Return .* \(120, 3\)",
        ),
        (ONE, "return p.argmax(2)", "returned shape"),
        (ONE, "return None", r"returned shape \(\)|TypeError"),
        (ONE, "return p.avg(0)", r"mine.py, line 3: AttributeError: .*avg"),
        (SEVERAL, "return p.sum(0)", "Return probabilities between 0 and 1"),
        (NUMBER, "return p[0] / 0", "RuntimeWarning|Return finite numbers"),
    ],
)
def test_mistakes_of_a_users_merge(tmp_path: Path, labels: Labels, body: str, wanted: str) -> None:
    values, targets = said(labels, [1.0, 1.0, 1.0])
    config = users(tmp_path, body)
    with pytest.raises(ConfigError, match=wanted):
        decided(config, labels, values, targets, user_merge=user_merge(config))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return p.sum(0)", r"with sum 4\. Divide by"),
        ("return (p[0] - p[0].mean(0)) / 10 + 1 / 3", "Merge each row by itself"),
        ("p[0] += 0.1 / p.shape[1]; return p[0] / p[0].sum(1, keepdims=True)", "Merge each row by itself"),
    ],
)
def test_mistakes_of_a_users_merge_are_told_before_training(tmp_path: Path, body: str, wanted: str) -> None:
    mine = user_merge(users(tmp_path, body))
    assert mine is not None
    with pytest.raises(ConfigError, match=wanted):
        tta.try_merge(ONE, 4, mine)


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER], ids=lambda labels: labels.kind)
def test_a_good_merge_of_a_users_passes_the_trial(tmp_path: Path, labels: Labels) -> None:
    mine = user_merge(users(tmp_path, "return np.median(p, axis=0) if p.shape[2] == 1 else p.mean(0)"))
    assert mine is not None
    tta.try_merge(labels, 4, mine)


def test_a_file_without_merge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("merge = 3\n")
    with pytest.raises(ConfigError, match=r"tta.function: .*mine.py defines no function merge. Write `def merge\(p"):
        user_merge(settled(merge="user", function=str(path)))
    assert user_merge(settled()) is None


@pytest.mark.parametrize("labels", [SEVERAL, NUMBER], ids=lambda labels: labels.kind)
def test_what_a_user_merges_need_not_sum_to_one_where_it_has_no_reason_to(tmp_path: Path, labels: Labels) -> None:
    values, targets = said(labels, [1.0, 1.0])
    config = users(tmp_path, "return p.mean(0)")
    mine = user_merge(config)
    decision = decided(config, labels, values, targets, user_merge=mine)
    assert tta.apply(decision, labels, values, mine) == pytest.approx(values.mean(0))


def test_the_class_with_most_votes_is_the_likeliest() -> None:
    values = np.random.default_rng(0).dirichlet(np.full(4, 0.3), size=(7, 300))
    found = vote("one", values)
    votes = np.stack([np.bincount(row, minlength=4) for row in values.argmax(2).T])
    assert found == pytest.approx((votes + values.mean(0)) / 8)
    assert found.sum(1) == pytest.approx(np.ones(300)) and found.min() > 0
    assert (votes[np.arange(300), found.argmax(1)] == votes.max(1)).all()


def test_the_mean_breaks_ties_of_votes() -> None:
    values = np.array([[[0.6, 0.4]], [[0.1, 0.9]]])
    assert vote("one", values) == pytest.approx(np.array([[1.35, 1.65]]) / 3)


def test_the_order_of_classes_does_not_matter_where_a_view_is_undecided() -> None:
    values = np.array([[[0.4, 0.4, 0.2]], [[0.2, 0.4, 0.4]]])
    assert vote("one", values[:, :, ::-1]) == pytest.approx(vote("one", values)[:, ::-1])


def test_several_classes_are_voted_on_one_by_one() -> None:
    values = np.array([[[0.9, 0.5, 0.2]], [[0.6, 0.5, 0.4]], [[0.2, 0.5, 0.1]]])
    votes = np.array([[2, 1.5, 0]])
    assert vote("several", values) == pytest.approx((votes + values.mean(0)) / 4)
