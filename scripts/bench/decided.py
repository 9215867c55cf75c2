"""What a cross-validation ships on ten real sets, and which stages its gates keep, against the truth on test rows.

    python scripts/bench/decided.py DATA [--rows 200] [--seeds 3] [--backbone FOLDER]

DATA is that of calibration.py. Five folds of two models of scikit-learn go through the stages of the product. `before`
are the first rules: each member is divided by one temperature before the mean, always; any other stage stays where
Hall's interval of the loss is below 0, whatever `evaluate.metric` says. `after` are those of now. Views are shifts and
a mirror of pictures, and texts without a tenth of their words. Kept or refused, a stage is applied to the test rows,
where its loss or accuracy becomes better or not.

With --backbone, the two sets of texts alone, by the mean of the last hidden states of that encoder, frozen; no views.

Legend: M members, N labelled rows, U unlabelled rows, T test rows, V views, C classes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
from calibration import FOLDS, MODELS, TEST, UNLABELLED, outputs, sets, texts_of
from scipy import stats
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import scale

from workbench.config.sections import metrics
from workbench.config.sections.correction_config import CorrectionConfig
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.crossval import blends, ensembles, gains, neighbour_correction, pseudo_labels, tta
from workbench.crossval.ensembles import Combiner, FittedCombination
from workbench.crossval.gains import Gain
from workbench.crossval.neighbour_correction import NeighbourBank
from workbench.crossval.stages import JudgedLabels
from workbench.data.folds.stratified_folds import Split
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import chosen_metric, classification_scores
from workbench.recipes.over import blend
from workbench.runs.run_directory import Run
from workbench.training.callbacks import SILENT

KINDS = ("network", "linear, weak penalty")
TEXTS, TABLES, METRIC = ("banking77", "clinc150"), ("wine", "breast_cancer", "iris"), "accuracy"


class Stage(NamedTuple):
    """One stage of one run."""

    judge: Callable[[Labels], Gain]
    """What out-of-fold rows say of it, by the loss or by the metric of the labels."""
    before_TC: Floats
    after_TC: Floats


def hall(change_G: Floats, *, sure: float = gains.SURE) -> tuple[float, float]:
    """The interval of `gains` as it was: Hall's alone."""
    mean, groups = float(change_G.mean()), len(change_G)
    spread = float(change_G.std())
    if spread == 0:
        return mean, mean
    skew = float((((change_G - mean) / spread) ** 3).mean()) / math.sqrt(groups)
    error, bound = spread / math.sqrt(groups - 1), float(stats.t.ppf((1 + sure) / 2, groups - 1))
    if abs(skew) < 1e-6:
        return mean - error * bound, mean + error * bound
    low, high = (3 / skew * (float(np.cbrt(1 + skew * x - skew**2 / 6)) - 1) for x in (bound, -bound))
    return mean - error * low, mean - error * high


def embedded(backbone: Path, data: Path) -> Iterator[tuple[str, Floats, np.ndarray]]:
    """The sets of texts, by features of a frozen encoder."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(backbone), AutoModel.from_pretrained(backbone).eval()

    @torch.inference_mode()
    def features(texts: list[str]) -> Floats:
        means = []
        for start in range(0, len(texts), 32):
            batch = tokenizer(texts[start : start + 32], padding=True, truncation=True, return_tensors="pt")
            weight_BL1 = batch["attention_mask"][..., None]
            hidden_BLD = model(**batch).last_hidden_state
            means.append(((hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)).numpy())
        return np.concatenate(means).astype(np.float64)

    for name, texts, class_N in texts_of(data):
        yield f"{name}, {backbone.name}", scale(features(texts)), class_N


def views(name: str, rows_ND: Floats) -> list[Floats]:
    """Other looks at rows, each (N, D)."""
    if name in TABLES or "," in name:
        return []
    if name in TEXTS:
        shape = rows_ND.shape[1]
        return [rows_ND * (np.random.default_rng(view).random(shape) > 0.1) for view in (0, 1)]
    side = math.isqrt(rows_ND.shape[1])
    pixels_NHW = rows_ND.reshape(-1, side, side)
    looks = [np.roll(pixels_NHW, 1, axis=2), np.roll(pixels_NHW, -1, axis=2), pixels_NHW[:, :, ::-1]]
    return [each_NHW.reshape(rows_ND.shape) for each_NHW in looks]


@dataclass
class Case:
    """Five folds of one model on one set."""

    name: str
    rows_ND: Floats
    class_N: np.ndarray
    make: Callable[[int], Any]
    train: np.ndarray
    test: np.ndarray
    more: np.ndarray
    seed: int

    def __post_init__(self) -> None:
        classes = int(self.class_N.max()) + 1
        self.labels = Labels("one", tuple(map(str, range(classes))))
        hot_CC = np.eye(classes, dtype=np.float32)
        self.targets_NC, self.targets_TC = hot_CC[self.class_N[self.train]], hot_CC[self.class_N[self.test]]
        deal = StratifiedKFold(FOLDS, shuffle=True, random_state=self.seed)
        every = np.arange(len(self.train))
        self.splits = []
        for fold, (_, held) in enumerate(deal.split(self.train, self.class_N[self.train])):
            held_N = np.isin(every, held)
            self.splits.append(Split(0, fold, ~held_N, held_N))
        self.fold_N = np.stack([each.validation_N for each in self.splits]).argmax(0)
        self.known = ensembles.out_of_fold(self.labels, self.targets_NC, self.splits, cluster_N=every, seed=self.seed)
        self.members = [self.fitted(each) for each in self.splits]
        self.oof_MNC, self.unseen_MUC, self.test_MTC = map(self.asked, (self.train, self.more, self.test))
        # What every stage after calibration begins with.
        plain, heated = Combiner(False, "mean"), Combiner(True, "mean")
        offered = gains.gain(self.labels, self.oof(plain), self.oof(heated), self.targets_NC, sure=0.0)
        self.combiner = heated if offered.accepted else plain
        self.combined = self.combiner.fit(self.known, self.oof_MNC, unseen_MUC=self.unseen_MUC)
        self.before_NC, self.before_TC = self.oof(self.combiner), self.combined.values(self.labels, self.test_MTC)

    def fitted(self, split: Split, rows: np.ndarray | None = None, class_n: np.ndarray | None = None) -> Any:
        """A model of the fold's training rows, and of pseudo-labelled ones."""
        rows_nD, known_n = self.rows_ND[self.train[split.train_N]], self.class_N[self.train[split.train_N]]
        if rows is not None and class_n is not None:
            rows_nD, known_n = np.concatenate([rows_nD, self.rows_ND[rows]]), np.concatenate([known_n, class_n])
        return self.make(split.fold).fit(rows_nD, known_n)

    def asked(self, rows: np.ndarray, rows_ND: Floats | None = None) -> Floats:
        """Outputs (M, N, C) of the members."""
        rows_ND = self.rows_ND if rows_ND is None else rows_ND
        return np.stack([outputs(each, rows_ND[rows], len(self.labels.names)) for each in self.members])

    def oof(self, combiner: Combiner) -> Floats:
        """Out-of-fold values (N, C)."""
        return combiner.out_of_fold(self.known, self.oof_MNC)

    def change(self, before_NC: Floats, after_NC: Floats, **more: Any) -> Callable[[Labels], Gain]:
        """The gate of a stage."""
        return lambda labels: gains.gain(labels, before_NC, after_NC, self.targets_NC, **more)

    def calibrations(self) -> dict[str, Floats]:
        """What is shipped (T, C) without a temperature, with that of before, and with that of now where it is kept."""
        every_N = np.ones(len(self.train), dtype=bool)
        single = Combiner(True, "mean").single_temperature(self.known, self.oof_MNC, every_N)
        plain = FittedCombination(1.0, "mean")
        return {
            "none": plain.values(self.labels, self.test_MTC),
            "before": plain.values(self.labels, self.test_MTC / single),
            "after": self.before_TC,
        }

    def calibration(self) -> Stage:
        """The temperature of now."""
        plain, heated = Combiner(False, "mean"), Combiner(True, "mean")
        after_TC = heated.fit(self.known, self.oof_MNC, unseen_MUC=self.unseen_MUC).values(self.labels, self.test_MTC)
        judge = self.change(self.oof(plain), self.oof(heated), sure=0.0)
        return Stage(judge, self.calibrations()["none"], after_TC)

    def pseudo_label(self) -> Stage | None:
        """Each fold is trained again with rows that its own model is sure of."""
        config, kept, found = PseudoLabelConfig(), self.members, False
        retrained = []
        for member, (split, model) in enumerate(zip(self.splits, kept, strict=True)):
            heat = self.combiner.fit(self.known, self.oof_MNC, split.train_N).temperature
            chosen = pseudo_labels.choose(
                config,
                self.labels,
                self.labels.values(self.unseen_MUC[[member]]),
                labelled_C=self.targets_NC[split.train_N].astype(np.float64).sum(0),
                round_number=1,
                temperature=heat,
            )
            found |= bool(len(chosen.rows))
            again = (
                self.fitted(split, self.more[chosen.rows], chosen.targets_nC.argmax(1)) if len(chosen.rows) else model
            )
            retrained.append(again)
        if not found:
            return None
        try:
            self.members = retrained
            oof_MNC, unseen_MUC, test_MTC = map(self.asked, (self.train, self.more, self.test))
        finally:
            self.members = kept
        combined = self.combiner.fit(self.known, oof_MNC, unseen_MUC=unseen_MUC)
        after_NC = self.combiner.out_of_fold(self.known, oof_MNC)
        return Stage(self.change(self.before_NC, after_NC), self.before_TC, combined.values(self.labels, test_MTC))

    def tta(self) -> Stage | None:
        """The mean of views, on all rows."""
        looks = views(self.name, self.rows_ND)
        if not looks:
            return None
        seen_VMNC = [self.oof_MNC, *(self.asked(self.train, each_ND) for each_ND in looks)]
        values_VNC = np.stack([self.combiner.out_of_fold(self.known, self.oof_MNC, each) for each in seen_VMNC])
        tested_VMTC = [self.test_MTC, *(self.asked(self.test, each_ND) for each_ND in looks)]
        tested_VTC = np.stack([self.combined.values(self.labels, each) for each in tested_VMTC])

        def fit(labels: Labels) -> tta.TtaDecision:
            names = [str(view) for view in range(len(looks))]
            config, heats = TtaConfig(views=("lower",)), self.combiner.calibrate
            targets_NC, part_N = self.targets_NC, self.known.part_N
            return tta.fit(config, labels, values_VNC, targets_NC, part_N, names=names, calibrate=heats)[0]

        decision = fit(self.labels)
        decision = replace(decision, gain=replace(decision.gain, accepted=True))
        after_TC = tta.apply(decision, self.labels, tested_VTC)
        return Stage(lambda labels: fit(labels).gain, self.before_TC, after_TC)

    def correction(self) -> Stage:
        """Correction by the nearest rows, by the features that the models have."""
        config, cluster_N = CorrectionConfig(neighbours=(5,)), np.arange(len(self.train))
        answers = neighbour_correction.answers(self.labels, self.before_NC, self.targets_NC)
        bank = NeighbourBank(self.rows_ND[self.train].astype(np.float32), self.fold_N, answers)
        asked = bank.neighbours(config.asked, cluster_N, max(config.candidates))
        part_N = self.known.part_N
        correction, after_NC = neighbour_correction.fit(
            config, self.labels, self.before_NC, self.targets_NC, asked, part_N
        )

        def judge(labels: Labels) -> Gain:
            before_NC, targets_NC, fold_N = self.before_NC, self.targets_NC, self.fold_N
            return neighbour_correction.gain(config, labels, before_NC, after_NC, targets_NC, fold_N, part_N)

        after_TC = bank.corrected(correction, self.before_TC, self.rows_ND[self.test].astype(np.float32))
        return Stage(judge, self.before_TC, after_TC)


def blended(cases: list[Case]) -> tuple[bool, Floats, Floats]:
    """Whether `workbench blend` keeps more than the best part, and values (T, C) of that part and of the blend.

    Where none is kept, the blend is the mean.
    """
    first = cases[0]
    values_PNC, tested_PTC = (np.stack([getattr(each, name) for each in cases]) for name in ("before_NC", "before_TC"))
    with tempfile.TemporaryDirectory() as aside:
        data = JudgedLabels(first.labels, first.targets_NC, np.arange(len(first.train)))
        log = blend.stage_log(Run(Path(aside), None, resumed=False), data, SILENT, way="auto")
        kept, _ = blend.choose(log, list(KINDS), values_PNC, first.fold_N, way="auto")
    best, mean = (blends.fit(how, first.labels, values_PNC, first.targets_NC) for how in ("best", "mean"))
    before_TC, after_TC = (each.values(first.labels, tested_PTC) for each in (best, kept))
    stays = not np.allclose(before_TC, after_TC)
    return stays, before_TC, after_TC if stays else mean.values(first.labels, tested_PTC)


STAGES: dict[str, Callable[[Case], Stage | None]] = {
    "calibration": Case.calibration,
    "pseudo-labels": Case.pseudo_label,
    "views": Case.tta,
    "correction": Case.correction,
}


def decided(case: Case) -> Iterator[tuple[str, str, str, bool, float]]:
    """Stage, score, rule, whether it is kept, and the change of the score on test rows; below 0 is better."""
    by_metric = replace(case.labels, metric=metrics.choice(METRIC, None))

    def changes(stage: Stage) -> tuple[float, float]:
        before, after = (chosen_metric.of_targets(by_metric, p, case.targets_TC) for p in stage[1:])
        losses = [gains.row_losses(case.labels, p_TC, case.targets_TC).mean() for p_TC in stage[1:]]
        return float(losses[1] - losses[0]), before - after

    for name, make in STAGES.items():
        if (stage := make(case)) is None:
            continue
        loss, score = changes(stage)
        if name == "calibration":
            shipped = case.calibrations()
            lossy = changes(Stage(stage.judge, shipped["none"], shipped["before"]))[0]
            yield name, "loss", "before", True, lossy
            yield name, "loss", "after", stage.judge(case.labels).accepted, loss
            continue
        with mock.patch.object(gains, "_interval", hall):
            old = stage.judge(case.labels).accepted
        yield name, "loss", "before", old, loss
        yield name, "loss", "after", stage.judge(case.labels).accepted, loss
        yield name, METRIC, "before", old, score
        yield name, METRIC, "after", stage.judge(by_metric).accepted, score


def main() -> None:
    """Print what is shipped by set, and decisions by stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--backbone", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # networks stop before they converge, as asked
    shipped, decisions = [], []
    for name, rows_ND, class_N in sets(asked.data) if asked.backbone is None else embedded(asked.backbone, asked.data):
        rows = min(asked.rows, len(class_N) // 2)
        for seed in range(asked.seeds):
            order = np.random.default_rng(seed).permutation(len(class_N))
            train, test, more = np.split(order, [rows, rows + min(TEST, (len(order) - rows) * 2 // 3)])
            parts = [(train, test, more[:UNLABELLED], seed)] * len(KINDS)
            cases = [Case(name, rows_ND, class_N, MODELS[kind], *part) for kind, part in zip(KINDS, parts, strict=True)]
            for kind, case in zip(KINDS, cases, strict=True):
                for rule, p_TC in case.calibrations().items():
                    scores = classification_scores.value_scores(case.labels, p_TC, case.targets_TC)
                    shipped.append((name, kind, rule, scores["loss"], scores["calibration_error"]))
                decisions += [(name, *each) for each in decided(case)]
            kept, before_TC, after_TC = blended(cases)
            losses = (gains.row_losses(case.labels, p_TC, case.targets_TC).mean() for p_TC in (after_TC, before_TC))
            decisions.append((name, "blend", "loss", "after", kept, float(next(losses) - next(losses))))
        print(name, flush=True)
    table = pd.DataFrame(shipped, columns=["set", "model", "rule", "loss", "error"])
    wide = table.pivot_table(["loss", "error"], "set", "rule", sort=False)
    wide.loc["all"] = table.groupby("rule")[["loss", "error"]].mean().unstack()
    print(f"\nshipped, on test rows\n{wide.round(3).to_string()}")
    table = pd.DataFrame(decisions, columns=["set", "stage", "score", "rule", "kept", "change"])
    better = table["change"] < 0
    counted = {
        "kept, gains": table["kept"] & better,
        "kept, gains nothing": table["kept"] & ~better,
        "refused, gains": ~table["kept"] & better,
        "refused, gains nothing": ~table["kept"] & ~better,
        "change": table["change"] * table["kept"],
    }
    by = ["stage", "score", "rule"]
    print(f"\n{table.assign(**counted).groupby(by, sort=False)[list(counted)].sum().round(3).to_string()}")
    print(f"\n{len(shipped) // 3} runs; `change` is the sum over them of what the kept ones change on test rows")


if __name__ == "__main__":
    main()
