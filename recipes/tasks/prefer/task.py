"""The task `prefer` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import RunConfig
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.recipes.single import token_reference
from workbench.recipes.task import DryTask, RowFile, ScoringOptions
from workbench.recipes.tasks.prefer import preference_reference, preference_run
from workbench.recipes.tasks.prefer.preference_run import PreferenceRun
from workbench.recipes.tasks.sft.task import TokenTask, dry_text
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.inspection import Inspection


class PreferenceTask(TokenTask):
    """Better answers become likelier."""

    scores_later = False

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> PreferenceRun:
        return preference_run.begin(config, run, callback, loader=loader)

    def inspect(self, config: RunConfig) -> Inspection:
        from workbench.recipes.tasks.prefer import prefer_verbs

        return prefer_verbs.inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.prefer import prefer_verbs

        return prefer_verbs.evaluate(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        from workbench.recipes.tasks.prefer import planned_preferences

        single, looked, once = planned_preferences.planned(config, run)
        return dry_text(single, looked=looked, once=once)

    def plan_notes(self, config: RunConfig) -> Sequence[str]:
        if not config.prefer.compares:
            return ()
        reference = token_reference.named(preference_reference.wanted(config), config)
        if reference.source.model.id == config.model.id:
            return ()
        return [f"The reference, {reference.source.name}, is taken to be as large as the model that trains."]

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.survey(files, PreferenceEncoder(text_verbs.conversations(config)))

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        return {"reference": preference_reference.files(config)}


TASK = PreferenceTask()
