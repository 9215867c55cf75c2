"""The task `reinforce` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import RunConfig
from workbench.data.text.prompts import PromptEncoder
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.recipes.task import DryTask, RowFile, Scores, ScoringOptions
from workbench.recipes.tasks.reinforce import reinforce_run
from workbench.recipes.tasks.reinforce.reinforce_run import PlannedRollouts, ReinforceRun
from workbench.recipes.tasks.sft.task import TokenTask, dry_text
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.tasks.sft.text_verbs import TextReference


class ReinforceTask(TokenTask):
    """Answers that the model writes itself earn higher rewards."""

    scores_later = False

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> ReinforceRun:
        return reinforce_run.begin(config, run, callback, loader=loader)

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        return reinforce_run.main(config, run, callback)

    def inspect(self, config: RunConfig) -> Inspection:
        from workbench.recipes.tasks.reinforce import reinforce_verbs

        return reinforce_verbs.inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.reinforce import reinforce_verbs

        return reinforce_verbs.evaluate(run, config, trust=turn.trust)

    def outputs(self, run: Path, config: RunConfig) -> TextReference:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.outputs(run, config, prompts_alone=True)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, template, data, _ = reinforce_run.prepare(config)
        return dry_text(PlannedRollouts(config, run, Silent(), tokenizer, template, data, judges=[]))

    def plan_notes(self, config: RunConfig) -> Sequence[str]:
        return list(_uncounted(config))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.survey(files, PromptEncoder(text_verbs.conversations(config)))


def _uncounted(config: RunConfig) -> Iterator[str]:
    if (url := config.reinforce.rollouts.url) is not None:
        yield f"Answers are written at {url}, whose memory is its own."
    yield (
        "Writing and rewarding the answers of each step is not counted, in time and memory; each answer is taken "
        "to be as long as it may be."
    )


TASK = ReinforceTask()
