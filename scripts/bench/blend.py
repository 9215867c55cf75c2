"""What a blend of two kinds of models and two seeds gains over its best part, and on random labels; ten real sets.

    python scripts/bench/blend.py DATA [--rows 400] [--seeds 3]

DATA is that of calibration.py. Parts are networks and linear models over kernel features of scikit-learn, two seeds of
each over the same five folds, calibrated as the folds of a cross-validation are. Ways are judged by test loss against
the part that is best out of fold; `kept` is what `workbench blend` keeps. Random labels: the share of ways that surely
gain over saying how frequent classes are.

Legend: P parts, N labelled rows, T test rows, C classes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import FOLDS, TEST, outputs, sets
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline

from workbench.crossval import blends, ensembles, gains
from workbench.crossval.blends import HOWS
from workbench.crossval.stages import JudgedLabels
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores
from workbench.evaluation.classification_scores import OneHot
from workbench.recipes.over import blend
from workbench.runs.run_directory import Run
from workbench.training.callbacks import SILENT


def parts() -> list[Any]:
    """Two kinds of models with two seeds each, not yet fitted."""
    networks = [MLPClassifier((64,), alpha=1.0, max_iter=100, random_state=seed) for seed in (0, 1)]
    kernels = [RBFSampler(gamma="scale", n_components=300, random_state=seed) for seed in (0, 1)]
    return [*networks, *(make_pipeline(each, LogisticRegression(C=3, max_iter=300)) for each in kernels)]


COLUMNS = ["set", "shuffled", "way", "change", "sure"]
NAMES = ["network 0", "network 1", "kernel 0", "kernel 1"]


def values(
    labels: Labels, rows_ND: Floats, class_N: np.ndarray, train: np.ndarray, test: np.ndarray
) -> tuple[Floats, Floats, np.ndarray]:
    """Probabilities of each part out of fold (P, N, C) and on test rows (P, T, C), and the folds."""
    classes, fold_N = len(labels.names), np.empty(len(train), dtype=int)
    oof_PNC, test_PTC = np.empty((len(NAMES), len(train), classes)), np.zeros((len(NAMES), len(test), classes))
    deal = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(train, class_N[train])
    for fold, (learnt, held) in enumerate(deal):
        fold_N[held] = fold
        for part, model in enumerate(parts()):
            model.fit(rows_ND[train[learnt]], class_N[train[learnt]])
            oof_PNC[part, held] = labels.values(outputs(model, rows_ND[train[held]], classes))
            test_PTC[part] += labels.values(outputs(model, rows_ND[test], classes)) / FOLDS
    hot_NC = np.eye(classes, dtype=np.float32)[class_N[train]]
    for part in range(len(NAMES)):
        oof_PNC[part], test_PTC[part] = calibrated(labels, oof_PNC[part], test_PTC[part], hot_NC, fold_N)
    return oof_PNC, test_PTC, fold_N


def calibrated(
    labels: Labels, oof_NC: Floats, test_TC: Floats, hot_NC: OneHot, fold_N: np.ndarray
) -> tuple[Floats, Floats]:
    """Both with a temperature that is fitted out of fold, where the cross-fitted loss falls by it."""

    def heat(mask_N: np.ndarray) -> float:
        logits_nC = classification_scores.outputs_of_values(labels, oof_NC[mask_N])
        return ensembles.temperature(labels, logits_nC, hot_NC[mask_N])

    after_NC = ensembles.cross_fitted(
        fold_N, heat, lambda found, mask_N: ensembles.tempered(labels, oof_NC[mask_N], found)
    )
    if not gains.gain(labels, oof_NC, after_NC, hot_NC, sure=0.0).accepted:
        return oof_NC, test_TC
    return after_NC, ensembles.tempered(labels, test_TC, heat(np.ones(len(oof_NC), dtype=bool)))


def case(
    rows_ND: Floats, class_N: np.ndarray, rows: int, seed: int, *, shuffled: bool
) -> dict[str, tuple[float, bool]]:
    """Of each way the change of the test loss, of random labels out of fold, and whether it surely falls."""
    chance, classes = np.random.default_rng(seed), int(class_N.max()) + 1
    labels, hot_CC = Labels("one", tuple(map(str, range(classes)))), np.eye(classes, dtype=np.float32)
    class_N = chance.permutation(class_N) if shuffled else class_N
    order = chance.permutation(len(class_N))
    train, test = order[:rows], order[rows : rows + TEST]
    oof_PNC, test_PTC, fold_N = values(labels, rows_ND, class_N, train, test)
    targets_NC, targets_TC = hot_CC[class_N[train]], hot_CC[class_N[test]]
    if shuffled:
        prior_NC = np.tile(targets_NC.mean(0), (rows, 1))
        after = {str(how): blends.out_of_fold(how, labels, oof_PNC, targets_NC, fold_N) for how in HOWS}
        found = {how: gains.gain(labels, prior_NC, each_NC, targets_NC) for how, each_NC in after.items()}
    else:
        fitted = {str(how): blends.fit(how, labels, oof_PNC, targets_NC) for how in HOWS}
        with tempfile.TemporaryDirectory() as aside:
            data = JudgedLabels(labels, targets_NC, np.arange(rows))
            log = blend.stage_log(Run(Path(aside), None, resumed=False), data, SILENT, way="auto")
            fitted["kept"], _ = blend.choose(log, NAMES, oof_PNC, fold_N, way="auto")
        before_TC = fitted["best"].values(labels, test_PTC)
        found = {
            how: gains.gain(labels, before_TC, each.values(labels, test_PTC), targets_TC)
            for how, each in fitted.items()
        }
    changes = {how: (each.difference, each.high < 0) for how, each in found.items()}
    return changes if shuffled else {**changes, "best": (found["best"].loss_before, False)}


def main() -> None:
    """Print the change of the test loss by set and way, over seeds, and how often random labels gain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # networks stop before they converge, as asked
    records = []
    for name, rows_ND, class_N in sets(asked.data):
        rows = min(asked.rows, len(class_N) // 2)
        for shuffled in (False, True):
            for seed in range(asked.seeds):
                for how, found in case(rows_ND, class_N, rows, seed, shuffled=shuffled).items():
                    records.append((name, shuffled, how, *found))
        done = pd.DataFrame(records, columns=COLUMNS)
        means = done[done["set"] == name].groupby(["set", "shuffled", "way"], sort=False)["change"].mean()
        print(means.round(4).to_string(), flush=True)
    table = pd.DataFrame(records, columns=COLUMNS)
    real, null = table[~table["shuffled"]], table[table["shuffled"]]
    print("\nchange of the test loss; `best` is the loss of the part that is best out of fold")
    print(real.pivot_table("change", "set", "way", sort=False).round(4).to_string())
    wide = real.groupby(["way", "set"])["change"].agg(["mean", "std"])
    reach = wide["std"] * {3: 4.303, 5: 2.776}.get(asked.seeds, 1.96) / math.sqrt(asked.seeds)
    print("\nhalf of Student's 95 % interval over seeds")
    print(reach.unstack("way").round(4).to_string())
    sure = (wide["mean"] + reach < 0) & (wide.index.get_level_values("way") != "best")
    print(f"\nsets that surely gain over seeds (Student's 95 % interval):\n{sure.groupby('way').sum().to_string()}")
    print(f"\nseeds of sets that surely gain on test rows:\n{real.groupby('way')['sure'].sum().to_string()}")
    print(f"\nrandom labels, {len(null) // len(HOWS)} cases, surely gained:")
    print(null.groupby("way")["sure"].sum().to_string())


if __name__ == "__main__":
    main()
