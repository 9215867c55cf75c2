"""How often the gates of a cross-validation accept a stage that changes nothing, and should by no more than they say.

    python scripts/bench/gates.py [--rows 50 100 300 1000] [--draws 1000] [--gates NAME ...]

Each draw has labels of known probabilities and predictions that are as far from these before as after, or farther
after: adapters trained again (pseudo-labels, drop_suspects), weights of members that are alike (combination), views
and neighbours that know nothing, and blends of a part with worse ones. A gate that follows `evaluate.metric` takes a
second a draw, and gets a fifth of the draws. Nominal: 0.025. Calibration is kept for any fall of the loss, by
calibrated predictions too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from workbench.config.sections import metrics
from workbench.config.sections.correction_config import CorrectionConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.crossval import blends, decision_rules, ensembles, gains, neighbour_correction, pseudo_labels, tta
from workbench.crossval.ensembles import Combiner, OutOfFold
from workbench.crossval.neighbour_correction import AnsweringRows
from workbench.data.labelled.labels import Floats, Labels

CLASSES = Labels("one", ("a", "b", "c"))
Chance = np.random.Generator


def labelled(chance: Chance, rows: int, sharp: float) -> tuple[Floats, np.ndarray]:
    """Logits (N, 3), and labels drawn with their probabilities."""
    logits_NC = sharp * chance.normal(size=(rows, 3))
    drawn_N = (chance.random((rows, 1)) > CLASSES.values(logits_NC).cumsum(1)[:, :2]).sum(1)
    return logits_NC, np.eye(3, dtype=np.float32)[drawn_N]


def retrained(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """Two adapters that are equally far from the truth."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    a_NC, b_NC = (CLASSES.values(logits_NC + sharp / 2 * chance.normal(size=logits_NC.shape)) for _ in range(2))
    return gains.gain(CLASSES, a_NC, b_NC, hot_NC)


def judged_by_metric(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """The same two adapters, judged by a score in place of the loss."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    a_NC, b_NC = (CLASSES.values(logits_NC + sharp / 2 * chance.normal(size=logits_NC.shape)) for _ in range(2))
    return gains.gain(replace(CLASSES, metric=metrics.choice("macro_f1", None)), a_NC, b_NC, hot_NC)


def views(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """The mean of two views of the less certain half that say what the row says, but for noise, with a temperature."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    noise_VNC = np.stack([0 * logits_NC, *(sharp / 2 * chance.normal(size=(2, *logits_NC.shape)))])
    decision, _ = tta.fit(
        TtaConfig(views=("lower", "upper"), uncertain=0.5),
        CLASSES,
        np.stack([CLASSES.values(each_NC) for each_NC in logits_NC + noise_VNC]),
        hot_NC,
        np.arange(rows) % ensembles.PARTS,
        names=("lower", "upper"),
        calibrate=True,
    )
    return decision.gain


def correction(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """Neighbours by features that know nothing of the classes."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    before_NC = CLASSES.values(logits_NC + sharp / 2 * chance.normal(size=logits_NC.shape))
    features_ND = chance.normal(size=(rows, 8)).astype(np.float32)
    features_ND /= np.linalg.norm(features_ND, axis=1, keepdims=True)
    fold_N, row_N, config = np.arange(rows) % ensembles.PARTS, np.arange(rows), CorrectionConfig(neighbours=5)
    answers = neighbour_correction.answers(CLASSES, before_NC, hot_NC)
    asked = {
        ask: AnsweringRows(neighbour_correction.across_folds(ask, features_ND, fold_N, row_N, 5), answers[ask])
        for ask in config.asked
    }
    _, after_NC = neighbour_correction.fit(config, CLASSES, before_NC, hot_NC, asked, fold_N)
    return neighbour_correction.gain(config, CLASSES, before_NC, after_NC, hot_NC, fold_N, fold_N)


def consensus(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """The mean of pairs of rows that only look alike."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    before_NC, cluster_N = CLASSES.values(logits_NC), np.arange(rows) // 2
    return gains.gain(CLASSES, before_NC, pseudo_labels.consensus(before_NC, cluster_N), hot_NC, groups_N=cluster_N)


def blend(how: blends.How, chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """A blend of a part that knows all and two that repeat it with noise, over that part alone."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    noise_PNC = np.stack([0 * logits_NC, *(sharp / 2 * chance.normal(size=(2, *logits_NC.shape)))])
    values_PNC = np.stack([CLASSES.values(each_NC) for each_NC in logits_NC + noise_PNC])
    fold_N = np.arange(rows) % ensembles.PARTS
    return gains.gain(CLASSES, values_PNC[0], blends.out_of_fold(how, CLASSES, values_PNC, hot_NC, fold_N), hot_NC)


def decision(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """A decision rule for classes that are equally frequent, and probabilities that are right."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    p_NC, labels = CLASSES.values(logits_NC), replace(CLASSES, metric=metrics.choice("macro_f1", None))
    after_NC = ensembles.cross_fitted(
        np.arange(rows) % ensembles.PARTS,
        lambda rows_N: decision_rules.fit(labels, p_NC[rows_N], hot_NC[rows_N]),
        lambda shift, rows_N: labels.moved(p_NC[rows_N], shift),
    )
    return gains.gain(labels, p_NC, after_NC, hot_NC)


def calibration(chance: Chance, rows: int, sharp: float) -> gains.Gain:
    """A cross-fitted temperature of calibrated predictions."""
    logits_NC, hot_NC = labelled(chance, rows, sharp)
    known = OutOfFold(CLASSES, hot_NC, np.ones((1, rows), dtype=bool), np.arange(rows) % ensembles.PARTS)
    before_NC, after_NC = (Combiner(heats, "mean").out_of_fold(known, logits_NC[None]) for heats in (False, True))
    return gains.gain(CLASSES, before_NC, after_NC, hot_NC, sure=0.0)


GATES: dict[str, Callable[[Chance, int, float], gains.Gain]] = {
    "retrained": retrained,
    "judged_by_metric": judged_by_metric,
    "views": views,
    "correction": correction,
    "consensus": consensus,
    "blend, greedy": partial(blend, "greedy"),
    "blend, convex": partial(blend, "convex"),
    "blend, stacking": partial(blend, "stacking"),
    "decision": decision,
    "calibration (any fall)": calibration,
}


def shares(rows: int, draws: int, gates: Sequence[str]) -> list[dict[str, object]]:
    """Accepted shares of each gate, for predictions that are unsure (sharp 1) and sure (4)."""
    records: list[dict[str, object]] = []
    for gate in gates:
        judge, count = GATES[gate], draws // 5 if GATES[gate] in (judged_by_metric, decision) else draws
        for sharp in (1.0, 4.0):
            found = [judge(np.random.default_rng([rows, draw]), rows, sharp) for draw in range(count)]
            share = float(np.mean([each.accepted for each in found]))
            records.append({"gate": gate, "sharp": sharp, "rows": rows, "accepted": share})
    return records


def main() -> None:
    """Print accepted shares, a gate a line and numbers of rows as columns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[50, 100, 300, 1000])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    asked = parser.parse_args()
    table = pd.DataFrame([record for rows in asked.rows for record in shares(rows, asked.draws, asked.gates)])
    print(table.pivot_table("accepted", ["gate", "sharp"], "rows", sort=False).round(4).to_string())
    error, fewer = ((0.025 * 0.975 / draws) ** 0.5 for draws in (asked.draws, asked.draws // 5))
    print(f"nominal 0.025, standard error {error:.4f}, of gates that follow a metric {fewer:.4f}")


if __name__ == "__main__":
    main()
