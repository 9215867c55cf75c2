"""Pseudo-labels of a fold come from adapters that never saw its rows, and no label of these rows moves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.config import RunConfig
from workbench.crossval import ensembles, pseudo_labels
from workbench.crossval.fold_adapters import RoundOutputs, fold_adapters
from workbench.crossval.pseudo_labels import PseudoLabels
from workbench.data.folds.stratified_folds import assign, singletons
from workbench.data.labelled.labels import Labels

NAMES = ("left", "middle", "right")
ROWS, UNLABELLED = 60, 40


@pytest.fixture
def case() -> Any:
    """Two repeats of three folds with two seeds, and random outputs."""
    chance = np.random.default_rng(0)
    label_N = np.arange(ROWS) % 3
    folds = assign([(int(each),) for each in label_N], groups=singletons([str(n) for n in range(ROWS)]), k=3, repeats=2)
    who = fold_adapters(folds, seeds=2)
    targets_NC = np.eye(3, dtype=np.float32)[label_N]
    oof_MNC = np.where(
        np.stack([each.split.validation_N for each in who])[:, :, None],
        2 * targets_NC + chance.normal(size=(len(who), ROWS, 3)),
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
        labels, targets_NC, [each.split for each in case.who], cluster_N=np.arange(ROWS), seed=0
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
