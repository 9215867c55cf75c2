"""Decision rules fitted out of fold, on real and synthetic imbalanced sets with models of scikit-learn.

    python scripts/bench/decisions.py DATA [--rows 200 600] [--seeds 3]

DATA as for calibration.py. Sets whose classes are alike in size are thinned: class c keeps a share that falls from 1 to
0.1. Five folds; the rule is fitted to out-of-fold probabilities, judged there cross-fitted by the gate of a
cross-validation, and scored on test rows.

Legend: N labelled rows, T test rows, C classes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import sets as real_sets
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import scale

from workbench.config.sections import metrics
from workbench.crossval import decision_rules, ensembles, gains
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import chosen_metric

FOLDS, TEST = 5, 1500
MODELS = {
    "linear": lambda _: LogisticRegression(max_iter=300),
    "forest": lambda seed: RandomForestClassifier(100, random_state=seed),
}


def sets(data: Path) -> Iterator[tuple[str, Floats, np.ndarray, bool]]:
    """Names, features, classes, and whether these are steps of a scale."""
    for seed, shares in enumerate(([0.9, 0.1], [0.7, 0.2, 0.07, 0.03])):
        made = datasets.make_classification(
            6000, 20, n_informative=8, n_classes=len(shares), weights=shares, flip_y=0.05, random_state=seed
        )
        yield f"made, {len(shares)} classes", *made, False
    for seed in (0, 1):
        rows_ND, value_N = datasets.make_regression(6000, 10, n_informative=5, noise=80, random_state=seed)
        steps_N = np.searchsorted(np.quantile(value_N, [0.5, 0.75, 0.9, 0.97]), value_N)
        yield f"made, 5 steps {seed}", scale(rows_ND), steps_N, True
    found = datasets.load_diabetes()
    yield "diabetes, 4 steps", scale(found.data), np.searchsorted([120, 190, 260], found.target), True
    chance = np.random.default_rng(0)
    for name, rows_ND, class_N in real_sets(data):
        if name in ("digits", "banking77", "bccd_cells"):
            share_C = np.geomspace(1, 0.1, class_N.max() + 1)
            kept_N = (
                np.ones(len(class_N), bool) if name == "bccd_cells" else chance.random(len(class_N)) < share_C[class_N]
            )
            yield name, rows_ND[kept_N], class_N[kept_N], False


def case(
    rows_ND: Floats, class_N: np.ndarray, make: Any, rows: int, seed: int, score: str
) -> tuple[float, float, bool]:
    """Score on test before and after, and what the gate says."""
    classes = int(class_N.max()) + 1
    labels = Labels("one", tuple(map(str, range(classes))), metric=metrics.choice(score, None))
    order = np.random.default_rng(seed).permutation(len(class_N))
    train, test = order[:rows], order[rows : rows + TEST]
    p_NC, p_TC, fold_N = np.full((rows, classes), 1e-6), np.zeros((len(test), classes)), np.zeros(rows, int)
    deal = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for fold, (fitted, validated) in enumerate(deal.split(train, class_N[train])):
        model = make(seed).fit(rows_ND[train[fitted]], class_N[train[fitted]])
        p_NC[np.ix_(validated, model.classes_)] += model.predict_proba(rows_ND[train[validated]])
        p_TC[:, model.classes_] += model.predict_proba(rows_ND[test]) / FOLDS
        fold_N[validated] = fold
    p_NC, p_TC = ((each + 1e-6) / (each + 1e-6).sum(1, keepdims=True) for each in (p_NC, p_TC))
    hot_NC, hot_TC = (np.eye(classes, dtype=np.float32)[class_N[each]] for each in (train, test))
    judged_NC = ensembles.cross_fitted(
        fold_N,
        lambda mask_N: decision_rules.fit(labels, p_NC[mask_N], hot_NC[mask_N]),
        lambda shift, mask_N: labels.moved(p_NC[mask_N], shift),
    )
    kept = gains.gain(labels, p_NC, judged_NC, hot_NC).accepted
    shifted_TC = labels.moved(p_TC, decision_rules.fit(labels, p_NC, hot_NC))
    before, after = (chosen_metric.of_targets(labels, each, hot_TC) for each in (p_TC, shifted_TC))
    return before, after, kept


def main() -> None:
    """Print the mean change of the score on test, a set a line, always and where the gate keeps the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 600])
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    records = []
    for name, rows_ND, class_N, ordered in sets(asked.data):
        for score in ("macro_f1", "qwk") if ordered else ("macro_f1", "mcc"):
            for rows in asked.rows:
                for model, make in MODELS.items():
                    for seed in range(asked.seeds):
                        if rows <= 0.6 * len(class_N) and np.bincount(class_N).min() > FOLDS:
                            found = case(rows_ND, class_N, make, rows, seed, score)
                            records.append((name, score, rows, model, *found))
        print(name, len(class_N), flush=True)
    table = pd.DataFrame(records, columns=["set", "score", "rows", "model", "before", "after", "kept"])
    table["change"] = table["after"] - table["before"]
    table["gated"] = table["change"] * table["kept"]
    table["right"], table["wrong"] = table["kept"] & (table["change"] > 0), table["kept"] & (table["change"] < 0)
    table["missed"] = ~table["kept"] & (table["change"] > 0)
    for by in (["score"], ["score", "rows"], ["score", "model"], ["score", "set"]):
        means = table.groupby(by, sort=False)[["before", "change", "gated"]].mean().round(4)
        counts = table.groupby(by, sort=False)[["right", "wrong", "missed"]].sum()
        print(f"\n{means.join(counts).assign(cases=table.groupby(by).size()).to_string()}")


if __name__ == "__main__":
    main()
