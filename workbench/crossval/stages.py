"""The stages of a cross-validation: what each changed on out-of-fold rows, whether it stayed, and, at the end, on test.

Legend: N labelled rows, T test rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from workbench.crossval import gains
from workbench.crossval.gains import Gain
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labels import Floats
from workbench.evaluation import target_scores
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

Facts: TypeAlias = Mapping[str, Any]
"""What a stage was made of, for the report."""


@dataclass(frozen=True)
class Predictions:
    """What is predicted, at some stage."""

    oof_NC: Floats
    """Of the labelled rows, by adapters that did not train on them and fits that did not see them."""
    test_TC: Floats | None


@dataclass(frozen=True)
class StageResult:
    """One stage; a refused one shows what it would have done."""

    name: str
    title: str
    belief: Predictions
    accepted: bool
    why: str
    gain: Gain | None
    seconds: float
    facts: Facts


@dataclass
class StageLog:
    """Keeps the books of a run's stages."""

    run: Run
    data: FoldData
    watcher: Callback
    stages: list[StageResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def belief(self) -> Predictions:
        """Of the last stage that stayed."""
        return [stage for stage in self.stages if stage.accepted][-1].belief

    def begin(self, name: str, title: str, belief: Predictions) -> None:
        """The stage that the others are held against."""
        score = target_scores.value_scores(self.data.labels, belief.oof_NC, self.data.rows.targets_NC)
        self._enter(StageResult(name, title, belief, True, f"Out of fold: loss {score['loss']:.4f}.", None, 0.0, {}))

    def offer(
        self,
        name: str,
        title: str,
        belief: Predictions,
        facts: Facts,
        *,
        least: float = 0.0,
        sure: float = gains.SURE,
        forced: bool = False,
    ) -> bool:
        """Whether a stage stays: it does where out-of-fold rows say that it helps, or where it is `forced`."""
        found = gains.gain(
            self.data.labels,
            self.belief.oof_NC,
            belief.oof_NC,
            self.data.rows.targets_NC,
            least=least,
            sure=sure,
            groups_N=self.data.cluster_N,
        )
        stays = found.accepted or forced
        why = found.sentence + (" Kept, as the configuration names it." if forced and not found.accepted else "")
        self._enter(StageResult(name, title, belief, stays, why, found, 0.0, facts))
        return stays

    def judged(self, name: str, title: str, belief: Predictions, facts: Facts, *, gain: Gain, why: str) -> None:
        """A stage that was held against the last belief already."""
        self._enter(StageResult(name, title, belief, gain.accepted, why, gain, 0.0, facts))

    def abstain(self, name: str, title: str, facts: Facts, *, why: str) -> None:
        """A stage that had nothing to offer."""
        self._enter(StageResult(name, title, self.belief, False, why, None, 0.0, facts))

    def write(self, **more: Any) -> None:
        """stages.json. The test rows are looked at here, when no stage can change any more."""
        told = [self._told(stage) for stage in self.stages]
        files.write_json(self.run.path / "stages.json", {"stages": told, **more})

    def _enter(self, stage: StageResult) -> None:
        """Seconds of a stage that was done before a restart are those that it took then."""
        seconds = {stage.name: round(time.monotonic() - self._began, 1), **self.run.manifest.get("seconds", {})}
        self.run.note(seconds=seconds)
        self._began = time.monotonic()
        self.stages.append(StageResult(**{**vars(stage), "seconds": seconds[stage.name]}))
        self.watcher.say(f"{stage.title}: {stage.why}")

    def _told(self, stage: StageResult) -> dict[str, Any]:
        labels, test, test_TC = self.data.labels, self.data.test, stage.belief.test_TC
        return {
            "name": stage.name,
            "title": stage.title,
            "accepted": stage.accepted,
            "why": stage.why,
            "seconds": stage.seconds,
            "oof": target_scores.value_scores(labels, stage.belief.oof_NC, self.data.rows.targets_NC),
            "test": None
            if test is None or test_TC is None
            else target_scores.value_scores(labels, test_TC, test.targets_NC),
            "gain": None if stage.gain is None else asdict(stage.gain),
            "facts": dict(stage.facts),
        }
