"""Rules for the temperature of an ensemble of folds, on real sets with models of scikit-learn.

    python scripts/bench/calibration.py DATA [--rows 100 400] [--seeds 3]

DATA holds banking77/train.csv, clinc150/data_full.json, mnist/*.zip and images/*/*.zip; four more sets come with
scikit-learn. For each set, number of rows, model and seed: five folds, and five of another deal; every rule sees the
out-of-fold outputs and 500 unlabelled rows, and is scored on test rows. `best` fits to the labels of the test rows.

Legend: M members, N labelled rows, U unlabelled rows, T test rows, C classes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from sklearn import datasets
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale

from workbench.crossval import ensembles, gains
from workbench.crossval.ensembles import Combiner, FittedCombination, OutOfFold
from workbench.data.folds.stratified_folds import Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores

FOLDS, CLASSES, UNLABELLED, TEST = 5, 20, 500, 1500
MODELS = {
    "network": lambda seed: MLPClassifier((64,), alpha=1e-5, max_iter=200, random_state=seed),
    "linear, weak penalty": lambda _: LogisticRegression(C=100, max_iter=300),
    "linear, strong penalty": lambda _: LogisticRegression(C=0.05, max_iter=300),
}


def sets(data: Path) -> Iterator[tuple[str, Floats, np.ndarray]]:
    """Names, features and classes."""
    for name in ("digits", "wine", "breast_cancer", "iris"):
        found = getattr(datasets, f"load_{name}")()
        yield name, scale(found.data), found.target
    for name, texts, class_N in texts_of(data):
        yield name, np.asarray(TfidfVectorizer(max_features=1000).fit_transform(texts).toarray()), class_N
    for path in sorted([*data.glob("mnist/*.zip"), *data.glob("images/*/*.zip")]):
        yield path.parent.name, *_pictures(path)


def texts_of(data: Path) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """Names, texts and classes of the first classes of two sets."""
    table = pd.read_csv(data / "banking77" / "train.csv")
    rows = pd.DataFrame(json.loads((data / "clinc150" / "data_full.json").read_text())["train"])
    for name, of in (("banking77", table), ("clinc150", rows)):
        texts, classes = of.iloc[:, 0], of.iloc[:, 1]
        class_N = pd.factorize(np.asarray(classes))[0]
        yield name, np.asarray(texts)[class_N < CLASSES].tolist(), class_N[class_N < CLASSES]


def _pictures(path: Path) -> tuple[Floats, np.ndarray]:
    """Grey pixels, 12 a side, of at most 4,000 pictures; the folder's name is the class."""
    with zipfile.ZipFile(path) as archive:
        names = [each for each in archive.namelist() if re.search(r"\.(png|jpe?g)$", each)]
        names = [names[place] for place in np.random.default_rng(0).permutation(len(names))[:4000]]
        pixels = [np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("L").resize((12, 12))) for n in names]
    return np.stack(pixels).reshape(len(names), -1) / 255, pd.factorize(pd.Series(names).str.split("/").str[-2])[0]


def outputs(model: Any, rows_ND: Floats, classes: int) -> Floats:
    """Log-probabilities (N, C); a class that the model never saw is all but excluded."""
    p_NC = np.full((len(rows_ND), classes), 1e-6)
    p_NC[:, model.classes_] = np.clip(model.predict_proba(rows_ND), 1e-12, 1)
    return np.asarray(np.log(p_NC / p_NC.sum(1, keepdims=True)))


def derivative(labels: Labels, merged_UC: Floats, outputs_MUC: Floats, single: float) -> float:
    """Were labels drawn from the tempered mean, the best temperature of members would be `single`."""
    wanted = np.mean([(labels.values(each / single) * each).sum() for each in outputs_MUC])
    tried = np.geomspace(ensembles.COLDEST, ensembles.HOTTEST, 400)
    found = [(ensembles.tempered(labels, merged_UC, each) * outputs_MUC.mean(0)).sum() for each in tried]
    return float(tried[np.abs(np.asarray(found) - wanted).argmin()])


def case(rows_ND: Floats, class_N: np.ndarray, make: Any, rows: int, seed: int) -> dict[str, tuple[float, float]]:
    """Test loss and calibration error under each rule."""
    classes = int(class_N.max()) + 1
    labels = Labels("one", tuple(map(str, range(classes))))
    order = np.random.default_rng(seed).permutation(len(class_N))
    train, test, more = np.split(order, [rows, rows + min(TEST, (len(order) - rows) // 2)])
    more, hot_NC = more[:UNLABELLED], np.eye(classes, dtype=np.float32)
    splits, members = [], []
    for repeat in (0, 1):
        deal = StratifiedKFold(FOLDS, shuffle=True, random_state=2 * seed + repeat)
        for fold, (_, validated) in enumerate(deal.split(train, class_N[train])):
            mask_N = np.isin(np.arange(rows), validated)
            splits.append(Split(repeat, fold, ~mask_N, mask_N))
            members.append(make(FOLDS * repeat + fold).fit(rows_ND[train[~mask_N]], class_N[train[~mask_N]]))
    oof_MNC, unseen_MUC, test_MTC = (
        np.stack([outputs(each, rows_ND[where], classes) for each in members]) for where in (train, more, test)
    )
    once = slice(FOLDS)
    twice = ensembles.out_of_fold(labels, hot_NC[class_N[train]], splits, cluster_N=np.arange(rows), seed=seed)
    known = OutOfFold(labels, twice.targets_NC, twice.present_MN[once], twice.part_N)
    plain, heated = Combiner(False, "mean"), Combiner(True, "mean")
    single = heated.single_temperature(known, oof_MNC[once], np.ones(rows, dtype=bool))
    before_NC, after_NC = (each.out_of_fold(known, oof_MNC[once]) for each in (plain, heated))
    gained = gains.gain(labels, before_NC, after_NC, known.targets_NC).accepted
    unseen_MUC, test_MTC = unseen_MUC[once], test_MTC[once]
    falls = gains.gain(labels, before_NC, after_NC, known.targets_NC, sure=0.0).accepted
    unseen_UC, test_TC = (FittedCombination(1, "mean").values(labels, each) for each in (unseen_MUC, test_MTC))
    sure = ensembles.matched_temperature(labels, unseen_UC, unseen_MUC, single)
    true_TC = hot_NC[class_N[test]]
    best = ensembles.temperature(labels, classification_scores.outputs_of_values(labels, test_TC), true_TC)
    found = {
        "none": test_TC,
        "of each member": np.mean([labels.values(each / single) for each in test_MTC], axis=0),
        **{
            rule: ensembles.tempered(labels, test_TC, temperature)
            for rule, temperature in {
                "of members, on the mean": single,
                "two deals, mean of two": heated.fit(twice, oof_MNC).temperature,
                "members' derivative": derivative(labels, unseen_UC, unseen_MUC, single),
                "members' confidence": sure,
                "the same, where the loss falls": sure if falls else 1.0,
                "the same, where it surely falls": sure if gained else 1.0,
                "best": best,
            }.items()
        },
    }
    scored = {rule: classification_scores.value_scores(labels, p_TC, true_TC) for rule, p_TC in found.items()}
    return {rule: (each["loss"], each["calibration_error"]) for rule, each in scored.items()}


def main() -> None:
    """Print mean test loss and calibration error, a rule a line and a set a column."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # networks stop before they converge, as asked
    records = []
    for name, rows_ND, class_N in sets(asked.data):
        for rows in asked.rows:
            for model, make in MODELS.items():
                for seed in range(asked.seeds):
                    if FOLDS * (class_N.max() + 1) <= rows <= 0.6 * len(class_N):
                        for rule, (loss, error) in case(rows_ND, class_N, make, rows, seed).items():
                            records.append((name, rows, model, rule, loss, error))
        print(name, flush=True)
    table = pd.DataFrame(records, columns=["set", "rows", "model", "rule", "loss", "error"])
    for score in ("loss", "error"):
        for by in ("set", "rows", "model"):
            wide = table.pivot_table(score, "rule", by, sort=False)
            wide["all"] = table.groupby("rule")[score].mean()
            print(f"\n{score}, test rows\n{wide.round(3).to_string()}")
    print(f"\n{len(table) // table['rule'].nunique()} cases")


if __name__ == "__main__":
    main()
