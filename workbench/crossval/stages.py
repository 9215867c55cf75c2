"""The stages of a cross-validation: what each changed on out-of-fold rows, whether it stayed, and, at the end, on test.

Legend: N labelled rows, T test rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from workbench.crossval import gains
from workbench.crossval.gains import Gain
from workbench.data.folds.duplicates import Ints
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores
from workbench.evaluation.classification_scores import OneHot
from workbench.runs import files
from workbench.runs.resume_command import resume_command
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

Facts: TypeAlias = Mapping[str, Any]
"""Inputs and results of a stage, for the report."""


class Predictions(NamedTuple):
    """Predictions after a stage, out of fold and on test rows."""

    oof_NC: Floats
    """Outputs for the labelled rows, by adapters that did not train on them and fits that did not see them."""
    test_TC: Floats | None


class JudgedLabels(NamedTuple):
    """What stages are judged on where no FoldData is: the words of rows, or rows of several runs."""

    labels: Labels
    targets_NC: OneHot
    cluster_N: Ints
    """Near-duplicates, and words of one row, have the same number."""
    scores: Callable[[Floats], Mapping[str, float]] = lambda values_NC: {}
    """Further scores of values (N, C), such as those of entities."""
    test: None = None

    @property
    def rows(self) -> JudgedLabels:
        """What has the targets."""
        return self


class StageResult(NamedTuple):
    """One stage; a refused one shows what it would have done."""

    name: str
    title: str
    predictions: Predictions
    accepted: bool
    why: str
    gain: Gain | None
    seconds: float
    facts: Facts
    passes: float = 1.0
    """Forward passes of a later prediction for each one of before, while the stage is kept."""
    of_labels: bool = False
    """Whether its predictions choose labels alone, while probabilities stay those of the stage before."""


@dataclass
class StageLog:
    """Keeps the books of a run's stages, and the error rate that they share.

    All stages are judged on the same out-of-fold rows, so that each of `gates` stages gets that share of the error rate
    of one. A stage that stays hands its share on to those after it, as in Holm's procedure, in the order of the stages:
    the graphical form of it by Bretz et al. 2009, "A graphical approach to sequentially rejective multiple test
    procedures". Where no stage helps, one stays in at most 2.5 of 100 runs, as often as a single stage would.

    Args:
        gates: Stages that have to be surely better; those that the configuration forces, or keeps for any gain, are
            none.
    """

    run: Run
    data: FoldData | JudgedLabels
    callback: Callback
    gates: int = 1
    keep: Sequence[str] = ()
    """Stages that stay whatever their gain; see `folds.keep`."""
    resumes: bool = True
    """Whether the run, once it is done, can be resumed with other choices."""
    stages: list[StageResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._left = self.gates
        self._share = 1 / max(1, self.gates)

    def sure(self, wanted: float = gains.SURE) -> float:
        """Confidence that the next stage's gain has to have, so that all stages together have `wanted`.

        0 asks for a gain that need not be sure, and stays 0.
        """
        return 1 - (1 - wanted) * self._share if wanted else 0.0

    def _judge(self, *, stays: bool) -> None:
        """Count a stage that was decided about; one that stays hands its share of the error rate on."""
        self._left = max(0, self._left - 1)
        if stays and self._left:
            self._share *= (self._left + 1) / self._left

    @property
    def predictions(self) -> Predictions:
        """Predictions after the last stage that was kept."""
        return [stage for stage in self.stages if stage.accepted and not stage.of_labels][-1].predictions

    def begin(self, name: str, title: str, predictions: Predictions) -> None:
        """The stage that the others are held against."""
        score = classification_scores.value_scores(self.data.labels, predictions.oof_NC, self.data.rows.targets_NC)
        self._enter(
            StageResult(name, title, predictions, True, f"Out of fold: loss {score['loss']:.4f}.", None, 0.0, {})
        )

    def offer(
        self,
        name: str,
        title: str,
        predictions: Predictions,
        facts: Facts,
        *,
        least: float = 0.0,
        sure: float = gains.SURE,
        forced: bool = False,
        how: str | None = "",
        of_labels: bool = False,
        by_loss: bool = False,
    ) -> bool:
        """Whether a stage stays: it does where out-of-fold rows say that it helps, or where it is `forced` or named.

        Args:
            how: The `key=value` that keeps it, where that is not `folds.keep`; None: nothing does.
            of_labels: It chooses labels alone.
            by_loss: Judged by the loss although a metric is named, as that of labels cannot see it.
        """
        stage_gain = gains.gain(
            replace(self.data.labels, metric=None) if by_loss else self.data.labels,
            self.predictions.oof_NC,
            predictions.oof_NC,
            self.data.rows.targets_NC,
            least=least,
            sure=self.sure(sure),
            groups_N=self.data.cluster_N,
        )
        if of_labels:  # probabilities stay as they are
            stage_gain = replace(stage_gain, loss_after=stage_gain.loss_before, difference=0.0, low=0.0, high=0.0)
        if sure and not forced:
            self._judge(stays=stage_gain.accepted)
        stage_gain = self.settled(name, stage_gain, forced=forced)
        said = f"{facts['rule']} {stage_gain.verdict}" if of_labels else stage_gain.sentence
        why = said + self._to_keep(name, stage_gain, how)
        self._enter(
            StageResult(name, title, predictions, stage_gain.accepted, why, stage_gain, 0.0, facts, of_labels=of_labels)
        )
        return stage_gain.accepted

    def judge(
        self,
        name: str,
        title: str,
        predictions: Predictions,
        facts: Facts,
        *,
        gain: Gain,
        why: str,
        passes: float = 1.0,
    ) -> None:
        """A stage that was held against the last predictions already, with the confidence that `sure` gives."""
        self._judge(stays=not gain.reason)
        why += self._to_keep(name, gain)
        self._enter(StageResult(name, title, predictions, gain.accepted, why, gain, 0.0, facts, passes))

    def settled(self, name: str, gain: Gain, *, forced: bool = False) -> Gain:
        """The gain of a stage, accepted against its reason where the stage is `forced` or named by `keep`."""
        named = name in self.keep or name.partition(" ")[0] in self.keep
        return replace(gain, accepted=True, kept=True) if gain.reason and (forced or named) else gain

    def _to_keep(self, name: str, gain: Gain, how: str | None = "") -> str:
        """What to write to keep a stage that was refused, for a person."""
        if gain.accepted or how is None:
            return ""
        word = how or f"folds.keep=[{', '.join([*self.keep, name])}]"
        if not self.resumes:
            return f" Write `{word}` in a new run to keep it all the same."
        return f" To keep it all the same: `{resume_command(self.run.home, word)}`, which trains none of it again."

    def abstain(self, name: str, title: str, facts: Facts, *, why: str, sure: float = gains.SURE) -> None:
        """A stage that had nothing to offer; its share of the error rate is spent."""
        if sure:
            self._judge(stays=False)
        self._enter(StageResult(name, title, self.predictions, False, why, None, 0.0, facts))

    def write(self, **more: Any) -> None:
        """stages.json. The test rows are looked at here, when no stage can change any more."""
        labels, test, targets_NC = self.data.labels, self.data.test, self.data.rows.targets_NC
        records = []
        for stage in self.stages:
            oof_NC, test_TC = stage.predictions.oof_NC, stage.predictions.test_TC
            record = {name: getattr(stage, name) for name in ("name", "title", "accepted", "why", "seconds", "passes")}
            record["oof"] = classification_scores.value_scores(labels, oof_NC, targets_NC)
            if isinstance(self.data, JudgedLabels):
                record["oof"] |= self.data.scores(oof_NC)
            record["test"] = (
                None
                if test is None or test_TC is None
                else classification_scores.value_scores_of(labels, test_TC, test)
            )
            if stage.of_labels:  # its probabilities are those of before
                shipped = self.predictions
                told = classification_scores.value_scores(labels, shipped.oof_NC, targets_NC)
                record["oof"] = told | classification_scores.of_labels(labels, record["oof"])
                if test is not None and shipped.test_TC is not None:
                    told = classification_scores.value_scores_of(labels, shipped.test_TC, test)
                    record["test"] = told | classification_scores.of_labels(labels, record["test"])
            record["gain"] = None if stage.gain is None else asdict(stage.gain)
            records.append(record | {"facts": dict(stage.facts)})
        files.write_json(self.run.path / "stages.json", {"stages": records, **more})

    def _enter(self, stage: StageResult) -> None:
        """Seconds of a stage that was done before a restart are those that it took then."""
        seconds = {stage.name: round(time.monotonic() - self._began, 1), **self.run.manifest.get("seconds", {})}
        self.run.note(seconds=seconds)
        self._began = time.monotonic()
        self.stages.append(stage._replace(seconds=seconds[stage.name]))
        later = f"; a later prediction costs {stage.passes:.2g} times as much" if stage.passes != 1 else ""
        self.callback.say(f"{stage.title} ({seconds[stage.name]:.0f} s{later}): {stage.why}")
