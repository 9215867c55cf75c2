"""Model, data and books of a cross-validation, and its short stages: calibration to correction by similarity.

Legend: M adapters, N labelled rows, T test rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from workbench.config import RunConfig
from workbench.crossval import (
    decision_rules,
    ensembles,
    fold_adapters,
    neighbour_correction,
    prediction,
    pseudo_labels,
    suspects,
    tta,
)
from workbench.crossval.ensembles import Combiner, FittedCombination, Mask, OutOfFold
from workbench.crossval.fold_adapters import FoldAdapter, FoldContext, RoundOutputs, outputs
from workbench.crossval.neighbour_correction import Correction, NeighbourBank
from workbench.crossval.stages import Predictions, StageLog
from workbench.crossval.tta import TtaDecision
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.tta_views import RowView, user_merge
from workbench.evaluation import classification_scores
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

Scores = dict[str, Any]
PAIRS, CLEANED = 1, 2
"""Rounds of training where suspected rows are dropped: adapters that leave two folds out, and those of the folds."""


def in_words(config: RunConfig, data: FoldData, *, views: bool) -> list[str]:
    """Sentences on the stages that will run, in their order, and on those that need a file which is not named.

    Args:
        views: Whether rows are read in several views.
    """
    several = config.folds.seeds * config.folds.repeats > 1 and data.labels.kind != "number"
    rounds = config.pseudo_label.rounds
    stages = {
        "adapters of the folds": True,
        "calibration": config.ensemble.calibrate and data.labels.kind != "number",
        "suspected labels dropped": config.data.drop_suspects,
        f"pseudo-labels ({rounds} {'round' if rounds == 1 else 'rounds'})": data.unlabelled is not None,
        "ensemble": several if config.ensemble.merge == "auto" else config.ensemble.merge != "mean",
        "test-time views": views,
        "correction by similarity": config.correction.is_on,
        "consensus of near-duplicates": config.ensemble.consensus,
        "decision rule": config.ensemble.decide and decision_rules.fits(data.labels),
        "one adapter on all rows": config.refits,
        "scores on test rows": data.test is not None,
    }
    missing = {
        "pseudo-labels (rows without labels: pseudo_label.unlabelled=FILE)": (
            config.differs("pseudo_label") and data.unlabelled is None
        ),
        "scores on test rows (data.test=FILE)": data.test is None,
    }
    sentences = [f"Stages: {', '.join(name for name, runs in stages.items() if runs)}."]
    if any(missing.values()):
        sentences.append(f"No file is named for: {', '.join(name for name, lacks in missing.items() if lacks)}.")
    return sentences


class KeptCorrection(NamedTuple):
    """A correction that stays, and the rows that it asks."""

    correction: Correction
    bank: NeighbourBank


class Decided(NamedTuple):
    """A rule that stays, by which classes are chosen."""

    labels: Labels
    oof_NC: Floats
    """Moved probabilities of the labelled rows, by rules that did not see them."""


@dataclass(frozen=True)
class CrossvalContext:
    """Model, data and books that all stages need, and the short stages."""

    fold_context: FoldContext
    run: Run
    data: FoldData
    members: list[FoldAdapter]
    known: OutOfFold
    log: StageLog
    callback: Callback
    dropped_N: Mask | None = None
    """Rows that one adapter of all folds is to train without; None: it trains on all."""

    @staticmethod
    def gates(config: RunConfig, data: FoldData, known: OutOfFold, views: Sequence[RowView]) -> int:
        """Stages that have to be surely better out of fold, such as rounds of pseudo-labels, ensembles and views."""
        rounds = config.pseudo_label.rounds if data.unlabelled is not None and config.pseudo_label.sure else 0
        wanted = config.ensemble.merge
        tried = [how for how in ensembles.candidates(wanted, known) if how != wanted]
        corrects = config.correction.is_on and not config.correction.is_forced
        decides = config.ensemble.decide and decision_rules.fits(data.labels)
        return (
            config.data.drop_suspects
            + rounds
            + len(tried)
            + bool(views)
            + corrects
            + config.ensemble.consensus
            + decides
        )

    def predictions(self, combiner: Combiner, round_outputs: RoundOutputs) -> Predictions:
        """Predictions of a round's adapters together, for labelled rows by fits that did not see them."""
        fitted = self.fitted(combiner, round_outputs)
        test_TC = None if round_outputs.test_MTC is None else fitted.values(self.data.labels, round_outputs.test_MTC)
        return Predictions(combiner.out_of_fold(self.known, round_outputs.oof_MNC), test_TC)

    def fitted(self, combiner: Combiner, round_outputs: RoundOutputs) -> FittedCombination:
        """What makes one prediction of all adapters of a round."""
        return combiner.fit(self.known, round_outputs.oof_MNC, unseen_MUC=round_outputs.unseen_MUC)

    def calibrate(self, round_outputs: RoundOutputs) -> Combiner:
        """The first predictions, and a temperature, where it makes the labels likelier."""
        plain, heated = Combiner(calibrate=False, how="mean"), Combiner(calibrate=True, how="mean")
        self.log.begin("supervised", "Adapters of the folds", self.predictions(plain, round_outputs))
        if not self.fold_context.config.ensemble.calibrate or self.data.labels.kind == "number":
            return plain
        voices, together = heated.fit(self.known, round_outputs.oof_MNC), self.fitted(heated, round_outputs)
        facts: dict[str, Any] = {
            "temperature": voices.temperature,
            "temperature of all adapters": together.temperature,
        }
        if (unseen_MUC := round_outputs.unseen_MUC) is not None:
            kind = "test rows, not their labels" if round_outputs.unlabelled_MUC is None else "unlabelled rows"
            facts["fitted on"] = f"{unseen_MUC.shape[1]:,} {kind}"
        # One number, which ranks no class anew, does less harm wrongly kept than wrongly refused
        # (scripts/bench/calibration.py), so that any gain is enough.
        predictions = self.predictions(heated, round_outputs)
        kept = self.log.offer("calibration", "Calibration", predictions, facts, sure=0.0, by_loss=True)
        return heated if kept else plain

    def drop_suspects(self, round_outputs: RoundOutputs, combiner: Combiner) -> tuple[CrossvalContext, RoundOutputs]:
        """Train again without the rows whose label is probably wrong, where that makes labels of all rows likelier.

        Returns:
            The context of the stages that follow, and the outputs of the adapters that stay.
        """
        fold_context, data = self.fold_context, self.data
        if not fold_context.config.data.drop_suspects:
            return self, round_outputs
        name, title = "drop_suspects", "Suspected labels dropped"
        targets_NC, before_NC = data.rows.targets_NC, self.log.predictions.oof_NC
        pairs = suspects.leave_two_out(data.folds)
        alone = data._replace(test=None, unlabelled=None)
        self.callback.say(f"{len(pairs)} adapters that leave two folds out look for wrong labels ...")
        asked = fold_adapters.train_round(
            fold_context, self.run, alone, pairs, [None] * len(pairs), self.callback, number=PAIRS
        )
        dropped = suspects.dropped(data.labels, targets_NC, self.members, pairs, asked.oof_MNC)
        rows = [int(dropped_N.sum()) for dropped_N in dropped]
        facts = {
            "rows": float(np.mean(rows)),
            "share": float(
                np.mean([rows / each.split.train_N.sum() for rows, each in zip(rows, self.members, strict=True)])
            ),
        }
        if not any(rows):
            self.log.abstain(name, title, facts, why="No label is suspected.")
            return self, round_outputs
        members = [each.without(dropped_N) for each, dropped_N in zip(self.members, dropped, strict=True)]
        retrained = fold_adapters.train_round(
            fold_context, self.run, data, members, [None] * len(members), self.callback, number=CLEANED
        )
        predictions = self.predictions(combiner, retrained)
        # Beside the gain on all rows: a label that the adapters trained without it still give was likely right.
        agrees_N = predictions.oof_NC.argmax(1) == targets_NC.argmax(1)
        facts["dropped rows predicted as labelled"] = float(agrees_N[np.any(dropped, axis=0)].mean())
        if not self.log.offer(name, title, predictions, facts):
            return self, round_outputs
        return replace(self, members=members, dropped_N=suspects.suspected(targets_NC, before_NC)), retrained

    def pseudo_label(self, round_outputs: RoundOutputs, combiner: Combiner) -> RoundOutputs:
        """Rounds of pseudo-labels, for as long as each makes the labels of its folds' rows likelier."""
        config = self.fold_context.config.pseudo_label
        for number in range(1, config.rounds + 1) if self.data.unlabelled is not None else ():
            name, title = f"pseudo_label {number}", f"Pseudo-labels, round {number}"
            chosen = pseudo_labels.choices(
                self.fold_context,
                self.data,
                self.members,
                self.known,
                round_outputs,
                calibrate=combiner.calibrate,
                round_number=number,
            )
            facts = pseudo_labels.summary(chosen)
            if not any(len(each.rows) for each in chosen):
                self.log.abstain(name, title, facts, why=chosen[0].reason, sure=config.sure)
                break
            more = [pseudo_labels.added_rows(self.data, each) for each in chosen]
            retrained = fold_adapters.train_round(
                self.fold_context, self.run, self.data, self.members, more, self.callback, number=self._before + number
            )._replace(taught_by=round_outputs.number)
            predictions = self.predictions(combiner, retrained)
            if not self.log.offer(name, title, predictions, facts, least=config.least_gain, sure=config.sure):
                break
            round_outputs = retrained
        return round_outputs

    def merge(self, round_outputs: RoundOutputs, combiner: Combiner) -> Combiner:
        """Another way to make one prediction of many, where it is better than the mean or asked for by name."""
        wanted = self.fold_context.config.ensemble.merge
        for how in ensembles.candidates(wanted, self.known):
            tried = Combiner(combiner.calibrate, how)
            predictions = self.predictions(tried, round_outputs)
            name, keep = f"ensemble {how}", f"ensemble.merge={how}"
            if self.log.offer(name, f"Ensemble, {how}", predictions, {}, forced=how == wanted, how=keep):
                combiner = tried
        return combiner

    def augment(self, round_outputs: RoundOutputs, combiner: Combiner, views: list[RowView]) -> TtaDecision | None:
        """Views of each row, where reading them pays."""
        if not views:
            return None
        config, labels, before = self.fold_context.config.tta, self.data.labels, self.log.predictions
        values_VNC = prediction.out_of_fold(
            self.fold_context, self.run, self.members, self.known, round_outputs, combiner, views, self.data.rows
        )
        decision, oof_NC = tta.fit(
            config,
            labels,
            values_VNC,
            self.data.rows.targets_NC,
            self.known.part_N,
            names=[view.name for view in views],
            calibrate=combiner.calibrate,
            groups_N=self.data.cluster_N,
            user_merge=user_merge(config),
            sure=self.log.sure(),
        )
        decision = replace(decision, gain=self.log.settled("tta", decision.gain))
        test_TC = before.test_TC
        if test_TC is not None and self.data.test is not None and decision.accepted:
            fitted = self.fitted(combiner, round_outputs)
            folders = fold_adapters.adapter_folders(self.run, round_outputs.number, self.members)
            test_TC = prediction.merged(self.fold_context, folders, fitted, decision, self.data.test, test_TC)
        predictions = Predictions(oof_NC, test_TC)
        self.log.judge(
            "tta",
            "Test-time augmentation",
            predictions,
            decision.facts,
            gain=decision.gain,
            why=decision.reason,
            passes=decision.passes,
        )
        return decision

    def correct(self) -> KeptCorrection | None:
        """Rows are drawn to what is said of their nearest rows, where that pays."""
        labels, before = self.data.labels, self.log.predictions
        config, _ = neighbour_correction.fitting(
            self.fold_context.config.correction, self.data.folds, self.data.cluster_N
        )
        if not config.is_on:
            return None
        bank, test_TD = neighbour_correction.bank_of_run(self.fold_context, self.run, self.data, before.oof_NC)
        neighbours = bank.neighbours(config.asked, self.data.cluster_N, max(config.candidates))
        correction, oof_NC = neighbour_correction.fit(
            config, labels, before.oof_NC, self.data.rows.targets_NC, neighbours, self.known.part_N
        )
        test_TC = before.test_TC
        if test_TC is not None and test_TD is not None:
            test_TC = bank.corrected(correction, test_TC, test_TD)
        similarity_NK = neighbours[correction.ask].nearest.similarity_NK[:, : correction.neighbours]
        facts = {
            **correction.facts,
            "similarity": float(similarity_NK.mean()),
            "changed": neighbour_correction.changed(labels, before.oof_NC, oof_NC),
        }
        name, title, predictions = "correction", "Correction by similarity", Predictions(oof_NC, test_TC)
        if config.is_forced:
            self.log.offer(name, title, predictions, facts, forced=True)
            return KeptCorrection(correction, bank)
        gain = neighbour_correction.gain(
            config,
            labels,
            before.oof_NC,
            oof_NC,
            self.data.rows.targets_NC,
            bank.fold_N,
            self.known.part_N,
            groups_N=self.data.cluster_N,
            sure=self.log.sure(),
        )
        gain = self.log.settled(name, gain)
        why, passes = f"{correction.sentence} {gain.sentence}", 1 + 1 / len(self.members)  # one more of the backbone
        self.log.judge(name, title, predictions, facts, gain=gain, why=why, passes=passes)
        return KeptCorrection(correction, bank) if gain.accepted else None

    def consensus(self) -> None:
        """Near-duplicates are given the mean of what is said of them."""
        if not self.fold_context.config.ensemble.consensus:
            return
        before, cluster_T = self.log.predictions, self.data.cluster_T
        oof_NC = pseudo_labels.consensus(before.oof_NC, self.data.cluster_N)
        test_TC = None
        if before.test_TC is not None and cluster_T is not None:
            test_TC = pseudo_labels.consensus(before.test_TC, cluster_T)
        self.log.offer("consensus", "Consensus of near-duplicates", Predictions(oof_NC, test_TC), {})

    def decide(self) -> Decided | None:
        """Classes are chosen by moved probabilities, where `evaluate.metric` becomes better by that."""
        labels, targets_NC, before = self.data.labels, self.data.rows.targets_NC, self.log.predictions
        if not (self.fold_context.config.ensemble.decide and decision_rules.fits(labels)):
            return None
        oof_NC = ensembles.cross_fitted(
            self.known.part_N,
            lambda rows_N: decision_rules.fit(labels, before.oof_NC[rows_N], targets_NC[rows_N]),
            lambda shift, rows_N: labels.moved(before.oof_NC[rows_N], shift),
        )
        shift = decision_rules.fit(labels, before.oof_NC, targets_NC)
        test_TC = None if before.test_TC is None else labels.moved(before.test_TC, shift)
        facts = {"rule": decision_rules.in_words(labels, shift), "shift": dict(zip(labels.names, shift, strict=True))}
        decided = Decided(replace(labels, shift=shift), oof_NC)
        predictions = Predictions(oof_NC, test_TC)
        return decided if self.log.offer("decision", "Decision rule", predictions, facts, of_labels=True) else None

    def refit(self, round_outputs: RoundOutputs, combiner: Combiner) -> Scores | None:
        """One adapter trained on all rows that stayed, with the pseudo-labels of all adapters where rounds of them did.

        Returns:
            Its scores on the test rows, where there are any. Out of fold nobody can judge it.
        """
        self.callback.say("One adapter on all rows ...")
        more, data = None, self.data
        if round_outputs.taught_by is not None:
            before = round_outputs.taught_by
            taught_by = before - 1 if before > self._before else None
            teachers = fold_adapters.read_round(self.run, before)._replace(taught_by=taught_by)
            chosen = pseudo_labels.all_choices(
                self.fold_context,
                data,
                self.known,
                teachers,
                calibrate=combiner.calibrate,
                round_number=round_outputs.number - self._before,
            )
            more = pseudo_labels.added_rows(data, chosen)
        passes = 1.0
        if self.dropped_N is not None:
            passes = 1 / float(np.mean(~self.dropped_N))
            data = data._replace(rows=data.rows.subset(~self.dropped_N))
        folder = fold_adapters.refitted(self.fold_context, self.run, data, more, self.callback, passes=passes)
        if self.data.test is None:
            return None
        every_N = np.ones(len(self.known.targets_NC), dtype=bool)
        temperature = combiner.single_temperature(self.known, round_outputs.oof_MNC, every_N)
        ((outputs_TC,),) = outputs(self.fold_context, [folder], [[self.data.test]])
        return classification_scores.scores_of(self.data.labels, outputs_TC / temperature, self.data.test)

    @property
    def _before(self) -> int:
        """Number of the last round before those of pseudo-labels."""
        return CLEANED if self.fold_context.config.data.drop_suspects else 0

    @property
    def names(self) -> list[str]:
        """Names of the adapters."""
        return [each.name for each in self.members]
